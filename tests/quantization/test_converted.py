"""Weights that are converted at load are kept on disk: the next start reads them, and the text is the same."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.cli import main
from paceline.layers import cpu_kernels
from paceline.quantization import converted, int4, int8, registry
from paceline.quantization.converted import ConvertedWeights, converted_weights
from paceline.quantization.int4 import pack_int4
from tests.support.tiny import write_tiny_model

PROMPT = "to be or not to be"
blocked = pytest.mark.skipif(cpu_kernels.library() is None, reason="no compiled kernels on this machine")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(converted, "MIN_BYTES", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of every weight that is converted."""
    shapes: list[tuple[int, ...]] = []
    for module in (int8, int4):
        quantize = module.quantize

        def count(weight: torch.Tensor, quantize: Any = quantize) -> Any:
            shapes.append(tuple(weight.shape))
            return quantize(weight)

        monkeypatch.setattr(module, "quantize", count)
    return shapes


def kept_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "quantized").glob("*"))


def generated(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """Through the command line."""
    arguments = ["generate", PROMPT, "--model", str(folder), "--max-new-tokens", "12", "--json", "--device", "cpu"]
    assert main([*arguments, "--quantize", name]) == 0
    tokens: list[int] = json.loads(capsys.readouterr().out.splitlines()[-1])["token_ids"]
    return tokens


@pytest.mark.slow
@blocked
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_second_start_converts_nothing_and_gives_the_same_text(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], conversions: list[tuple[int, ...]]
) -> None:
    first = generated(folder, name, capsys)
    assert conversions and len(kept_files(tmp_path)) == 1
    conversions.clear()
    assert generated(folder, name, capsys) == first and not conversions
    with SpeculativeDecoder(folder, quantize=name, method="ngram", device="cpu") as decoder:
        assert decoder.generate(PROMPT, max_new_tokens=12).token_ids == first
    assert not conversions and len(kept_files(tmp_path)) == 1


@pytest.mark.slow
@blocked
def test_a_changed_model_and_another_format_are_converted_anew(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], conversions: list[tuple[int, ...]]
) -> None:
    generated(folder, "int8", capsys)
    write_tiny_model(folder, seed=1)
    conversions.clear()
    changed = generated(folder, "int8", capsys)
    assert conversions and len(kept_files(tmp_path)) == 2
    other = write_tiny_model(tmp_path / "other", seed=1)
    assert generated(other, "int8", capsys) == changed, "the new weights, not the old"
    generated(folder, "int4", capsys)
    assert len(kept_files(tmp_path)) == 4


@pytest.mark.slow
@blocked
def test_a_damaged_file_is_made_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], conversions: list[tuple[int, ...]]
) -> None:
    first = generated(folder, "int8", capsys)
    file = kept_files(tmp_path)[0]
    file.write_bytes(file.read_bytes()[:100])
    conversions.clear()
    assert generated(folder, "int8", capsys) == first and conversions
    conversions.clear()
    assert generated(folder, "int8", capsys) == first and not conversions


@pytest.mark.slow
@blocked
def test_a_cache_that_cannot_be_written_costs_time_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = generated(folder, "int8", capsys)
    for file in kept_files(tmp_path):
        file.unlink()
    (tmp_path / "cache" / "quantized").rmdir()
    (tmp_path / "cache" / "quantized").write_text("a file where a folder should be")
    assert generated(folder, "int8", capsys) == first


@pytest.mark.slow
@blocked
def test_the_folder_is_bounded_and_what_was_used_longest_ago_goes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generated(folder, "int8", capsys)
    generated(folder, "int4", capsys)
    int4_file, int8_file = kept_files(tmp_path)
    os.utime(int4_file, (1, 1))
    other = write_tiny_model(tmp_path / "other", seed=1)
    size = int8_file.stat().st_size
    monkeypatch.setattr(converted, "MAX_BYTES", 2 * size + size // 4)
    generated(other, "int8", capsys)
    left = kept_files(tmp_path)
    assert int8_file in left and int4_file not in left and len(left) == 2
    monkeypatch.setattr(converted, "MAX_BYTES", size // 2)
    generated(write_tiny_model(tmp_path / "third", seed=2), "int8", capsys)
    assert kept_files(tmp_path) == left, "one that is too large by itself is not kept"


@pytest.mark.slow
def test_small_models_are_not_kept(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converted, "MIN_BYTES", 16 << 20)
    generated(folder, "int8", capsys)
    assert not kept_files(tmp_path)


def test_packed_weights_come_back_bit_for_bit(tmp_path: Path) -> None:
    """As a GPU has them."""
    path = tmp_path / "weights.safetensors"
    linear, codes = pack_int4(torch.randn(48, 256)), pack_int4(torch.randn(8, 96))  # the second no whole tile
    weights = ConvertedWeights(path, "cpu")
    assert weights.get("q+k") is None
    weights.add("q+k", linear)
    weights.add("#0", codes)
    weights.save()
    again = ConvertedWeights(path, "cpu")
    for key, expected in (("q+k", linear), ("#0", codes)):
        read = again.get(key)
        assert read is not None and torch.equal(read.dequantize(torch.float32), expected.dequantize(torch.float32))
    assert again.get("v") is None


def test_files_of_an_older_layout_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = converted_weights(folder, "int4", torch.bfloat16, "cuda")
    assert converted_weights(folder, "int4", torch.bfloat16, "cuda")._path == now._path
    monkeypatch.setattr(converted, "LAYOUT", converted.LAYOUT - 1)
    assert converted_weights(folder, "int4", torch.bfloat16, "cuda")._path != now._path


@pytest.mark.gpu
@pytest.mark.parametrize("name", registry.names())
def test_on_a_gpu_the_second_start_gives_the_same_text(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", hidden_size=256, intermediate_size=512, num_attention_heads=4)
    texts = []
    for _ in range(2):
        with SpeculativeDecoder(folder, device="cuda", quantize=name) as decoder:
            texts.append(decoder.generate(PROMPT, max_new_tokens=60, ignore_eos=True).token_ids)
    assert texts[0] == texts[1] and len(kept_files(tmp_path)) == 1
