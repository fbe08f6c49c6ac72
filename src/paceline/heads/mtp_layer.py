"""One decoder layer of a transformers family as the layer of a head, whatever its attention and its experts are.

The layer, its norms and its rotary embedding are the family's own classes, so a head that is stored with its target
computes what the layers of the target compute. Keys and values go to the stores that all heads have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import WeightsError
from paceline.heads.attention import ExactTables, KeyStore, KeyValues

FULL = "full_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """The classes of a transformers family."""

    layer: Callable[[Any, int], nn.Module]
    norm: Callable[..., nn.Module]
    rotary: Callable[[Any], nn.Module]


def family_of(config: Any) -> Family:
    """The classes that run layers of this Hugging Face config. Raises WeightsError where transformers has none."""
    module = type(config).__module__.replace(".configuration_", ".modeling_")
    classes = vars(import_module(module)) if module.startswith("transformers.models.") else {}
    prefix = next((name.removesuffix("DecoderLayer") for name in classes if name.endswith("DecoderLayer")), "")
    rotary = classes.get(f"{prefix}TextRotaryEmbedding") or classes.get(f"{prefix}RotaryEmbedding")
    norm = classes.get(f"{prefix}RMSNorm")
    if not prefix or rotary is None or norm is None:
        raise WeightsError(f"transformers has no decoder layer of model type {config.model_type} for an MTP head")
    return Family(classes[f"{prefix}DecoderLayer"], norm, rotary)


def layer_config(config: Any, *, has_experts: bool) -> Any:
    """The config of a target as its MTP layer reads it: one layer of full attention, with experts or without."""
    text = copy.deepcopy(config.get_text_config(decoder=True))
    values = {
        "num_hidden_layers": 1,
        "layer_types": [FULL],
        "mlp_layer_types": ["sparse" if has_experts else "dense"],
        "first_k_dense_replace": 0 if has_experts else 1,
        "mlp_only_layers": [] if has_experts else [0],
        "decoder_sparse_step": 1,
    }
    for name, value in values.items():
        if hasattr(text, name):
            setattr(text, name, value)
    text._attn_implementation = "sdpa"  # takes the masks of trees and of batches as they are
    text._experts_implementation = "eager"
    return text


class StoredKeys:
    """A key store behind the method that transformers' attention calls its cache with."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        entries = self._store.extend(KeyValues(key_states, value_states))
        return entries.keys, entries.values


class RotaryTables(ExactTables):
    """The rotary embedding of a family. One that reads images too takes three positions a token, equal for text."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self._axes = 3 if hasattr(rotary, "mrope_section") else 1

    def forward(self, states: Tensor, positions: Tensor) -> Any:
        if self._axes > 1:  # older transformers do not repeat the positions of text themselves
            positions = positions.expand(self._axes, -1, -1)
        return self.rotary(states, positions)


class MtpLayer(nn.Module):
    """The decoder layer of a family."""

    def __init__(self, config: Any) -> None:
        """config: of `layer_config`."""
        super().__init__()
        family = family_of(config)
        self.block = family.layer(config, 0)
        self.tables = RotaryTables(family.rotary(config))

    def forward(self, states: Tensor, positions: Tensor, mask: Tensor | None, store: KeyStore | None) -> Tensor:
        """states [batch, rows, hidden_size]; mask bool, broadcast to [batch, 1, rows, columns], True: attended."""
        output = self.block(
            states,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=None if store is None else StoredKeys(store),
            position_embeddings=self.tables(states, positions),
        )
        return output if isinstance(output, Tensor) else torch.as_tensor(output[0])
