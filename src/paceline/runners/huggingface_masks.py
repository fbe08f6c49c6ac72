"""Which keys a query attends to, by kind of attention layer: all before it, those of a window, or those of its chunk.

All keys are kept, so a rejected draft token never costs a key that was pushed out of a window; the mask hides what lies
outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.core.draft_tree import ancestors

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
REACH_NAMES = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """The reach of one kind of layer, in tokens; full attention has none."""

    name: str
    reach: int | None = None

    def within_reach(self, visible: Tensor, positions: Tensor, start: int) -> Tensor:
        """Of the keys that the nodes of a row see [width, keys], those within reach of their positions [nodes]."""
        if self.reach is None:
            return visible
        count = positions.shape[0]
        keys = torch.arange(visible.shape[1])
        keys[start : start + count] = positions
        near, visible = self._near(positions[:, None], keys[None]), visible.clone()
        visible[:count] &= near
        return visible

    def _near(self, queries: Tensor, keys: Tensor) -> Tensor:
        assert self.reach is not None
        if self.name == CHUNKED:
            return keys // self.reach == queries // self.reach
        return keys > queries - self.reach


def visible_keys(parents: list[int], start: int, width: int, num_keys: int) -> Tensor:
    """bool [width, keys]: what the nodes of a row after `start` tokens see before any window."""
    count = len(parents)
    visible = torch.zeros(width, num_keys, dtype=torch.bool)
    visible[:, : max(start, 1)] = True  # padding sees something, or its softmax would be NaN
    visible[:count, start : start + count] = ancestors(parents)
    return visible


def attention_kinds(config: Any) -> list[AttentionKind]:
    """The kinds of attention layers that a config names."""
    config = config.get_text_config(decoder=True)
    names = set(getattr(config, "layer_types", None) or ())
    if not names:
        window = getattr(config, "sliding_window", None)
        names = {SLIDING if window and getattr(config, "use_sliding_window", True) else FULL}
    return [AttentionKind(name, _reach(config, name)) for name in sorted(names)]


def _reach(config: Any, name: str) -> int | None:
    reach = getattr(config, REACH_NAMES[name], None) if name in REACH_NAMES else None
    return int(reach) if reach else None


def storing_layers(config: Any) -> dict[str, int]:
    """The last layer of each kind of attention that stores keys of its own. config: of the text part."""
    kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    own = len(kinds) - int(getattr(config, "num_kv_shared_layers", None) or 0)
    return {kind: layer for layer, kind in enumerate(kinds[:own])}


def additive(visible: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """bool [batch, width, keys] -> what attention adds to its scores [batch, 1, width, keys]."""
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
    return mask[:, None].to(device)
