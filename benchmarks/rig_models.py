"""The models of the GPU rig, made on the device from one small model.

The inflated model says what the small one says (its new widths, heads and layers contribute exactly zero) and costs
what its shape costs; the draft is the small model with every projection rounded to 4 bits; a head of the small model
reads the inflated one's states.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, LlamaForCausalLM

from paceline.heads.eagle import EagleHead
from paceline.heads.files import load_eagle
from paceline.models import llama
from paceline.models.checkpoint import Checkpoint
from paceline.runners.native.kv_cache import block_manager
from paceline.runners.native.loading import model_info
from paceline.runners.native.runner import NativeRunner

LARGE = {"hidden_size": 4224, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 22}
GROUP = 64  # weights that share a scale in the low-bit copy


def large_config(small: Any) -> Any:
    large = AutoConfig.for_model(**small.to_dict())
    heads = LARGE["num_key_value_heads"] * (small.num_attention_heads // small.num_key_value_heads)
    for name, value in (LARGE | {"num_attention_heads": heads, "head_dim": small.head_dim}).items():
        setattr(large, name, value)
    large.rms_norm_eps = small.rms_norm_eps * small.hidden_size / large.hidden_size
    return large


def inflated(state: dict[str, Tensor], small: Any, large: Any) -> dict[str, Tensor]:
    """The small model's weights in the corner of larger ones. What writes into the residual stream writes zeros there,
    so whatever else is new meets only zeros; norms average over more entries and are scaled to make up for it."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(large).state_dict().items()}
    shrink = math.sqrt(small.hidden_size / large.hidden_size)
    made: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if name == "lm_head.weight" and large.tie_word_embeddings:
            continue
        kind = name.split(".")[-2]
        new = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
        if "norm" in kind:
            new.fill_(1.0)
        elif kind not in ("embed_tokens", "o_proj", "down_proj"):
            new.normal_(0.0, 0.02)
        old = state.get(name)
        if old is not None:
            corner = tuple(slice(size) for size in old.shape)
            new[corner] = (old.float() * shrink).bfloat16() if "norm" in kind else old
        made[name] = new
    return made


def rounded(state: dict[str, Tensor], bits: int) -> dict[str, Tensor]:
    """Every projection rounded to 2**bits even steps between the ends of each group of a row."""
    made = dict(state)
    for name, weight in state.items():
        if name.endswith("_proj.weight"):
            groups = weight.float().view(weight.shape[0], -1, GROUP)
            low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
            step = ((high - low) / (2**bits - 1)).clamp_min(1e-8)
            made[name] = (((groups - low) / step).round() * step + low).view_as(weight).bfloat16()
    return made


def inflated_head(folder: str | Path, embedding: Tensor, wide: int) -> EagleHead:
    """A head of the small model that reads the inflated one's states: they are the small one's with zeros behind."""
    head = load_eagle(folder, dtype=torch.bfloat16, device="cuda")
    config, state = head.config, head.state_dict()
    narrow = state["fc.weight"].view(config.hidden_size, -1, config.target_hidden_size)
    padded = torch.nn.functional.pad(narrow, (0, wide - config.target_hidden_size))
    state |= {"fc.weight": padded.flatten(1), "embed_tokens.weight": embedding}
    made = EagleHead(replace(config, target_hidden_size=wide, own_embeddings=True)).to("cuda", torch.bfloat16)
    made.load_state_dict(state)
    return made.eval().requires_grad_(False)


def native(
    state: dict[str, Tensor], config: Any, name: str, kv_cache_tokens: int, *, batch_invariant: bool = False
) -> NativeRunner:
    model = llama.load(Checkpoint(state.get, state, torch.bfloat16, "cuda"), llama.config_from_hf(config))
    info = model_info(name, model.config, frozenset([config.eos_token_id]), "cuda", "bfloat16")
    return NativeRunner(model, info, block_manager(kv_cache_tokens), batch_invariant=batch_invariant)


def in_transformers(state: dict[str, Tensor], config: Any) -> Any:
    """The same weights, not copied, as transformers runs them."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    full = state | {"lm_head.weight": state["model.embed_tokens.weight"]}
    model.load_state_dict(full, strict=False, assign=True)
    rotary = type(model.model.rotary_emb)(config)
    model.model.rotary_emb = rotary.cuda()
    model.generation_config.eos_token_id = config.eos_token_id
    return model.eval()


def write_model(place: Path, state: dict[str, Tensor], config: Any, tokenizer: Any) -> None:
    """A directory that the command line takes."""
    place.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in state.items()}, place / "model.safetensors")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(place)
    tokenizer.save_pretrained(place)
