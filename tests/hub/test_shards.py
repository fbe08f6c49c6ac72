"""Weights that are not all there: one line that says which file, whatever command meets them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from paceline import SpeculativeDecoder, cli
from paceline.errors import WeightsError
from paceline.hub.shards import check_whole, missing_files
from tests.runners.native.models import tiny
from tests.support.gguf import write_gguf
from tests.support.tiny import byte_tokenizer, tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    tiny_llama().save_pretrained(path, max_shard_size="60KB")
    byte_tokenizer().save_pretrained(path)
    return path


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def message_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(arguments) == 2
    [message] = capsys.readouterr().err.strip().splitlines()
    return message


@pytest.mark.parametrize("runner", ["auto", "hf"])
def test_a_missing_shard_is_named(runner: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, *_ = shards_of(folder)
    second.unlink()
    message = message_of(["generate", "-m", str(folder), "--runner", runner, "--device", "cpu", "hello"], capsys)
    assert second.name in message and first.name not in message and "missing" in message


@pytest.mark.parametrize("runner", ["auto", "hf"])
def test_a_shard_that_is_cut_short_is_named(runner: str, folder: Path) -> None:
    shard = shards_of(folder)[-1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="cut short") as caught:
        SpeculativeDecoder(str(folder), runner=runner)
    assert shard.name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"1234", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0{}more"])
def test_a_file_that_is_no_safetensors_is_damaged(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=r"model\.safetensors is damaged"):
        check_whole(path)


def test_an_index_of_pickled_weights_does_not_count_beside_safetensors(folder: Path) -> None:
    document = {"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(document))
    assert missing_files(folder) == []
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").unlink()
    assert missing_files(folder) == ["config.json", "tokenizer.json"]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.999])
def test_a_gguf_that_is_cut_short_is_one_line(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    whole = write_gguf(tmp_path / "whole.gguf", tiny(vocab_size=261)).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(share * len(whole))])
    message = message_of(["generate", "-m", str(tmp_path / "cut.gguf"), "--device", "cpu", "hello"], capsys)
    assert "cut.gguf" in message and "Traceback" not in message
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
