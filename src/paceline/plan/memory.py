"""Where the bytes go: target, draft or heads, both KV caches, the buffers of a round, activations.

A `Setting` is what would be run; `plan_memory` itemises it. NoDraft here is measured: weights and caches are exact
arithmetic, buffers and activations are upper bounds of what a round keeps alive at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil

from paceline.errors import OptionError
from paceline.plan.model_sizes import ModelShape
from paceline.plan.precision import PRECISIONS, Precision, weight_bytes

_FLOAT = 4
# A long prompt is read in pieces of this many tokens, so its activations stop growing there.
PREFILL_CHUNK = 2048
MEDUSA_HEADS = 4
LONGEST_DRAFT = 128


class Method(Enum):
    """The ways to guess, by the words `--method` takes."""

    NONE = "none"
    DRAFT = "draft"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    LOOKAHEAD = "lookahead"
    LAYERSKIP = "layerskip"
    MEDUSA = "medusa"
    EAGLE = "eagle"


# Methods whose guesses are drawn from a distribution that must be kept for the acceptance test.
_DRAWN = (Method.DRAFT, Method.LAYERSKIP, Method.MEDUSA, Method.EAGLE)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is to be run. Raises OptionError at once for anything impossible.

    `context` is the longest text, prompt and answer together; `nodes` the guesses verified in one pass (a chain has as
    many as `num_draft_tokens`, a tree more).
    """

    target: ModelShape
    precision: Precision
    method: Method = Method.NONE
    draft: ModelShape | None = None
    draft_precision: Precision | None = None
    kv_precision: Precision | None = None
    context: int = 4096
    batch: int = 1
    num_draft_tokens: int = 5
    tree_nodes: int | None = None
    gpus: int = 1

    def __post_init__(self) -> None:
        _whole("context", self.context, 1, 1 << 24)
        _whole("batch", self.batch, 1, 1 << 16)
        _whole("gpus", self.gpus, 1, 1024)
        _whole("draft-tokens", self.num_draft_tokens, 0, LONGEST_DRAFT)
        if self.tree_nodes is not None:
            _whole("tree-nodes", self.tree_nodes, max(self.num_draft_tokens, 1), 4096)
        if (self.draft is not None) != (self.method is Method.DRAFT):
            raise OptionError("--method draft needs a --draft model, and a --draft model needs --method draft")

    @property
    def nodes(self) -> int:
        if self.method is Method.NONE:
            return 0
        return self.num_draft_tokens if self.tree_nodes is None else self.tree_nodes

    @property
    def cached_tokens(self) -> int:
        """The cache must hold a whole text and, while it is being verified, the round's guesses."""
        return self.context + self.nodes + (1 if self.nodes else 0)

    @property
    def kv_bits(self) -> float:
        return self.precision.compute_bits if self.kv_precision is None else self.kv_precision.body.bits

    @property
    def guesser(self) -> ModelShape | None:
        """The weights that guess: the draft model, or the heads as a small shape of their own; None for neither."""
        if self.method is Method.EAGLE:
            return eagle_head(self.target)
        if self.method is Method.MEDUSA:
            return medusa_heads(self.target)
        return self.draft

    @property
    def guesser_precision(self) -> Precision:
        return self.draft_precision or (self.precision if self.draft else _heads_precision(self.precision))


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the plan: its bytes over all GPUs, and those on the fullest one."""

    name: str
    bytes: int
    fullest: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The whole plan, itemised."""

    setting: Setting
    parts: tuple[Part, ...]

    @property
    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def fullest_bytes(self) -> int:
        """What the fullest GPU must hold; with one GPU, everything."""
        return sum(part.fullest for part in self.parts)


def plan_memory(setting: Setting) -> MemoryPlan:
    """Itemises the memory of a setting.

    Several GPUs divide the target and its cache by whole layers; the guesser, the buffers and the activations are
    counted on the fullest of them.
    """
    target = setting.target
    share = ceil(target.layers / setting.gpus) / target.layers
    weights, cache = weight_bytes(target, setting.precision), kv_bytes(target, setting)
    parts = [
        Part("target weights", weights, ceil(weights * share)),
        Part("target KV cache", cache, ceil(cache * share)),
        *(_undivided(name, size) for name, size in _guesser_sizes(setting).items()),
        _undivided("tree and q buffers", buffer_bytes(setting)),
        _undivided("activations", activation_bytes(setting)),
    ]
    return MemoryPlan(setting, tuple(part for part in parts if part.bytes))


def kv_bytes(shape: ModelShape, setting: Setting) -> int:
    """One model's cache, for every text of the batch at its longest.

    Sliding-window layers are counted at full length: one that has moved on cannot be rolled back on rejection.
    """
    values = shape.kv_values_per_token * setting.cached_tokens * setting.batch
    return round(values * setting.kv_bits / 8)


def buffer_bytes(setting: Setting) -> int:
    """Logits and probabilities of every verified node, the q each guess was drawn from, and the ancestor mask."""
    if setting.nodes == 0:
        return 2 * setting.batch * setting.target.vocab * _FLOAT
    rows = (setting.nodes + 1) * setting.batch
    verified = 2 * rows * setting.target.vocab * _FLOAT
    drawn = setting.nodes * setting.batch * setting.target.vocab * _FLOAT if setting.method in _DRAWN else 0
    return verified + drawn + rows * setting.cached_tokens


def activation_bytes(setting: Setting) -> int:
    """The widest moment of one layer: the residual, its norm, and either attention's four or the MLP's three rows."""
    shape = setting.target
    tokens = max(min(setting.context, PREFILL_CHUNK), (setting.nodes + 1) * setting.batch)
    attention = 2 * (shape.heads + shape.num_kv_heads) * shape.head_dim
    mlp = shape.mlp_matrices * shape.mlp_width * max(shape.experts_used, 1)
    return tokens * (2 * shape.width + max(attention, mlp)) * setting.precision.compute_bits // 8


def eagle_head(target: ModelShape) -> ModelShape:
    """EAGLE: one decoder layer of the target's size and a matrix joining feature and token; table and head shared."""
    return replace(
        target,
        name=f"EAGLE head for {target.name}",
        layers=1,
        vocab=0,
        positions=0,
        experts=0,
        experts_used=0,
        mlp_width=target.mlp_width * max(target.experts_used, 1),
        other_parameters=2 * target.width * target.width,
        stored_bytes=None,
        notes=(),
    )


def medusa_heads(target: ModelShape) -> ModelShape:
    """Medusa: for each of four positions a residual block and a head of its own over the vocabulary."""
    each = target.width * target.width + target.width + target.width * target.vocab
    return replace(
        eagle_head(target),
        name=f"Medusa heads for {target.name}",
        layers=0,
        small_outside=0,
        other_parameters=MEDUSA_HEADS * each,
    )


def _guesser_sizes(setting: Setting) -> Mapping[str, int]:
    guesser = setting.guesser
    if guesser is None:
        return {}
    word = "draft" if setting.draft else "heads"
    return {
        f"{word} weights": weight_bytes(guesser, setting.guesser_precision),
        f"{word} KV cache": kv_bytes(guesser, setting),
    }


def _heads_precision(target: Precision) -> Precision:
    """Heads are trained and kept in floats even where the target is quantised."""
    return PRECISIONS["fp32"] if target.compute_bits == 32 else PRECISIONS["bf16"]


def _undivided(name: str, size: int) -> Part:
    return Part(name, size, size)


def _whole(option: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise OptionError(f"--{option} must be a whole number from {least} to {most}, not {value}")
