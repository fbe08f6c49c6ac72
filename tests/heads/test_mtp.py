"""MTP heads as they are published: every spelling is read, what does not fit is named, what is written is read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.errors import OptionError, WeightsError
from paceline.heads.mtp import MtpHead, load_mtp
from paceline.heads.mtp_names import find_names
from paceline.heads.registry import load_head, save_head
from tests.support.families import tiny_family_config
from tests.support.mtp import (
    EXPERTS,
    FAMILIES,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    head_tensors,
    random_tensors,
    several_modules,
)
from tests.support.mtp_heads import toy_mtp_head


def write_head(folder: Path, family: str, tensors: dict[str, Tensor], **changes: Any) -> Path:
    """Only a head, with the config of its target."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_family_config(family, {}).to_dict()
    (folder / "config.json").write_text(json.dumps({**config, **changes}, default=str))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_published_names_load_and_survive_writing(model_type: str, tmp_path: Path) -> None:
    head = load_mtp(write_head(tmp_path / "old", model_type, head_tensors(model_type)), model_type)
    save_head(head, tmp_path / "new")
    again = load_head(tmp_path / "new", MtpHead)
    assert head.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in head.state_dict().items())
    published = head_tensors(model_type)
    names, copies = load_file(tmp_path / "new" / "model.safetensors").keys(), ("embed_tokens.weight", "head.weight")
    assert names == {name for name in published if not name.endswith(copies)}
    norms = ("mtp.norm", f"model.layers.{LAYERS}.shared_head.norm", "model.mtp.layers.0.final_layernorm")
    [norm] = [published[f"{name}.weight"] for name in norms if f"{name}.weight" in published]
    assert torch.equal(again.norm.weight, norm)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_speculators_layout_holds_the_same_head(model_type: str, tmp_path: Path) -> None:
    """What speculators writes for these families: mtp_layers.0.*, the target's config nested, no target inside."""
    head = load_mtp(write_head(tmp_path / "old", model_type, head_tensors(model_type)), model_type)
    save_head(head, tmp_path / "new", layout="speculators")
    again = load_head(tmp_path / "new", MtpHead)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in head.state_dict().items())
    assert all(name.startswith("mtp_layers.0.") for name in load_file(tmp_path / "new" / "model.safetensors"))
    rows = torch.randn(2, 1, 5, HIDDEN, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(5)[None]
    assert torch.equal(head.block(*rows, positions), again.block(*rows, positions))
    save_head(again, tmp_path / "family")
    assert load_file(tmp_path / "family" / "model.safetensors").keys() == head_tensors(model_type).keys()


def test_a_head_that_speculators_would_read_otherwise_is_not_written_so(tmp_path: Path) -> None:
    head = load_mtp(write_head(tmp_path, "glm4_moe", head_tensors("glm4_moe")), "glm")
    with pytest.raises(OptionError, match="no word for how this MTP head reads its inputs"):
        save_head(head, tmp_path / "new", layout="speculators")


@pytest.mark.parametrize("model_type", ["qwen3_next", "deepseek_v3", "mimo_v2_flash"])
def test_heads_of_several_modules_survive_writing(model_type: str, tmp_path: Path) -> None:
    tensors = several_modules(model_type, 2)
    head = load_mtp(write_head(tmp_path / "old", model_type, tensors), model_type)
    assert head.num_modules == head.max_draft_tokens == 2
    save_head(head, tmp_path / "new")
    written = load_file(tmp_path / "new" / "model.safetensors")
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    assert written.keys() == {name for name in tensors if not name.endswith(copies)}
    assert all(torch.equal(value, tensors[name]) for name, value in written.items())


def test_a_model_with_a_vision_part_has_its_head_at_the_top(tmp_path: Path) -> None:
    """Its language model is nested in the config and in the names of tensors; the head is not."""
    text = tiny_family_config("qwen3_5_text", {}).to_dict()
    folder = write_head(tmp_path, "qwen3_5", head_tensors("qwen3_5_text"), text_config=text)
    assert load_mtp(folder, "vision").config.hidden_size == HIDDEN


def test_stacked_experts_are_read_too(tmp_path: Path) -> None:
    """Some exports store all experts in one tensor."""
    tensors = head_tensors("qwen3_5_moe_text")
    one_by_one = load_mtp(write_head(tmp_path / "one", "qwen3_5_moe_text", tensors), "one")
    block = "mtp.layers.0.mlp.experts."
    experts = {name: tensors.pop(name) for name in list(tensors) if name.startswith(block)}
    gates, ups, downs = (
        [experts[f"{block}{index}.{part}_proj.weight"] for index in range(EXPERTS)] for part in ("gate", "up", "down")
    )
    tensors[f"{block}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gates, ups)])
    tensors[f"{block}down_proj"] = torch.stack(downs)
    stacked = load_mtp(write_head(tmp_path / "all", "qwen3_5_moe_text", tensors), "all")
    assert all(torch.equal(value, stacked.state_dict()[name]) for name, value in one_by_one.state_dict().items())


@pytest.mark.parametrize("model_type", ["qwen3_next", "deepseek_v3"])
def test_a_missing_tensor_is_named_as_the_file_names_it(model_type: str, tmp_path: Path) -> None:
    tensors = head_tensors(model_type)
    missing = next(name for name in tensors if name.endswith("self_attn.o_proj.weight"))
    del tensors[missing]
    with pytest.raises(WeightsError, match=r"self_attn\.o_proj\.weight is missing"):
        load_mtp(write_head(tmp_path, model_type, tensors), model_type)


def test_experts_that_are_not_all_there_are_named(tmp_path: Path) -> None:
    tensors = head_tensors("glm4_moe")
    del tensors[f"model.layers.{LAYERS}.mlp.experts.1.up_proj.weight"]
    with pytest.raises(WeightsError, match=r"incomplete: it has 4 gates, 3 ups"):
        load_mtp(write_head(tmp_path, "glm4_moe", tensors), "glm")


def test_fp8_heads_are_unpacked(tmp_path: Path) -> None:
    """DeepSeek publishes its head as its other layers: e4m3 with a scale a block."""
    tensors = head_tensors("deepseek_v3")
    name = f"model.layers.{LAYERS}.self_attn.o_proj.weight"
    weight = tensors[name]
    tensors[name], tensors[f"{name}_scale_inv"] = (weight / 0.5).to(torch.float8_e4m3fn), torch.full((1, 1), 0.5)
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = write_head(tmp_path, "deepseek_v3", tensors, quantization_config=stored)
    read = load_mtp(folder, "fp8").state_dict()["midlayer.block.self_attn.o_proj.weight"]
    assert torch.allclose(read, weight, rtol=0.07, atol=0.01) and not torch.equal(read, weight)


def test_frequencies_stay_exact_in_half_precision(tmp_path: Path) -> None:
    folder = write_head(tmp_path, "qwen3_5_text", head_tensors("qwen3_5_text"))
    full, half = (load_mtp(folder, "q", dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert half.fc.weight.dtype == torch.bfloat16
    for table, exact in zip(half.midlayer.tables.buffers(), full.midlayer.tables.buffers(), strict=True):
        assert table.dtype == torch.float32 and torch.equal(table, exact)


# --- MiMo -------------------------------------------------------------------------------------------------------------


def mimo_tensors() -> dict[str, Tensor]:
    shapes = {
        "input_proj": (HIDDEN, 2 * HIDDEN),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        **dict.fromkeys(("token_layernorm", "hidden_layernorm", "final_layernorm"), (HIDDEN,)),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (HIDDEN,)),
    }
    tensors = {f"{name}.weight": shape for name, shape in shapes.items()}
    biases = {f"self_attn.{part}_proj.bias": shapes[f"self_attn.{part}_proj"][:1] for part in "qkv"}
    return random_tensors("model.mtp_layers.0.", tensors | biases)


def test_mimo_puts_the_state_first_and_drafts_one_token(tmp_path: Path) -> None:
    """One row sees only itself, so attention is o(v(x)) and the whole head can be written down."""
    tensors = mimo_tensors()
    head = load_mtp(write_head(tmp_path, "qwen2", tensors, model_type="mimo", head_dim=HEAD_DIM), "mimo")
    assert head.max_draft_tokens == 1
    named = {name.removeprefix("model.mtp_layers.0."): value.double() for name, value in tensors.items()}
    embedding, state = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for position in (0, 5):  # at position 0 there is no embedding
        read = embedding if position else torch.zeros_like(embedding)
        parts = [rms(state, named["hidden_layernorm.weight"]), rms(read, named["token_layernorm.weight"])]
        x = named["input_proj.weight"] @ torch.cat(parts)
        value = named["self_attn.v_proj.weight"] @ rms(x, named["input_layernorm.weight"])
        value = value + named["self_attn.v_proj.bias"]
        x = x + named["self_attn.o_proj.weight"] @ value.view(KV_HEADS, -1).repeat_interleave(2, dim=0).flatten()
        normed = rms(x, named["post_attention_layernorm.weight"])
        inner = nn.functional.silu(named["mlp.gate_proj.weight"] @ normed) * (named["mlp.up_proj.weight"] @ normed)
        expected = rms(x + named["mlp.down_proj.weight"] @ inner, named["final_layernorm.weight"])
        rows = [part.float()[None, None] for part in (embedding, state)]
        out = head.block(*rows, torch.tensor([[position]]))
        assert torch.allclose(out[0, 0].double(), expected, atol=1e-5)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + 1e-6).sqrt() * weight


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_layer_of_the_target_is_no_head() -> None:
    assert find_names(["model.layers.1.eh_proj.weight", "model.layers.0.mlp.up_proj.weight"], num_layers=2) is None
    names = find_names(["model.language_model.layers.2.eh_proj.weight", "mtp_other.fc.weight"], num_layers=2)
    assert names is not None and list(names.stored) == ["fc.weight"]


def test_only_a_head_without_experts_is_captured() -> None:
    assert toy_mtp_head("qwen3_5_text").can_capture and not toy_mtp_head("deepseek_v3").can_capture
