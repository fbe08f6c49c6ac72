"""EAGLE-1 and EAGLE-2 heads: one kind of weights, two ways to draw trees.

The head reads the target's last hidden state as it is and predicts through the target's own output head.
Paper: EAGLE, https://arxiv.org/abs/2401.15077; EAGLE-2, https://arxiv.org/abs/2406.16858
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.errors import OptionError
from paceline.heads.attention import KeyStore
from paceline.heads.checkpoint import Checkpoint, Provenance, declared_kind, install, plain_name, write_checkpoint
from paceline.heads.eagle import EagleConfig, EagleHead, EagleLayer, LastStateHead
from paceline.heads.eagle_files import LISTED, llama_fields, renamed, shared_fields, vocab_size_of, written_tensors
from paceline.heads.registry import HeadSpec

BEFORE_FINAL_NORM = "before_final_norm"  # of paceline's own: published configs never say it


@dataclass(frozen=True, slots=True)
class Eagle1Config(EagleConfig):
    """Sizes of an EAGLE-1 head."""

    def __post_init__(self) -> None:
        EagleConfig.__post_init__(self)
        if self.hidden_size != self.target_hidden_size:
            raise OptionError("an EAGLE-1 head has the hidden size of its target: it continues the target's own states")


class Eagle1Head(LastStateHead, EagleHead):
    """Reads the mixture of embedding and state."""

    config: Eagle1Config

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__(config, EagleLayer(config, config.hidden_size))
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)

    def block(
        self,
        embeddings: Tensor,
        g: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        store: KeyStore | None = None,
    ) -> Tensor:
        mixed = self.fc(torch.cat([embeddings, g], dim=-1))
        out: Tensor = self.midlayer(mixed, mixed, positions, mask, store)
        return out


# --- files ------------------------------------------------------------------------------------------------------------


def matches(checkpoint: Checkpoint) -> bool:
    """One layer and nothing that only other heads have."""
    names = list(map(plain_name, checkpoint.tensors))
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    return declared_kind(checkpoint) is None and "0" in layers and "1" not in layers


def load(checkpoint: Checkpoint) -> Eagle1Head:
    """The head of a checkpoint. Raises WeightsError naming the tensor that does not fit."""
    named = renamed(checkpoint)
    fields, vocab_size = shared_fields(named), vocab_size_of(named)
    head = Eagle1Head(
        Eagle1Config(
            **fields,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            target_hidden_size=fields["hidden_size"],
            before_final_norm=bool(checkpoint.config.get(BEFORE_FINAL_NORM, False)),
        )
    )
    install(head, named)
    return head


def save(
    head: Eagle1Head, folder: str | Path, *, layout: str, provenance: Provenance, dtype: torch.dtype | None
) -> None:
    """Write a head in the layout of its project. vLLM loads it too."""
    config = {
        **llama_fields(head.config, dtype or head.fc.weight.dtype),
        "base_model_name_or_path": provenance.target,
        "architectures": ["LlamaForCausalLM"],
        "bias": head.config.fc_bias,
        **({BEFORE_FINAL_NORM: True} if head.config.before_final_norm else {}),
    }
    write_checkpoint(folder, config, written_tensors(head, LISTED, dtype))


SPEC = HeadSpec("eagle1", Eagle1Head, matches, load, save)
