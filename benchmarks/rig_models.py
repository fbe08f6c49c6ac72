"""The models of the rig, made on the device from one small model.

The inflated model generates what the small one generates (its new dimensions, heads and layers contribute exactly zero)
and costs what its sizes cost; the draft model is the small model with every projection rounded to 4 bits; a head of the
small model reads the hidden states of the inflated one.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from paceline.heads.dflash import DFlashHead
from paceline.heads.eagle import EagleHead
from paceline.heads.registry import load_head

LARGE = {"hidden_size": 4224, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 22}
# A pair of 1.5B and 0.5B with a vocabulary of 152,000, as Qwen's. Heads keep the small model's 64 entries, so there are
# twice as many of half the size; fewer layers or groups than the small model's there cannot be.
QWEN_VOCABULARY = 151936
QWEN_LARGE = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 30, "num_key_value_heads": 4,
    "num_attention_heads": 24, "vocab_size": QWEN_VOCABULARY,
}  # fmt: skip
QWEN_SMALL = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 30, "num_key_value_heads": 4,
    "num_attention_heads": 16, "vocab_size": QWEN_VOCABULARY,
}  # fmt: skip
# Of the target, and of the draft where it is not the small model itself.
SHAPES: dict[str, tuple[dict[str, int], dict[str, int] | None]] = {
    "large": (LARGE, None),
    "small": (QWEN_LARGE, QWEN_SMALL),
}
GROUP = 64  # weights that share a scale in the low-bit copy
DTYPE = torch.bfloat16
State = dict[str, Tensor]


def doubled_sizes(small: Any) -> dict[str, int]:
    """Sizes of a dry run: the small model's, each twice, so that every part of the rig runs on any machine."""
    return {name: 2 * getattr(small, name) for name in LARGE}


def large_config(small: Any, sizes: dict[str, int]) -> Any:
    large = AutoConfig.for_model(**small.to_dict())
    heads = sizes["num_key_value_heads"] * (small.num_attention_heads // small.num_key_value_heads)
    for name, value in ({"num_attention_heads": heads} | sizes | {"head_dim": small.head_dim}).items():
        setattr(large, name, value)
    large.rms_norm_eps = small.rms_norm_eps * small.hidden_size / large.hidden_size
    return large


def inflated(state: State, small: Any, large: Any, device: str) -> State:
    """The small model's weights in the corner of larger ones.

    What is new adds zeros to the residual stream, so nothing else that is new has an effect; norms average over more
    entries and are scaled to make up for it.
    """
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(large).state_dict().items()}
    if large.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    shrink = math.sqrt(small.hidden_size / large.hidden_size)
    old = {name: _regrouped(name, weight, small, large) for name, weight in state.items()}
    return {name: _inflated_weight(name, shape, old.get(name), shrink, device) for name, shape in shapes.items()}


def _regrouped(name: str, weight: Tensor, small: Any, large: Any) -> Tensor:
    """Heads that share a key stay together: zeros stand for those that a larger group has more."""
    axis = {"q_proj": 0, "o_proj": 1}.get(name.split(".")[-2])
    old, new = (config.num_attention_heads // config.num_key_value_heads for config in (small, large))
    if axis is None or old == new:
        return weight
    heads = weight.unflatten(axis, (small.num_key_value_heads, old, -1))
    after = heads.ndim - axis - 2  # dimensions behind the heads of a group
    return functional.pad(heads, [0, 0] * after + [0, new - old]).flatten(axis, axis + 2)


def _inflated_weight(name: str, shape: torch.Size, old: Tensor | None, shrink: float, device: str) -> Tensor:
    kind = name.split(".")[-2]
    new = torch.zeros(shape, device=device, dtype=DTYPE)
    if "norm" in kind:
        new.fill_(1.0)
    elif kind not in ("embed_tokens", "o_proj", "down_proj"):
        new.normal_(0.0, 0.02)
    if old is not None:
        corner = tuple(slice(size) for size in old.shape)
        new[corner] = (old.float() * shrink).to(DTYPE) if "norm" in kind else old
    return new


def rounded(state: State, bits: int) -> State:
    """Every projection rounded to 2**bits even steps between the ends of each group of a row."""
    copy = dict(state)
    for name, weight in state.items():
        if name.endswith("_proj.weight"):
            groups = weight.float().view(weight.shape[0], -1, min(GROUP, weight.shape[1]))
            low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
            step = ((high - low) / (2**bits - 1)).clamp_min(1e-8)
            copy[name] = (((groups - low) / step).round() * step + low).view_as(weight).to(DTYPE)
    return copy


def inflated_head(folder: str | Path, embedding: Tensor, hidden_size: int, device: str) -> EagleHead:
    """A head of the small model that reads the inflated one's hidden states: they are the small one's, then zeros."""
    head = load_head(folder, EagleHead, dtype=DTYPE, device=device)
    config: Any = replace(head.config, target_hidden_size=hidden_size, own_embeddings=True)
    wide = type(head)(config).to(device, DTYPE)
    wide.load_state_dict(_wide_state(head, embedding, hidden_size))
    return wide.eval().requires_grad_(False)


def inflated_block_head(folder: str | Path, embedding: Tensor, hidden_size: int, device: str) -> DFlashHead:
    """The same of a block drafter, with the small model's embeddings and its rows of them as the output head."""
    head = load_head(folder, DFlashHead, dtype=DTYPE, device=device)
    config = replace(head.config, target_hidden_size=hidden_size, own_embeddings=True, own_lm_head=True)
    embedding = embedding[: config.vocab_size, : config.hidden_size]  # of an inflated draft model: the small one's
    wide = DFlashHead(config).to(device, DTYPE)
    wide.load_state_dict(_wide_state(head, embedding, hidden_size) | {"lm_head.weight": embedding[head.target_ids]})
    return wide.eval().requires_grad_(False)


def _wide_state(head: EagleHead | DFlashHead, embedding: Tensor, hidden_size: int) -> State:
    """The weights of a head whose first product meets wider states, with the small model's embeddings."""
    config, state = head.config, head.state_dict()
    narrow = state["fc.weight"].view(config.hidden_size, -1, config.target_hidden_size)
    padded = functional.pad(narrow, (0, hidden_size - config.target_hidden_size))
    return state | {"fc.weight": padded.flatten(1), "embed_tokens.weight": embedding}


def in_transformers(state: State, config: Any, device: str) -> Any:
    """The same weights, not copied, as a model of transformers."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    full = {"lm_head.weight": state["model.embed_tokens.weight"], **state}
    model.load_state_dict(full, strict=False, assign=True)
    rotary = type(model.model.rotary_emb)(config)
    model.model.rotary_emb = rotary.to(device)
    model.generation_config.eos_token_id = config.eos_token_id
    return model.eval()


def pass_bytes(state: State) -> int:
    """Bytes of every matrix that a pass reads from end to end: what the memory-bandwidth limit counts."""
    head = state.get("lm_head.weight", state["model.embed_tokens.weight"])
    matrices = [weight for name, weight in state.items() if name.endswith("_proj.weight")]
    return sum(weight.numel() * weight.element_size() for weight in [*matrices, head])


def write_model(folder: Path, state: State, config: Any, tokenizer: Any) -> None:
    """A directory that the command line takes."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "model.safetensors")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- the pair ---------------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """The weights of the inflated target and of its draft model."""

    large: State
    large_config: Any
    small: State
    small_config: Any
    tokenizer: Any
    device: str


def build_pair(folder: str, device: str, *, dry_run: bool, shape: str = "large") -> Pair:
    """dry_run: inflate to twice the small model only. shape: one of SHAPES."""
    small = AutoConfig.from_pretrained(folder)
    files = sorted(Path(folder).glob("*.safetensors"))
    state = {name: weight.to(device, DTYPE) for file in files for name, weight in load_file(file).items()}
    target_sizes, draft_sizes = (doubled_sizes(small), None) if dry_run else SHAPES[shape]
    config, draft, draft_config = large_config(small, target_sizes), rounded(state, 4), small
    if draft_sizes is not None:
        draft_config = large_config(small, draft_sizes)
        draft = inflated(draft, small, draft_config, device)
    large = inflated(state, small, config, device)
    return Pair(large, config, draft, draft_config, AutoTokenizer.from_pretrained(folder), device)


def read_prompts(folder: Path, tokenizer: Any, count: int) -> list[list[int]]:
    """Every sixth development prompt, through the chat template: 23 of four kinds."""
    lines = [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    prompts = []
    for line in lines[3::6][:count]:
        messages = [{"role": "user", "content": line["prompt"]}]
        output = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        prompts.append([int(token) for token in output["input_ids"]])
    return prompts
