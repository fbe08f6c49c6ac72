"""Quantized checkpoints as people download them: read to the last bit, and run through the public doors.

tests/support/quantized.py writes them from the definition of each layout, and says which weights they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import SpeculativeDecoder
from paceline.cli import main
from paceline.errors import WeightsError
from paceline.quantization import registry, stored_linear
from paceline.quantization.packed import PackedLinear
from paceline.runners.native import NativeRunner
from tests.support.quantized import AWQ, CASES, Case, awq, write_quantized

PROMPT = "to be or not to be, that is the question: to be"
Write = Callable[[str], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """A case's folder with its packed and its unpacked checkpoint, written once."""
    folders: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in folders:
            folders[name] = write_quantized(tmp_path_factory.mktemp(name), CASES[name])
        return folders[name]

    return write


def linears(folder: Path) -> list[Any]:
    runner = NativeRunner.load(folder, "tiny", "float32", "cpu", 128)
    return list(runner.model.linears())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_weights_are_read_to_the_last_bit(name: str, written: Write) -> None:
    folder = written(name)
    pairs = list(zip(linears(folder / "packed"), linears(folder / "unpacked"), strict=True))
    assert pairs and all(torch.equal(*(linear.dequantize(torch.float32) for linear in pair)) for pair in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_packed_for_a_gpu_the_weights_are_the_same(
    name: str, written: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(name)
    expected = linears(folder / "unpacked")
    monkeypatch.setattr(stored_linear, "on_host", lambda device: False)
    packed = linears(folder / "packed")
    assert any(isinstance(linear, PackedLinear) for linear in packed)
    for linear, other in zip(packed, expected, strict=True):
        assert torch.equal(linear.dequantize(torch.float32), other.dequantize(torch.float32))
    smaller = sum(linear.nbytes for linear in packed if isinstance(linear, PackedLinear))
    larger = sum(other.nbytes for linear, other in zip(packed, expected) if isinstance(linear, PackedLinear))
    assert smaller < larger / (2 if "8" in name or name in ("int-quantized", "float-quantized") else 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_greedy_text_is_that_of_the_unpacked_weights(name: str, written: Write) -> None:
    folder, options = written(name), {"max_new_tokens": 24, "ignore_eos": True}
    with SpeculativeDecoder(folder / "unpacked", runner="native") as plain:
        expected = plain.generate(PROMPT, **options).token_ids
    with SpeculativeDecoder(folder / "packed", runner="native", method="ngram", num_draft_tokens=3) as decoder:
        result = decoder.generate(PROMPT, **options)
    assert result.token_ids == expected and result.stats.drafted > 0


@pytest.mark.slow
def test_the_command_line_runs_a_quantized_checkpoint_by_itself(
    written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written("awq-64")
    arguments = ["generate", PROMPT, "--max-new-tokens", "8", "--json"]
    documents = []
    for place in ("packed", "unpacked"):
        assert main([*arguments, "--model", str(folder / place)]) == 0
        documents.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert documents[0]["token_ids"] == documents[1]["token_ids"]


def test_a_dtype_converts_what_a_checkpoint_stores(written: Write) -> None:
    folder = written("fp8-blocks")
    texts = []
    for place in ("packed", "unpacked"):
        with SpeculativeDecoder(folder / place, dtype="int8") as decoder:
            assert decoder.info.dtype == "int8"
            texts.append(decoder.generate(PROMPT, max_new_tokens=12).token_ids)
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_bias_beside_packed_weights_is_added(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path, Case(awq(32), AWQ, changes={"attention_bias": True}))
    state = load_file(folder / "unpacked" / "model.safetensors")
    biases = {name: torch.randn_like(bias) for name, bias in state.items() if name.endswith("_proj.bias")}
    assert biases
    for place in ("packed", "unpacked"):
        file = folder / place / "model.safetensors"
        save_file(load_file(file) | biases, file, metadata={"format": "pt"})
    texts = []
    for place in ("packed", "unpacked"):
        with SpeculativeDecoder(folder / place, runner="native") as decoder:
            texts.append(decoder.generate(PROMPT, max_new_tokens=12).token_ids)
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path, CASES["fp8-blocks"])
    file = folder / "packed" / "model.safetensors"
    state = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    save_file(state | {name: torch.ones(7, 3)}, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"scales of model\.layers\.0\.mlp\.down_proj"):
        SpeculativeDecoder(folder / "packed", runner="native")


@pytest.mark.slow
def test_a_weight_of_another_size_is_named(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path, CASES["awq-64"])
    config = folder / "packed" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 256}))
    with pytest.raises(WeightsError, match="384 by 128; the config says 512 by 128"):
        SpeculativeDecoder(folder / "packed", runner="native")


@pytest.mark.slow
def test_a_nonzero_bias_that_the_architecture_does_not_add_is_an_error(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path, CASES["gptq-symmetric"])
    file = folder / "packed" / "model.safetensors"
    name = "model.layers.0.mlp.down_proj.bias"
    save_file(load_file(file) | {name: torch.ones(128, dtype=torch.float16)}, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"down_proj\.bias"):
        SpeculativeDecoder(folder / "packed", runner="native")


@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "hqq"},
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            "sparsity_config": {"format": "sparse-24-bitmask"},
        },
    ],
    ids=lambda stored: stored["quant_method"],
)
def test_a_layout_that_is_not_read_is_left_to_transformers(stored: dict[str, Any]) -> None:
    from types import SimpleNamespace

    assert registry.format_of(SimpleNamespace(quantization_config=stored)) is None


@pytest.mark.parametrize("name", registry.read_only_names())
def test_no_weight_is_converted_to_a_format_of_checkpoints(name: str) -> None:
    from paceline.errors import CapabilityError

    assert name not in registry.names()
    with pytest.raises(CapabilityError, match="read from a checkpoint"):
        registry.get(name).quantize(torch.randn(4, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_weights_stay_packed_and_drafted_text_is_plain_text(name: str, written: Write) -> None:
    folder, options = written(name) / "packed", {"max_new_tokens": 100, "ignore_eos": True}
    runner = NativeRunner.load(folder, "tiny", "bfloat16", "cuda", 128)
    assert any(isinstance(linear, PackedLinear) for linear in runner.model.linears())
    with SpeculativeDecoder(folder, device="cuda") as plain:
        expected = plain.generate(PROMPT, **options).token_ids
    with SpeculativeDecoder(folder, device="cuda", method="ngram", num_draft_tokens=7) as decoder:
        assert decoder.generate(PROMPT, **options).token_ids == expected
