"""EAGLE-3 heads: they mix hidden states of three layers and have an output head over a reduced vocabulary.

Two layouts of files: SafeAILab's and SpecForge's (`midlayer.`), and speculators' (`layers.0.`). vLLM loads both.
Paper: EAGLE-3, https://arxiv.org/abs/2503.01840
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import OptionError, WeightsError
from paceline.heads.attention import KeyStore
from paceline.heads.checkpoint import (
    Checkpoint,
    Provenance,
    declared_kind,
    install,
    plain_name,
    tensor_named,
    write_checkpoint,
)
from paceline.heads.eagle import EagleConfig, EagleHead, EagleLayer, EagleNorm
from paceline.heads.eagle_files import (
    LISTED,
    MIDLAYER,
    llama_fields,
    renamed,
    shared_fields,
    vocab_size_of,
    written_tensors,
)
from paceline.heads.registry import HeadSpec

USUAL_FEATURES = 3
ORIGINAL, SPECULATORS = "original", "speculators"


@dataclass(frozen=True, slots=True)
class Eagle3Config(EagleConfig):
    """Sizes and variants of an EAGLE-3 head.

    feature_layers        layers of the target whose entering states are joined; (): the usual three
    norm_before_residual  the residual is g after its norm
    norm_before_fc        features pass one norm before they are mixed; fc_norm: one norm per layer
    norm_output           the next g is the output after the final norm, not before it
    """

    feature_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def feature_count(self) -> int:
        return len(self.feature_layers) or USUAL_FEATURES


def usual_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Layers whose entering states EAGLE-3 reads by default: low, middle, high; a shallow target has some twice."""
    return tuple(min(max(layer, 0), num_layers - 1) for layer in (2, num_layers // 2, num_layers - 3))


class Eagle3Layer(EagleLayer):
    """Reads embedding and state side by side, each under its own norm."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = EagleNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = EagleNorm(config.hidden_size, eps=config.rms_norm_eps)

    def beside(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """The input of the attention. [..., 2 · hidden_size]"""
        return torch.cat([self.input_layernorm(embeddings), self.hidden_norm(states)], dim=-1)


class Eagle3Head(EagleHead):
    """Mixes states of several layers; its vocabulary is the target's tokens `i + d2t[i]`."""

    config: Eagle3Config
    midlayer: Eagle3Layer
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, Eagle3Layer(config))
        features, eps = config.feature_count * config.target_hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(features, config.hidden_size, bias=config.fc_bias)
        self.input_norm = EagleNorm(features, eps=eps) if config.norm_before_fc else None
        norms = (EagleNorm(config.target_hidden_size, eps=eps) for _ in range(config.feature_count))
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.norm = EagleNorm(config.hidden_size, eps=eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def feature_layers(self, num_layers: int, chosen: tuple[int, ...] = ()) -> tuple[int, ...]:
        return tuple(chosen) or self.config.feature_layers or usual_feature_layers(num_layers)

    def fuse(self, features: Tensor) -> Tensor:
        """States of several layers, mixed."""
        features = features.to(self.like.dtype)  # a target may run in another dtype than its head
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(self.config.feature_count, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        g: Tensor = self.fc(features)
        return g

    def block(
        self,
        embeddings: Tensor,
        g: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        store: KeyStore | None = None,
    ) -> Tensor:
        out = self.run_layers(embeddings, g, positions, mask, store)
        return self.norm(out) if self.config.norm_output else out

    def run_layers(
        self, embeddings: Tensor, g: Tensor, positions: Tensor, mask: Tensor | None, store: KeyStore | None
    ) -> Tensor:
        """The layer over embedding and state side by side. [batch, rows, hidden_size]"""
        layer = self.midlayer
        residual = layer.hidden_norm(g) if layer.norm_before_residual else g
        out: Tensor = layer(layer.beside(embeddings, g), residual, positions, mask, store)
        return out

    def logits(self, out: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(out if self.config.norm_output else self.norm(out))
        return logits

    def to_target_ids(self, ids: Tensor) -> Tensor:
        return ids + self.d2t[ids]

    def choose_vocabulary(self, target_ids: Tensor) -> None:
        if target_ids.shape != self.d2t.shape:
            raise OptionError(f"this head predicts {self.config.draft_vocab_size} tokens, not {target_ids.numel()}")
        ids = target_ids.to(self.d2t.device)
        self.d2t.copy_(ids - torch.arange(ids.numel(), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True


# --- reading ----------------------------------------------------------------------------------------------------------


def matches(checkpoint: Checkpoint) -> bool:
    """Tensors that only EAGLE-3 heads have, or a config that names it."""
    if declared_kind(checkpoint) is not None:
        return declared_kind(checkpoint) == "eagle3"
    names = list(map(plain_name, checkpoint.tensors))
    own_layer = any(name.endswith(".hidden_norm.weight") or name.startswith(MIDLAYER) for name in names)
    return own_layer or "d2t" in names


def load(checkpoint: Checkpoint) -> Eagle3Head:
    """The head of a checkpoint. Raises WeightsError naming the tensor that does not fit."""
    named = renamed(checkpoint)
    config = config_of(named, checkpoint.config)
    complete_vocabulary(named, config)
    head = Eagle3Head(config)
    install(head, named)
    check_vocabulary(head, checkpoint.folder)
    return head


def config_of(named: Checkpoint, config: Mapping[str, Any]) -> Eagle3Config:
    """Sizes from the tensors, variants from the config. A norm that either of them names has to be in the file."""
    nested = config.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    layers = tuple(int(layer) for layer in config.get(key) or nested.get(key) or ())
    joined, states = tensor_named(named, "fc.weight").shape[1], len(layers) or USUAL_FEATURES
    if joined % states:
        raise WeightsError(f"{named.folder}: fc.weight reads {joined} values, which {states} states cannot fill evenly")

    def flag(name: str) -> bool:
        return bool(config.get(name, nested.get(name, False)))

    return Eagle3Config(
        **shared_fields(named),
        vocab_size=vocab_size_of(named),
        draft_vocab_size=tensor_named(named, "lm_head.weight").shape[0],
        target_hidden_size=joined // states,
        feature_layers=layers,
        norm_before_residual=flag("norm_before_residual"),
        norm_before_fc="input_norm.weight" in named.tensors or flag("norm_before_fc"),
        fc_norm="fc_norm.0.weight" in named.tensors or flag("fc_norm"),
        norm_output=flag("norm_output"),
    )


def complete_vocabulary(named: Checkpoint, config: Eagle3Config) -> None:
    """A head over the whole vocabulary needs no map, and t2d follows from d2t."""
    tensors = named.tensors
    if "d2t" not in tensors and config.draft_vocab_size == config.vocab_size:
        tensors["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    if "t2d" not in tensors and "d2t" in tensors:
        ids = tensors["d2t"] + torch.arange(tensors["d2t"].shape[0])
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids[(ids >= 0) & (ids < config.vocab_size)]] = True


def check_vocabulary(head: Eagle3Head, folder: Path) -> None:
    """Raise WeightsError where d2t holds ids instead of offsets."""
    ids = head.target_ids
    if int(ids.min()) < 0 or int(ids.max()) >= head.config.vocab_size:
        raise WeightsError(
            f"{folder}: d2t points outside the {head.config.vocab_size} tokens of the target; "
            f"it should hold offsets (target id = i + d2t[i])"
        )


# --- writing ----------------------------------------------------------------------------------------------------------


def save(
    head: Eagle3Head, folder: str | Path, *, layout: str, provenance: Provenance, dtype: torch.dtype | None
) -> None:
    make_config, prefix = {ORIGINAL: (_original_config, MIDLAYER), SPECULATORS: (speculators_config, LISTED)}[layout]
    config = make_config(head.config, provenance, dtype or head.fc.weight.dtype)
    write_checkpoint(folder, config, written_tensors(head, prefix, dtype))


def _variant_fields(config: Eagle3Config) -> dict[str, Any]:
    """Written in both layouts. The norms are always written: without them one program assumes True, another False."""
    return {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
    }


def _original_config(config: Eagle3Config, provenance: Provenance, dtype: torch.dtype) -> dict[str, Any]:
    return {
        **llama_fields(config, dtype),
        **_variant_fields(config),
        "base_model_name_or_path": provenance.target,
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
            "use_aux_hidden_state": True,
        },
    }


def speculators_config(config: Eagle3Config, provenance: Provenance, dtype: torch.dtype) -> dict[str, Any]:
    """The config of a head in the speculators layout."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": provenance.num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        **_variant_fields(config),
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": llama_fields(config, dtype),
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": provenance.target, "architectures": list(provenance.architectures)},
        },
    }


SPEC = HeadSpec("eagle3", Eagle3Head, matches, load, save, (ORIGINAL, SPECULATORS))
