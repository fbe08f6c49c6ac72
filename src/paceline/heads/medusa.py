"""Medusa heads: several small heads over the target's last hidden state, each predicting one token further ahead.

y = W·(x + SiLU(Ax + b)), the residual part once or several times. The target's own head predicts token t+1 from the
state at t; Medusa head h predicts token t+2+h from the same state.

Two layouts of files:

original  `{h}.{l}.linear.weight`, `{h}.{l}.linear.bias`, `{h}.{L}.weight`      medusa_lm_head.{safetensors,pt}
vllm      `blocks.{h}.layers.{l}.weight`, `lm_heads.{h}.weight`, `token_map`    model.safetensors

Heads and layers are counted from the names: published configs say 2 heads where the file holds 5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import OptionError, WeightsError
from paceline.heads.checkpoint import (
    Checkpoint,
    Provenance,
    converted,
    declared_kind,
    install,
    number,
    plain_name,
    write_checkpoint,
)
from paceline.heads.registry import HeadSpec

ORIGINAL, VLLM = "original", "vllm"
ORIGINAL_LAYER = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
ORIGINAL_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")
VLLM_LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
VLLM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")
SHARED_HEAD = "lm_head.weight"  # vLLM: all heads share one output matrix


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Sizes of the heads. draft_vocab_size below vocab_size: the heads predict only the tokens of a map."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    bias: bool = True  # of the residual parts

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_layers < 0:
            raise OptionError(
                f"Medusa needs 1 head or more and 0 layers or more, not {self.num_heads} and {self.num_layers}"
            )


class _Residual(nn.Module):
    """x + SiLU(Ax + b)"""

    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)
        # An untrained head predicts what the target's own head predicts.
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        return states + functional.silu(self.linear(states))


class MedusaHeads(nn.Module):
    """All heads of one target."""

    token_map: Tensor

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(
            nn.Sequential(*[_Residual(config.hidden_size, config.bias) for _ in range(config.num_layers)])
            for _ in range(config.num_heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) for _ in range(config.num_heads)
        )
        self.register_buffer("token_map", torch.arange(config.draft_vocab_size))

    def forward(self, hidden: Tensor, heads: int | None = None) -> Tensor:
        """States after the final norm [..., hidden_size] -> logits of the first heads [heads, ..., vocab]."""
        count = len(self.lm_heads) if heads is None else heads
        hidden = hidden.to(self.lm_heads[0].get_parameter("weight").dtype)
        pairs = list(zip(self.blocks, self.lm_heads))[:count]
        return torch.stack([lm_head(block(hidden)) for block, lm_head in pairs])

    def start_from(self, weight: Tensor) -> None:
        """Start every head as a copy of the target's own head, [vocab_size, hidden_size]."""
        with torch.no_grad():
            for lm_head in self.lm_heads:
                lm_head.get_parameter("weight").copy_(weight[self.token_map])

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """Ids of the heads' own vocabulary -> ids of the target."""
        return self.token_map[ids] if self.config.draft_vocab_size < self.config.vocab_size else ids

    def choose_vocabulary(self, target_ids: Tensor) -> None:
        """Restrict the heads to these tokens of the target."""
        if target_ids.shape != self.token_map.shape:
            raise OptionError(f"these heads predict {self.config.draft_vocab_size} tokens, not {target_ids.numel()}")
        self.token_map.copy_(target_ids)


# --- files ------------------------------------------------------------------------------------------------------------


def matches(checkpoint: Checkpoint) -> bool:
    """Whether a tensor has one of Medusa's names."""
    patterns = (ORIGINAL_LAYER, ORIGINAL_HEAD, VLLM_LAYER, VLLM_HEAD)
    names = map(plain_name, checkpoint.tensors)
    return declared_kind(checkpoint) is None and any(pattern.fullmatch(name) for name in names for pattern in patterns)


def _module_name(name: str) -> str:
    """The name in `MedusaHeads` of a tensor of either layout."""
    if match := ORIGINAL_LAYER.fullmatch(name):
        return f"blocks.{match[1]}.{match[2]}.linear.{match[3]}"
    if match := VLLM_LAYER.fullmatch(name):
        return f"blocks.{match[1]}.{match[2]}.linear.{match[3]}"
    if match := ORIGINAL_HEAD.fullmatch(name):
        return f"lm_heads.{match[1]}.weight"
    return name


def load(checkpoint: Checkpoint) -> MedusaHeads:
    """The heads of a checkpoint. Raises WeightsError naming the tensor that does not fit."""
    tensors = {_module_name(name): value for name, value in checkpoint.tensors.items()}
    vllm = any(VLLM_LAYER.fullmatch(name) or VLLM_HEAD.fullmatch(name) for name in checkpoint.tensors)
    _spread_shared_head(tensors)
    config = _config_of(tensors, checkpoint)
    if "token_map" not in tensors and config.draft_vocab_size == config.vocab_size:
        tensors["token_map"] = torch.arange(config.vocab_size)
    heads = MedusaHeads(config)
    file_name = partial(_file_name, layout=VLLM if vllm else ORIGINAL, num_layers=config.num_layers)
    install(heads, Checkpoint(checkpoint.folder, checkpoint.config, tensors, file_name))
    return heads


def _spread_shared_head(tensors: dict[str, Tensor]) -> None:
    shared = tensors.pop(SHARED_HEAD, None)
    if shared is None:
        return
    for index in {name.split(".")[1] for name in tensors if name.startswith("blocks.")}:
        tensors.setdefault(f"lm_heads.{index}.weight", shared)


def _config_of(tensors: dict[str, Tensor], checkpoint: Checkpoint) -> MedusaConfig:
    lm_heads = [name for name in tensors if name.startswith("lm_heads.")]
    indices = [name.split(".")[1:3] for name in tensors if name.startswith("blocks.")]
    if not lm_heads:
        raise WeightsError(f"{checkpoint.folder} is incomplete: it has no output matrix of any head")
    num_heads = 1 + max([int(name.split(".")[1]) for name in lm_heads] + [int(head) for head, _ in indices])
    num_layers = 1 + max((int(layer) for _, layer in indices), default=-1)
    rows, hidden_size = tensors[lm_heads[0]].shape
    vocab_size = int(number(checkpoint.config, "vocab_size", rows))
    bias = any(name.endswith(".bias") for name in tensors)
    return MedusaConfig(num_heads, num_layers, hidden_size, max(vocab_size, rows), rows, bias)


def _file_name(name: str, layout: str, num_layers: int) -> str:
    """The name in a layout of a tensor of `MedusaHeads`."""
    parts = name.split(".")
    if parts[0] == "blocks" and len(parts) == 5:
        head, layer, end = parts[1], parts[2], parts[4]
        return f"{head}.{layer}.linear.{end}" if layout == ORIGINAL else f"blocks.{head}.layers.{layer}.{end}"
    if parts[0] == "lm_heads" and layout == ORIGINAL:
        return f"{parts[1]}.{num_layers}.weight"
    return name


def save(
    heads: MedusaHeads, folder: str | Path, *, layout: str, provenance: Provenance, dtype: torch.dtype | None
) -> None:
    """Write heads in the original layout or in vLLM's; only vLLM's can hold a reduced vocabulary."""
    config = heads.config
    reduced = config.draft_vocab_size < config.vocab_size
    if reduced and layout == ORIGINAL:
        raise OptionError("the original Medusa layout cannot hold a reduced vocabulary; write the layout vllm")
    tensors = {
        _file_name(name, layout, config.num_layers): converted(value, dtype)
        for name, value in heads.state_dict().items()
        if name != "token_map" or reduced
    }
    file = "medusa_lm_head.safetensors" if layout == ORIGINAL else "model.safetensors"
    write_checkpoint(folder, _written_config(config, layout, provenance.target), tensors, file)


def _written_config(config: MedusaConfig, layout: str, target: str) -> dict[str, Any]:
    if layout == ORIGINAL:
        return {
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
            "base_model_name_or_path": target,
        }
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": target,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.bias,
        "original_lm_head": False,
    }


SPEC = HeadSpec("medusa", MedusaHeads, matches, load, save, (ORIGINAL, VLLM))
