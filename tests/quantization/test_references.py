"""Unpacked weights are bit for bit those of the libraries that define the formats, where transformers carries them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from paceline.layers.mxfp4_experts import Mxfp4Matrices, unpacked
from paceline.quantization import compressed_tensors, fp8, mxfp4
from tests.quantization.fixtures.make_compressed_tensors import FILE, SCHEMES, config_of, packed


class Checkpoint(dict[str, torch.Tensor]):
    """Tensors of a checkpoint, by name."""

    dtype = torch.float32

    def __init__(self, tensors: dict[str, torch.Tensor] | None = None) -> None:
        super().__init__(tensors or {})
        self.quantization: dict[str, Any] = {}

    def raw(self, name: str) -> torch.Tensor:
        return self[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_blocks_of_fp8_are_what_transformers_unpacks(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    weight = torch.randn(256, 384).to(torch.float8_e4m3fn)
    scales = torch.randint(100, 130, (2, 3)).to(torch.uint8) if scale_dtype == torch.uint8 else torch.rand(2, 3)
    checkpoint = Checkpoint({"layer.weight": weight, "layer.weight_scale_inv": scales.to(scale_dtype)})
    checkpoint.quantization = {"weight_block_size": [128, 128]}
    linear = fp8.load(checkpoint, ["layer"])
    assert linear is not None
    expected = Fp8Dequantize(None)._dequantize_one(weight, scales.to(scale_dtype), output_dtype=dtype)
    assert torch.equal(linear.dequantize(dtype), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_mxfp4_are_what_transformers_unpacks(dtype: torch.dtype) -> None:
    blocks = torch.randint(0, 256, (3, 8, 4, 16), dtype=torch.uint8)
    scales = torch.randint(90, 150, (3, 8, 4), dtype=torch.uint8)
    checkpoint = Checkpoint({"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales})
    checkpoint.dtype = dtype
    assert mxfp4.is_packed(checkpoint, "experts.down_proj") and not mxfp4.is_packed(checkpoint, "experts")
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert torch.equal(mxfp4.load_experts(checkpoint, "experts.down_proj", packed=False), expected)
    kept = mxfp4.load_experts(checkpoint, "experts.down_proj", packed=True)
    assert isinstance(kept, Mxfp4Matrices) and kept.shape == expected.shape
    assert torch.equal(torch.stack([linear.dequantize(dtype) for linear in kept.linears()]), expected)
    assert sum(linear.nbytes for linear in kept.linears()) == blocks.nbytes + scales.nbytes


def test_every_exponent_of_mxfp4_is_a_power_of_two() -> None:
    blocks = torch.full((1, 255, 1, 16), 0x22, dtype=torch.uint8)  # every code stands for 1
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1)
    experts = unpacked(blocks[0].flatten(1), scales[0], torch.float64)[:, 0]
    assert experts.tolist() == [2.0 ** (exponent - 127) for exponent in range(255)]


def test_a_checkpoint_of_mxfp4_leaves_its_linear_layers_as_they_are() -> None:
    assert mxfp4.matches(SimpleNamespace(quantization_config={"quant_method": "mxfp4"}))
    assert mxfp4.load(Checkpoint(), ["layer"]) is None


# --- files that compressed-tensors has written (fixtures/make_compressed_tensors.py) ----------------------------------


@pytest.mark.parametrize("name", SCHEMES)
def test_layers_that_compressed_tensors_packed_are_what_it_unpacks(name: str) -> None:
    with safe_open(FILE, framework="pt") as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no dictionary)
        config = json.loads(file.metadata()[name])
    prefix = f"{name}/packed/"
    checkpoint = Checkpoint({f"layer.{key[len(prefix) :]}": stored[key] for key in stored if key.startswith(prefix)})
    checkpoint.quantization = config
    assert compressed_tensors.matches(SimpleNamespace(quantization_config=config))
    linear = compressed_tensors.load(checkpoint, ["layer"])
    assert linear is not None and torch.equal(linear.dequantize(torch.float32), stored[f"{name}/weight"].float())


def test_the_installed_compressed_tensors_still_packs_that_way() -> None:
    pytest.importorskip("compressed_tensors")
    with safe_open(FILE, framework="pt") as file:
        for name in SCHEMES:
            weight = file.get_tensor(f"{name}/weight")
            tensors, unpacked = packed(name, weight)
            checkpoint = Checkpoint({f"layer.{key}": tensor for key, tensor in tensors.items()})
            checkpoint.quantization = config_of(name)
            linear = compressed_tensors.load(checkpoint, ["layer"])
            assert linear is not None and torch.equal(linear.dequantize(torch.float32), unpacked.float())
