"""A weight format is one module: registered, it names a dtype and reads checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.types import Row
from paceline.errors import OptionError
from paceline.layers.gemm_types import Linear
from paceline.layers.linear import UnquantizedLinear
from paceline.quantization import registry
from paceline.runners.loading import dtype_named
from paceline.runners.native import NativeRunner, is_native, read_config
from tests.runners.native.models import tiny


class HalvedWeights:
    """A toy format: checkpoints store half of every weight under another name."""

    def quantize(self, weight: torch.Tensor) -> Linear:
        return UnquantizedLinear(weight.round(decimals=1))

    def matches(self, config: Any) -> bool:
        return config.quantization_config.get("quant_method") == "halved"

    def load(self, tensors: registry.Tensors, names: list[str]) -> Linear | None:
        if f"{names[0]}.half" not in tensors:
            return None  # the LM head is stored as it is
        return UnquantizedLinear(2 * torch.cat([tensors.raw(f"{name}.half") for name in names]))


@pytest.fixture
def halved() -> Any:
    registry.register("halved", HalvedWeights())
    yield
    registry.unregister("halved")


def test_names_of_formats_are_dtypes(halved: None) -> None:
    assert registry.names() == ("int8", "int4", "fp8", "halved")
    assert dtype_named("halved", "cpu") == "halved"
    with pytest.raises(OptionError, match="int8, int4"):
        registry.get("int2")


def test_a_format_of_one_file_converts_at_load(halved: None, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    runner = NativeRunner.load(tmp_path, "tiny", "halved", "cpu", 128)
    head = runner.model.lm_head.dequantize(torch.float32)
    assert torch.equal(head, head.round(decimals=1)) and runner.info.dtype == "halved"


def test_a_format_of_one_file_reads_its_checkpoints(halved: None, tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    for name in [name for name in state if name.endswith("_proj.weight")]:
        state[name.removesuffix("weight") + "half"] = state.pop(name) / 2
    save_file(state, file, metadata={"format": "pt"})
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(document | {"quantization_config": {"quant_method": "halved"}}))
    assert is_native(read_config(tmp_path, "tiny"))
    runner = NativeRunner.load(tmp_path, "tiny", "float32", "cpu", 128)
    logits = runner.forward([Row.chain(runner.new_cache(), [1, 2, 3])]).logits
    with torch.no_grad():
        torch.testing.assert_close(logits, model(torch.tensor([[1, 2, 3]])).logits[0], rtol=1e-4, atol=1e-4)


def test_a_stored_format_that_is_not_registered_is_none() -> None:
    assert registry.format_of(SimpleNamespace(quantization_config={"quant_method": "halved"})) is None
    assert registry.format_of(SimpleNamespace()) is None
