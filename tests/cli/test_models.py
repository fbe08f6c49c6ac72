"""paceline models: what is in the caches, what it is, and how it is removed."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runners.native.models import tiny
from tests.support.gguf import write_gguf


class Terminal(io.StringIO):
    """Standard input at which a person sits."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> Path:
    """A cache with the tiny model as the default one, and no Hub."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PACELINE_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    shutil.copytree(tiny_folder, folder / "SmolLM2-135M-Instruct")
    os.utime(folder / "SmolLM2-135M-Instruct", (1_000_000_000, 1_000_000_000))
    return folder


def hub_model(cache: Path, tiny_folder: Path) -> Path:
    """A download as huggingface_hub lays it out."""
    repository = cache.parent / "hub" / "models--someone--tiny"
    snapshot = repository / "snapshots" / ("a" * 40)
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    snapshot.mkdir(parents=True)
    for file in tiny_folder.iterdir():
        shutil.copy(file, repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / file.name)
    return repository


def test_list_shows_name_size_kind_and_last_use(run_command: Any, cache: Path) -> None:
    result = run_command("models", "list")
    assert result.status == 0
    assert "SmolLM2-135M-Instruct" in result.out and "default model" in result.out and "2001-09-" in result.out
    entry = run_command("models", "list", "--json").json()["models"][0]
    size = sum(file.stat().st_size for file in (cache / "SmolLM2-135M-Instruct").iterdir())
    assert (entry["name"], entry["kind"], entry["bytes"]) == ("SmolLM2-135M-Instruct", "default model", size)


def test_an_empty_cache_says_how_to_fill_it(run_command: Any, cache: Path) -> None:
    shutil.rmtree(cache)
    result = run_command("models", "list")
    assert result.status == 0 and "paceline fetch default" in result.out


@pytest.mark.slow
def test_a_converted_file_is_listed_and_was_used_just_now(run_command: Any, cache: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny(vocab_size=261))
    assert run_command("fetch", str(path)).status == 0
    first = run_command("models", "list", "--json").json()["models"][0]
    assert first["name"].startswith("tiny-") and first["kind"] == "GGUF, converted"
    os.utime(first["folder"], (1_000_000_000, 1_000_000_000))
    assert run_command("fetch", str(path)).status == 0
    again = run_command("models", "list", "--json").json()["models"][0]
    assert again["name"] == first["name"] and again["last_used"] > 1_000_000_000


def test_what_a_killed_process_left_is_no_model(run_command: Any, cache: Path) -> None:
    shutil.copytree(cache / "SmolLM2-135M-Instruct", cache / ".other.partial-x")
    assert len(run_command("models", "list", "--json").json()["models"]) == 1


@pytest.mark.parametrize("name", ["default", "SmolLM2-135M-Instruct", "TINY"])
def test_show_says_what_runs_the_model(run_command: Any, cache: Path, name: str) -> None:
    document = run_command("models", "show", name, "--json").json()
    assert (document["architecture"], document["layers"], document["reason"]) == ("LlamaForCausalLM", 3, "")
    assert "fast path" in document["runs_on"] and document["dtype"] == "float32"
    assert {"config.json", "model.safetensors"} <= set(document["files"])
    printed = run_command("models", "show", name).out
    assert "LlamaForCausalLM" in printed and "fast path" in printed and "model.safetensors" in printed


def test_show_says_why_transformers_runs_the_model(run_command: Any, cache: Path) -> None:
    path = cache / "SmolLM2-135M-Instruct" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "tanh"}))
    document = run_command("models", "show", "default", "--json").json()
    assert document["runs_on"] == "transformers" and "hidden_act" in document["reason"]


def test_rm_asks_and_keeps_what_is_not_confirmed(
    run_command: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = run_command("models", "rm", "default")
    assert refused.status == 2 and "--yes" in refused.err
    monkeypatch.setattr("io.StringIO", Terminal)
    assert run_command("models", "rm", "default", stdin="n\n").status == 1
    assert (cache / "SmolLM2-135M-Instruct").is_dir()
    assert run_command("models", "rm", "default", stdin="y\n").status == 0
    assert not (cache / "SmolLM2-135M-Instruct").exists()


def test_rm_with_yes_does_not_ask(run_command: Any, cache: Path) -> None:
    result = run_command("models", "rm", "SmolLM2-135M-Instruct", "--yes")
    assert result.status == 0 and result.out.startswith("removed SmolLM2-135M-Instruct")
    assert [path for path in cache.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("name", ["nothing", "..", "", "/", "SmolLM2"])
def test_only_a_model_of_the_cache_is_removed(run_command: Any, cache: Path, name: str) -> None:
    result = run_command("models", "rm", name, "--yes")
    assert result.status == 2 and "paceline models list" in result.err
    assert (cache / "SmolLM2-135M-Instruct").is_dir()


def test_downloads_of_the_hub_are_listed_shown_and_removed(run_command: Any, cache: Path, tiny_folder: Path) -> None:
    repository = hub_model(cache, tiny_folder)
    entries = run_command("models", "list", "--json").json()["models"]
    assert {entry["name"]: entry["kind"] for entry in entries}["someone/tiny"] == "Hugging Face Hub"
    assert run_command("models", "show", "someone/tiny", "--json").json()["layers"] == 3
    assert run_command("models", "rm", "someone/tiny", "--yes").status == 0
    assert not repository.exists()
