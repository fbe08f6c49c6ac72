"""Readings of EAGLE heads, and their drafts along a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import PairError
from paceline.heads import eagle3
from paceline.heads.checkpoint import Checkpoint, number, plain_name
from paceline.heads.eagle import ChainHead
from paceline.heads.eagle1 import BEFORE_FINAL_NORM
from paceline.heads.eagle3 import usual_feature_layers
from paceline.lint.comparison import DraftedTokens, own_ids, probs_of
from paceline.lint.reading import TOP, ConfigKey, HeadReading, config_reading, section_of, tensor_reading
from paceline.lint.registry import HeadLint
from paceline.lint.target import Anchors, StatedText, TargetFacts
from paceline.lint.transformer_readings import (
    flipped,
    head_dim_readings,
    layer_readings,
    norm_readings,
    rotary_order_readings,
    theta_readings,
    vocabulary_readings,
)
from paceline.train.training_time_test import reference

LAYER_CONFIG = "transformer_layer_config"  # speculators' section for the one layer
EAGLE_CONFIG = (TOP, "eagle_config")
FEATURE_LAYERS = ConfigKey("eagle_aux_hidden_state_layer_ids", EAGLE_CONFIG)
FLAGS = {"norm_before_residual": "residual after its norm {}", "norm_output": "feed back after the norm {}"}
ATTENTION_INPUTS = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
ROWS_AT_A_TIME = 2048
# A head, features, tokens, a number of steps -> its hidden states at every position, step after step.
Unroll = Callable[[ChainHead, Tensor, Tensor, int], Iterator[Tensor]]


def readings(checkpoint: Checkpoint, facts: TargetFacts) -> list[HeadReading]:
    """Every other reading of an EAGLE checkpoint."""
    kind = _eagle3 if eagle3.matches(checkpoint) else _eagle1
    return [
        *kind(checkpoint, facts),
        *_rotary_readings(checkpoint, facts),
        *norm_readings(checkpoint),
        *_embedding_readings(checkpoint),
    ]


def _eagle3(checkpoint: Checkpoint, facts: TargetFacts) -> list[HeadReading]:
    usual = usual_feature_layers(facts.num_layers)
    layers = tuple(int(layer) for layer in FEATURE_LAYERS.value(checkpoint.config) or usual)
    shifts = layer_readings(checkpoint, FEATURE_LAYERS, layers, facts)
    flags = [flipped(name, ConfigKey(key, EAGLE_CONFIG), checkpoint) for key, name in FLAGS.items()]
    return [
        *shifts,
        *(_usual_layers(checkpoint, usual) if len(layers) == len(usual) and layers != usual else []),
        *flags,
        *_reversed("[hidden; embedding]", "q_proj, k_proj and v_proj", ATTENTION_INPUTS),
        *vocabulary_readings(checkpoint),
    ]


def _usual_layers(checkpoint: Checkpoint, usual: tuple[int, ...]) -> list[HeadReading]:
    return [config_reading("the usual layers", FEATURE_LAYERS, list(usual), checkpoint)]


def _eagle1(checkpoint: Checkpoint, facts: TargetFacts) -> list[HeadReading]:
    before_norm = flipped("states before the final norm {}", ConfigKey(BEFORE_FINAL_NORM), checkpoint)
    return [before_norm, *_reversed("[hidden; embedding]", "fc", ("fc.weight",))]


def _reversed(name: str, names: str, endings: tuple[str, ...]) -> list[HeadReading]:
    """The two halves of the input in the other order."""
    change = f"exchange the two halves of the columns of {names}"
    return [tensor_reading(name, change, endings, lambda weight: torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))]


def _embedding_readings(checkpoint: Checkpoint) -> list[HeadReading]:
    """A head's own embedding may be that of another model."""
    names = [name for name in checkpoint.tensors if plain_name(name) == "embed_tokens.weight"]

    def without(files: Checkpoint) -> Checkpoint:
        return replace(files, tensors={name: value for name, value in files.tensors.items() if name not in names})

    change = "model.safetensors: leave out embed_tokens.weight, the target's own embedding fits better"
    return [HeadReading("the target's embedding", change, without)] if names else []


def _rotary_readings(checkpoint: Checkpoint, facts: TargetFacts) -> list[HeadReading]:
    section = LAYER_CONFIG if section_of(checkpoint.config, LAYER_CONFIG) else TOP
    theta = ConfigKey("rope_theta", (section, f"{section}.rope_parameters" if section else "rope_parameters"))
    key = ConfigKey("head_dim", (section,))
    head_dim = _head_dim(checkpoint, section, key)
    return [
        *theta_readings(checkpoint, theta, facts),
        *head_dim_readings(checkpoint, key, head_dim, facts),
        *rotary_order_readings(checkpoint, head_dim),
    ]


def _head_dim(checkpoint: Checkpoint, section: str, key: ConfigKey) -> int:
    rows = next(value.shape[0] for name, value in checkpoint.tensors.items() if name.endswith("q_proj.weight"))
    heads = int(number(section_of(checkpoint.config, section), "num_attention_heads", 1))
    return int(key.value(checkpoint.config, 0)) or rows // heads


def draft(head: ChainHead, text: StatedText, anchors: Anchors, k: int, unroll: Unroll = reference) -> DraftedTokens:
    """All steps of the chain at every anchor at once, as in training. unroll: may end after fewer than k steps"""
    teacher = text.teacher
    if head.config.target_hidden_size != teacher.hidden_size:
        sizes = f"{head.config.target_hidden_size} values; the target has {teacher.hidden_size}"
        raise PairError(f"this head reads states of {sizes}: it was trained for another model")
    head.bind_target(teacher.embed, teacher.logits)
    layers = head.feature_layers(teacher.num_layers)
    features = text.features(layers) if layers else text.final
    labels = own_ids(text.labels(anchors, k), head.target_ids, teacher.vocab_size)
    steps = []
    for place, hidden in enumerate(unroll(head, features, text.tokens, k)):
        rows = anchors.pick(hidden, -1)  # the row before an anchor holds the anchor's embedding
        steps.append(_drafted(head, rows, labels[:, place]))
    fewer = (0, k - len(steps))
    return DraftedTokens(
        functional.pad(torch.stack([step.tokens for step in steps], dim=-1), fewer, value=-1),
        functional.pad(torch.stack([step.probs for step in steps], dim=-1), fewer),
    )


def _drafted(head: ChainHead, rows: Tensor, labels: Tensor) -> DraftedTokens:
    """One step of every chain. labels: ids of the head's own vocabulary"""
    best, probs = [], []
    for part, own in zip(rows.split(ROWS_AT_A_TIME), labels.split(ROWS_AT_A_TIME), strict=True):
        logits = head.logits(part)
        best.append(logits.argmax(dim=-1))
        probs.append(probs_of(logits, own))
    return DraftedTokens(head.to_target_ids(torch.cat(best)), torch.cat(probs))


LINT = HeadLint(("eagle1", "eagle3"), readings, draft)
