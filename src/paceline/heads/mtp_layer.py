"""One decoder layer of a transformers family as the layer of a head, whatever its attention and its experts are.

The layer, its norms and its rotary embedding are the family's own classes, so a head that is stored with its target
computes what the layers of the target compute. Keys and values go to the stores that all heads have.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import WeightsError
from paceline.heads.attention import ExactTables, KeyStore, KeyValues, causal_mask

FULL, SLIDING = "full_attention", "sliding_attention"
WITH_WINDOWS = ("mimo_v2_flash",)  # model types whose heads have the attention of their layers with windows


@dataclass(frozen=True, slots=True)
class Family:
    """The classes of a transformers family."""

    layer: Callable[[Any, int], nn.Module]
    norm: Callable[..., nn.Module]
    rotary: Callable[[Any], nn.Module]
    attention: str  # transformers' name of the implementation that computes all that the layers have


def family_of(config: Any) -> Family:
    """The classes that run layers of this Hugging Face config. Raises WeightsError where transformers has none."""
    module = type(config).__module__.replace(".configuration_", ".modeling_")
    classes = vars(import_module(module)) if module.startswith("transformers.models.") else {}
    prefix = next((name.removesuffix("DecoderLayer") for name in classes if name.endswith("DecoderLayer")), "")
    rotary = classes.get(f"{prefix}TextRotaryEmbedding") or classes.get(f"{prefix}RotaryEmbedding")
    norm = classes.get(f"{prefix}RMSNorm")
    if not prefix or rotary is None or norm is None:
        raise WeightsError(f"transformers has no decoder layer of model type {config.model_type} for an MTP head")
    # Attention with sinks is written out in the family's own code: torch's fused one would leave them out.
    fused = getattr(classes.get(f"{prefix}PreTrainedModel"), "_supports_sdpa", True)
    return Family(classes[f"{prefix}DecoderLayer"], norm, rotary, "sdpa" if fused else "eager")


def layer_config(config: Any, *, has_experts: bool) -> Any:
    """The config of a target as its MTP layer reads it: one layer, with experts or without."""
    text = copy.deepcopy(config.get_text_config(decoder=True))
    values = {
        "num_hidden_layers": 1,
        "layer_types": [SLIDING if text.model_type in WITH_WINDOWS else FULL],
        "mlp_layer_types": ["sparse" if has_experts else "dense"],
        "first_k_dense_replace": 0 if has_experts else 1,
        "mlp_only_layers": [] if has_experts else [0],
        "decoder_sparse_step": 1,
    }
    for name, value in values.items():
        if hasattr(text, name):
            setattr(text, name, value)
    text._attn_implementation = family_of(text).attention
    text._experts_implementation = "eager"
    return text


class StoredKeys:
    """A key store behind the method that transformers' attention calls its cache with."""

    def __init__(self, store: KeyStore, last: int | None = None) -> None:
        """last: return so many entries, the latest; None: all."""
        self._store, self._last = store, last

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        entries = self._store.extend(KeyValues(key_states, value_states))
        first = 0 if self._last is None else max(0, entries.keys.shape[2] - self._last)
        return entries.keys[:, :, first:], entries.values[:, :, first:]


def within_window(mask: Tensor, window: int) -> Tensor:
    """The last `window` of the columns that each row attends to. mask: bool [..., rows, columns]

    A row attends to one column for every position up to its own, in their order, in chains and in trees alike: so these
    are the window, wherever the columns lie.
    """
    from_the_end = mask.flip(-1).cumsum(dim=-1).flip(-1)
    return mask & (from_the_end <= window)


def added_to_scores(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask in the form that attention which is written out adds to its scores."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


class RotaryTables(ExactTables):
    """The rotary embedding of a family. One that reads images too takes three positions a token, equal for text; one of
    a family with several kinds of attention is told which of them it is for."""

    def __init__(self, config: Any) -> None:
        """config: of `layer_config`."""
        super().__init__()
        self.rotary = rotary = family_of(config).rotary(config)
        self._axes = 3 if hasattr(rotary, "mrope_section") else 1
        by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
        self._kind = {"layer_type": config.layer_types[0]} if by_kind else {}

    def forward(self, states: Tensor, positions: Tensor) -> Any:
        if self._axes > 1:  # older transformers do not repeat the positions of text themselves
            positions = positions.expand(self._axes, -1, -1)
        return self.rotary(states, positions, **self._kind)


class MtpLayer(nn.Module):
    """The decoder layer of a family."""

    def __init__(self, config: Any) -> None:
        """config: of `layer_config`."""
        super().__init__()
        family = family_of(config)
        self.block = family.layer(config, 0)
        self.tables = RotaryTables(config)
        self._fused = family.attention == "sdpa"
        has_window = getattr(config, "layer_types", None) == [SLIDING]
        self.window: int | None = config.sliding_window if has_window else None

    def forward(self, states: Tensor, positions: Tensor, mask: Tensor | None, store: KeyStore | None) -> Tensor:
        """states [batch, rows, hidden_size]; mask bool, broadcast to [batch, 1, rows, columns], True: attended."""
        mask = self._own_mask(states, mask)
        single = self.window if mask is None else None  # one row sees all columns: its window is the last of them
        output = self.block(
            states,
            attention_mask=mask if mask is None or self._fused else added_to_scores(mask, states.dtype),
            position_ids=positions,
            past_key_values=None if store is None else StoredKeys(store, single),
            position_embeddings=self.tables(states, positions),
        )
        return output if isinstance(output, Tensor) else torch.as_tensor(output[0])

    def _own_mask(self, states: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask with the window in it. None: of one row, or of rows that fused attention knows to be causal."""
        rows = states.shape[1]
        if mask is None and rows > 1 and not (self._fused and self.window is None):
            mask = causal_mask(rows, device=states.device)
        return mask if mask is None or self.window is None else within_window(mask, self.window)
