"""P-EAGLE heads: EAGLE-3 with further layers, trained to draft all tokens of a step in one pass.

The row of the last token is that of EAGLE-3. Every further position has a mask token and a learnt state in place of the
token and the state that are not known yet, so no row waits for the draft token before it.
Files are in the speculators layout: `layers.0.` as EAGLE-3, `layers.1.` and further as Llama's, `mask_hidden`.
Paper: P-EAGLE, https://arxiv.org/abs/2602.01469
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import WeightsError
from paceline.heads.attention import KeyStore
from paceline.heads.checkpoint import Checkpoint, Provenance, declared_kind, install, plain_name, write_checkpoint
from paceline.heads.eagle import EagleLayer, EagleNorm
from paceline.heads.eagle3 import (
    Eagle3Config,
    Eagle3Head,
    check_vocabulary,
    complete_vocabulary,
    config_of,
    speculators_config,
)
from paceline.heads.eagle_files import LISTED, renamed, written_tensors
from paceline.heads.kv_cache import KeyBuffers
from paceline.heads.registry import HeadSpec

MASK_HIDDEN = "mask_hidden"
MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")  # what configs call the mask token


@dataclass(frozen=True, slots=True)
class PEagleConfig(Eagle3Config):
    """Sizes of a P-EAGLE head. mask_token_id: in the place of tokens that are not known yet."""

    num_layers: int = 1
    mask_token_id: int = 0


class FurtherLayer(EagleLayer):
    """A layer after the first: Llama's."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, config.hidden_size)
        self.input_layernorm = EagleNorm(config.hidden_size, eps=config.rms_norm_eps)


class PEagleHead(Eagle3Head):
    """EAGLE-3's layer, further ones, and what a position without a token reads."""

    config: PEagleConfig
    can_capture = False  # a graph captures a chain of passes, and this is one pass

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.further = nn.ModuleList(FurtherLayer(config) for _ in range(config.num_layers - 1))
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, config.feature_count * config.target_hidden_size))
        self.mask_token_id = config.mask_token_id

    def mask_state(self) -> Tensor:
        return self.fuse(self.mask_hidden)[0, 0]

    def key_buffers(self) -> KeyBuffers:
        """The heads of all layers side by side."""
        return KeyBuffers(self.config.num_layers * self.config.num_kv_heads, self.config.head_dim, self.like)

    def run_layers(
        self, embeddings: Tensor, g: Tensor, positions: Tensor, mask: Tensor | None, store: KeyStore | None
    ) -> Tensor:
        out = super().run_layers(embeddings, g, positions, mask, self._part(store, 0))
        for index, layer in enumerate(self.further, start=1):
            out = layer(layer.input_layernorm(out), out, positions, mask, self._part(store, index))  # type: ignore[operator]
        return out

    def _part(self, store: KeyStore | None, layer: int) -> KeyStore | None:
        heads = self.config.num_kv_heads
        return None if store is None else store.part(slice(layer * heads, (layer + 1) * heads))


# --- files ------------------------------------------------------------------------------------------------------------


def matches(checkpoint: Checkpoint) -> bool:
    """A config that names it, or its learnt state."""
    if declared_kind(checkpoint) is not None:
        return declared_kind(checkpoint) == "peagle"
    return MASK_HIDDEN in map(plain_name, checkpoint.tensors)


def load(checkpoint: Checkpoint) -> PEagleHead:
    """The head of a checkpoint. Raises WeightsError naming the tensor that does not fit."""
    named = _renamed(checkpoint)
    eagle3 = config_of(named, checkpoint.config)
    values = {field.name: getattr(eagle3, field.name) for field in fields(eagle3)}
    mask_token_id = _mask_token(checkpoint, eagle3.vocab_size)
    config = PEagleConfig(**values, num_layers=_num_layers(named), mask_token_id=mask_token_id)
    complete_vocabulary(named, config)
    head = PEagleHead(config)
    install(head, named)
    check_vocabulary(head, checkpoint.folder)
    return head


def _renamed(checkpoint: Checkpoint) -> Checkpoint:
    """Names of our modules: the layers after the first are `further.`."""
    named = renamed(checkpoint)
    tensors = {_further_name(name): value for name, value in named.tensors.items()}
    return Checkpoint(named.folder, named.config, tensors, lambda name: named.file_name(_listed_name(name)))


def _further_name(name: str) -> str:
    first, _, rest = name.partition(".")
    index, _, part = rest.partition(".")
    return f"further.{int(index) - 1}.{part}" if first == "layers" and index.isdigit() else name


def _listed_name(name: str) -> str:
    first, _, rest = name.partition(".")
    index, _, part = rest.partition(".")
    return f"layers.{int(index) + 1}.{part}" if first == "further" else name


def _num_layers(named: Checkpoint) -> int:
    indices = [int(name.split(".")[1]) for name in named.tensors if name.startswith("further.")]
    return 2 + max(indices, default=-1)


def _mask_token(checkpoint: Checkpoint, vocab_size: int) -> int:
    config: Mapping[str, Any] = checkpoint.config
    token = next((config[key] for key in MASK_KEYS if config.get(key) is not None), None)
    if not isinstance(token, int) or not 0 <= token < vocab_size:
        raise WeightsError(
            f"{checkpoint.folder}: mask_token_id in config.json is {token}; a P-EAGLE head needs one of the target's "
            f"{vocab_size} tokens"
        )
    return token


def save(
    head: PEagleHead, folder: str | Path, *, layout: str, provenance: Provenance, dtype: torch.dtype | None
) -> None:
    """Write a head in the layout of speculators."""
    written = written_tensors(head, LISTED, dtype)
    config = speculators_config(head.config, provenance, dtype or head.fc.weight.dtype)
    config |= {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle"}
    config["mask_token_id"] = head.config.mask_token_id
    config["transformer_layer_config"] |= {"num_hidden_layers": head.config.num_layers}
    write_checkpoint(folder, config, {_listed_name(name): value for name, value in written.items()})


SPEC = HeadSpec("peagle", PEagleHead, matches, load, save, ("speculators",))
