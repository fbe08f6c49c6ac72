"""Mixtures of experts in quantized checkpoints: MXFP4 as gpt-oss stores it, FP8 as Qwen3 stores its experts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import SpeculativeDecoder
from tests.support.families import Variant, tiny_family
from tests.support.quantized import fp8_blocks
from tests.support.tiny import byte_tokenizer

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
PROMPT = "to be or not to be, to be"


def write(folder: Path, model_type: str) -> tuple[Path, Path]:
    """A tiny model twice: one is going to be packed, one gets the same weights unpacked."""
    model = tiny_family(Variant(model_type, changes={"hidden_size": 64, "intermediate_size": 96, "vocab_size": 259}))
    folders = folder / "packed", folder / "unpacked"
    for place in folders:
        model.save_pretrained(place)
        byte_tokenizer().save_pretrained(place)
    return folders


def say_quantized(folder: Path, quantization: dict[str, object]) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization}))


def texts(*folders: Path) -> list[list[int]]:
    outputs = []
    for folder in folders:
        with SpeculativeDecoder(folder, runner="native", method="ngram", num_draft_tokens=3) as decoder:
            outputs.append(decoder.generate(PROMPT, max_new_tokens=16, ignore_eos=True).token_ids)
    return outputs


def mxfp4(experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales and unpacked weights of experts [experts, in_features, out_features]."""
    rows = experts.transpose(1, 2).unflatten(2, (-1, 32))  # [experts, out_features, groups, 32]
    exponents = (rows.abs().amax(dim=-1) / 6).log2().ceil()
    codes = (rows / exponents.exp2()[..., None])[..., None].sub(FP4).abs().argmin(dim=-1)
    blocks = (codes[..., 1::2] << 4 | codes[..., ::2]).to(torch.uint8)
    unpacked = (FP4[codes] * exponents.exp2()[..., None]).flatten(2).transpose(1, 2)
    return blocks, (exponents + 127).to(torch.uint8), unpacked


def test_gpt_oss_runs_its_experts_from_mxfp4(tmp_path: Path) -> None:
    packed, unpacked = write(tmp_path, "gpt_oss")
    state = load_file(unpacked / "model.safetensors")
    stored = dict(state)
    names = [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert names
    for name in names:
        blocks, scales, weight = mxfp4(stored.pop(name))
        state[name] = weight.contiguous()
        stored |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
    save_file(state, unpacked / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    say_quantized(packed, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    first, second = texts(packed, unpacked)
    assert first == second


def test_experts_of_qwen3_run_from_fp8(tmp_path: Path) -> None:
    packed, unpacked = write(tmp_path, "qwen3_moe")
    store = fp8_blocks(128, 128, "weight_scale_inv", torch.float32)
    state = load_file(unpacked / "model.safetensors")
    stored = dict(state)
    names = [name for name in state if ".mlp.experts." in name and name.endswith("_proj.weight")]
    assert names
    for name in names:
        layer = store(stored.pop(name))
        state[name] = layer.weight.contiguous()
        stored |= {f"{name.removesuffix('.weight')}.{end}": part for end, part in layer.tensors.items()}
    save_file(state, unpacked / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    say_quantized(packed, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    first, second = texts(packed, unpacked)
    assert first == second
