"""Downloads from a Hub: resumed after a kill, checked, shared with huggingface_hub, and explained when they fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import cli
from paceline.errors import FetchError, ModelNotFound
from paceline.hub import download, locate
from tests.runners.native.models import tiny
from tests.support.fake_hub import COMMIT, FakeHub, fake_hub, use_hub
from tests.support.gguf import write_gguf
from tests.support.tiny import byte_tokenizer, tiny_llama

MODEL = "someone/tiny"
SHARDS = 3


@pytest.fixture(scope="module")
def sharded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in several safetensors files, beside the files that repositories also have."""
    folder = tmp_path_factory.mktemp("sharded")
    tiny_llama().save_pretrained(folder, max_shard_size="60KB")
    byte_tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("model-*.safetensors"))) >= SHARDS
    (folder / "README.md").write_text("# a model")
    (folder / "consolidated.safetensors").write_bytes(b"the same weights again")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_bytes(b"another form of the weights")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(download, "SECONDS_BETWEEN_ATTEMPTS", 0.01)
    with fake_hub() as served:
        use_hub(monkeypatch, served.endpoint, tmp_path / "home")
        yield served


def blobs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "home" / "hub" / "models--someone--tiny" / "blobs").iterdir())


def sizes(tmp_path: Path) -> list[int]:
    """Of the files that are there now: one that is being downloaded is renamed when it is whole."""
    found = []
    for path in blobs(tmp_path):
        with contextlib.suppress(FileNotFoundError):
            found.append(path.stat().st_size)
    return found


def go_offline(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, hub.endpoint, tmp_path / "home", offline=True)


def test_a_sharded_model_is_fetched_without_what_it_does_not_need(
    hub: FakeHub, sharded_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(MODEL, sharded_folder)
    assert cli.main(["fetch", MODEL]) == 0
    printed = capsys.readouterr()
    folder = Path(printed.out.splitlines()[-1])
    names = {path.name for path in folder.iterdir()}
    assert {path.name for path in sharded_folder.glob("model-*.safetensors")} < names
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < names
    assert not names & {"README.md", "consolidated.safetensors", "onnx"}
    assert f"downloading {MODEL}" in printed.err


@pytest.mark.slow
def test_what_is_fetched_generates_the_text_of_the_directory(
    hub: FakeHub, sharded_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(MODEL, sharded_folder)
    hub.repositories[MODEL].pop("consolidated.safetensors")
    options = ["--device", "cpu", "--max-new-tokens", "8", "hello"]
    assert cli.main(["generate", "-m", MODEL, *options]) == 0
    from_hub = capsys.readouterr().out
    copy = sharded_folder.parent / "copy"
    if not copy.exists():
        copy.mkdir()
        for path in sharded_folder.iterdir():
            if path.is_file() and not path.name.startswith("consolidated"):
                (copy / path.name).symlink_to(path)
    assert cli.main(["generate", "-m", str(copy), *options]) == 0
    assert from_hub == capsys.readouterr().out


@pytest.mark.slow
def test_a_second_fetch_downloads_nothing_and_huggingface_hub_finds_it(hub: FakeHub, sharded_folder: Path) -> None:
    from huggingface_hub import try_to_load_from_cache

    hub.add(MODEL, sharded_folder)
    folder = locate(MODEL).folder
    assert folder.name == COMMIT
    calls = [call for call in hub.calls if call.method != "LIST"]
    assert locate(MODEL).folder == folder
    assert [call for call in hub.calls if call.method != "LIST"] == calls
    assert try_to_load_from_cache(MODEL, "config.json") == str(folder / "config.json")


@pytest.mark.slow
def test_what_huggingface_hub_downloaded_is_used(hub: FakeHub, sharded_folder: Path) -> None:
    from huggingface_hub import hf_hub_download

    hub.add(MODEL, sharded_folder)
    for name in hub.repositories[MODEL]:
        hf_hub_download(MODEL, name)
    before = [call for call in hub.calls if call.method == "GET"]
    locate(MODEL)
    assert [call for call in hub.calls if call.method == "GET"] == before


@pytest.mark.slow
def test_a_connection_that_breaks_goes_on_where_it_broke(hub: FakeHub, sharded_folder: Path) -> None:
    hub.add(MODEL, sharded_folder)
    large = _with_large_file(hub)
    hub.break_at[large] = 300_000
    folder = locate(MODEL).folder
    first, second = hub.starts(large)
    assert first == 0 and 0 < second <= 400_000
    assert (folder / large).read_bytes() == hub.repositories[MODEL][large]


@pytest.mark.slow
def test_a_hub_that_refuses_for_a_moment_is_asked_again(hub: FakeHub, sharded_folder: Path) -> None:
    hub.add(MODEL, sharded_folder)
    large = _with_large_file(hub)
    hub.break_at[large], hub.answers[large] = 300_000, [503, 429]
    folder = locate(MODEL).folder
    assert len(hub.starts(large)) == 4
    assert (folder / large).read_bytes() == hub.repositories[MODEL][large]


@pytest.mark.slow
@pytest.mark.parametrize(("status", "asked"), [(404, 1), (500, download.ATTEMPTS)])
def test_a_hub_that_goes_on_refusing_is_an_error(hub: FakeHub, sharded_folder: Path, status: int, asked: int) -> None:
    hub.add(MODEL, sharded_folder)
    large = _with_large_file(hub)
    hub.answers[large] = [status] * 9
    with pytest.raises(FetchError):
        locate(MODEL)
    assert len(hub.starts(large)) == asked


def _with_large_file(hub: FakeHub, megabytes: int = 2) -> str:
    """Another file of weights that is too large for one piece."""
    from safetensors.torch import save

    values = torch.arange(megabytes << 18, dtype=torch.float32)
    hub.repositories[MODEL]["extra.safetensors"] = save({"extra": values})
    return "extra.safetensors"


@pytest.mark.slow
def test_a_damaged_file_is_not_kept(hub: FakeHub, sharded_folder: Path, tmp_path: Path) -> None:
    hub.add(MODEL, sharded_folder)
    shard = min(path.name for path in sharded_folder.glob("model-*.safetensors"))
    hub.damaged.add(shard)
    with pytest.raises(FetchError, match="hash is wrong") as caught:
        locate(MODEL)
    assert shard in str(caught.value) and "\n" not in str(caught.value)
    hub.damaged.clear()
    assert (locate(MODEL).folder / shard).read_bytes() == (sharded_folder / shard).read_bytes()
    assert not [path for path in blobs(tmp_path) if path.suffix == ".incomplete"]


def test_a_small_file_is_checked_too(hub: FakeHub, sharded_folder: Path) -> None:
    hub.add(MODEL, sharded_folder)
    hub.damaged.add("config.json")
    with pytest.raises(FetchError, match=r"config\.json was damaged"):
        locate(MODEL)


def test_a_token_is_sent(hub: FakeHub, sharded_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(MODEL, sharded_folder)
    hub.token = "hf_secret"
    with pytest.raises(ModelNotFound, match="HF_TOKEN"):
        locate(MODEL)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert locate(MODEL).folder.is_dir()


# --- without a connection ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_offline_the_cache_is_used(
    hub: FakeHub, sharded_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(MODEL, sharded_folder)
    folder = locate(MODEL).folder
    go_offline(hub, tmp_path, monkeypatch)
    assert locate(MODEL).folder == folder
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "home")  # nobody answers there
    assert locate(MODEL).folder == folder


@pytest.mark.slow
def test_offline_the_missing_files_are_named_without_an_address(
    hub: FakeHub,
    sharded_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub.add(MODEL, sharded_folder)
    folder = locate(MODEL).folder
    shards = sorted(path.name for path in sharded_folder.glob("model-*.safetensors"))
    for shard in shards[1:]:
        (folder / shard).unlink()
    go_offline(hub, tmp_path, monkeypatch)
    capsys.readouterr()
    assert cli.main(["generate", "-m", MODEL, "--device", "cpu", "hello"]) == 2
    [message] = capsys.readouterr().err.strip().splitlines()
    assert all(shard in message for shard in shards[1:]) and shards[0] not in message
    assert "HF_HUB_OFFLINE" in message and "http" not in message


@pytest.mark.parametrize(
    ("name", "missing"), [(MODEL, "config.json"), (f"{MODEL}:Q4_K_M", "*Q4_K_M*.gguf"), (f"{MODEL}:a.gguf", "a.gguf")]
)
def test_offline_with_nothing_here(
    name: str, missing: str, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_offline(hub, tmp_path, monkeypatch)
    with pytest.raises(FetchError) as caught:
        locate(name)
    assert missing in str(caught.value) and "://" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_that_the_hub_does_not_have(hub: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match="no model someone/other"):
        locate("someone/other")


# --- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import gguf

    folder = tmp_path_factory.mktemp("gguf")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny(vocab_size=261, **sizes)
    for tag, kind in (("Q8_0", gguf.GGMLQuantizationType.Q8_0), ("Q4_0", gguf.GGMLQuantizationType.Q4_0)):
        write_gguf(folder / f"tiny-{tag}.gguf", model, quantization=kind)
    (folder / "mmproj-tiny-Q8_0.gguf").write_bytes(b"pictures")
    return folder


@pytest.mark.slow
def test_a_name_with_a_type_picks_that_gguf_file(
    hub: FakeHub, gguf_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(MODEL, gguf_folder)
    options = ["--device", "cpu", "--max-new-tokens", "8", "hello"]
    texts = []
    for name in (f"{MODEL}:q8_0", f"{MODEL}:tiny-Q8_0.gguf", str(gguf_folder / "tiny-Q8_0.gguf")):
        assert cli.main(["generate", "-m", name, *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    assert {call.file for call in hub.calls if call.method == "GET"} == {"tiny-Q8_0.gguf"}


def test_a_type_that_is_not_there_says_which_are(hub: FakeHub, gguf_folder: Path) -> None:
    hub.add(MODEL, gguf_folder)
    with pytest.raises(ModelNotFound, match=f"{MODEL}:tiny-Q4_0.gguf, {MODEL}:tiny-Q8_0.gguf") as caught:
        locate(f"{MODEL}:Q5_K_M")
    assert "mmproj" not in str(caught.value)
    with pytest.raises(ModelNotFound, match="several GGUF files; name one of"):
        locate(MODEL)


@pytest.mark.slow
def test_a_listing_shows_the_gguf_and_its_type(
    hub: FakeHub, gguf_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(MODEL, gguf_folder)
    assert cli.main(["fetch", f"{MODEL}:Q8_0"]) == 0
    capsys.readouterr()
    assert cli.main(["models", "list", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["models"]}
    assert entries[MODEL]["format"] == "GGUF Q8_0"
    assert cli.main(["models", "show", MODEL, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["architecture"], list(shown["files"])) == ("llama", ["tiny-Q8_0.gguf"])


def test_every_part_of_a_gguf_is_fetched(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.hub.locate import local_path

    parts = [f"Q4_K_M/big-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    hub.repositories[MODEL] = {part: part.encode() for part in parts} | {"big-Q8_0.gguf": b"another"}
    first = local_path(f"{MODEL}:Q4_K_M")
    assert first.name == Path(parts[0]).name
    assert [(first.parent.parent / part).read_bytes() for part in parts] == [part.encode() for part in parts]
    (first.parent / Path(parts[1]).name).unlink()
    go_offline(hub, tmp_path, monkeypatch)
    with pytest.raises(FetchError, match=parts[1]):
        locate(f"{MODEL}:Q4_K_M")


# --- processes --------------------------------------------------------------------------------------------------------


def fetching(name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline", "fetch", name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy())


def finished(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_a_download_that_was_killed_goes_on_where_it_stopped(
    ending: signal.Signals, hub: FakeHub, sharded_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(MODEL, sharded_folder)
    large = _with_large_file(hub, megabytes=8)
    hub.wait_at[large] = 5 << 20
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "2")
    process = fetching(MODEL)
    assert hub.waiting.wait(180)
    deadline = time.monotonic() + 60
    while max(sizes(tmp_path), default=0) < 4 << 20 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(ending)  # after SIGINT it ends when the connection has been quiet for that long
    process.communicate(timeout=120)
    assert process.returncode != 0
    arrived = max(path.stat().st_size for path in blobs(tmp_path) if path.suffix == ".incomplete")
    assert arrived >= 4 << 20
    hub.wait_at.clear()
    monkeypatch.delenv("HF_HUB_DOWNLOAD_TIMEOUT")
    folder = Path(finished(fetching(MODEL)).strip())
    assert hub.starts(large)[0] == 0 and hub.starts(large)[-1] == arrived
    assert (folder / large).read_bytes() == hub.repositories[MODEL][large]
    assert not [path for path in blobs(tmp_path) if path.suffix == ".incomplete"]


@pytest.mark.slow
def test_two_processes_at_once_download_a_file_once(
    hub: FakeHub, sharded_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "180")
    hub.add(MODEL, sharded_folder)
    large = _with_large_file(hub, megabytes=4)
    hub.wait_at[large] = 1 << 20
    first = fetching(MODEL)
    assert hub.waiting.wait(180)
    second = fetching(MODEL)
    deadline = time.monotonic() + 120
    while sum(call.method == "LIST" for call in hub.calls) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)  # until the second has asked which files there are
    hub.go_on.set()
    assert finished(first) == finished(second)
    assert len(hub.starts(large)) == 1
