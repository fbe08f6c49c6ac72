"""Where the bytes go: target, draft or head, both KV caches, the buffers of a step, activations.

A `Deployment` is what would be run; `plan_memory` itemises it. Nothing here is measured: weights and caches are exact
arithmetic, buffers and activations are upper bounds of what a step keeps alive at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from paceline.errors import OptionError
from paceline.plan.methods import PLAIN_DECODING, DraftMethod, DraftWeights
from paceline.plan.model_sizes import ModelSizes
from paceline.plan.precision import PRECISIONS, Precision, weight_bytes

_FLOAT_BYTES = 4
# A long prompt is read in chunks of this many tokens, so its activations stop growing there.
PREFILL_CHUNK = 2048
MAX_DRAFT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is to be run. Raises OptionError at once for anything impossible.

    max_seq_len counts prompt and answer together; num_nodes are the draft tokens verified in one pass (a chain has
    `num_draft_tokens` of them, a tree more).
    """

    target: ModelSizes
    precision: Precision
    method: DraftMethod = PLAIN_DECODING
    draft: ModelSizes | None = None
    draft_precision: Precision | None = None
    kv_precision: Precision | None = None
    max_seq_len: int = 4096
    max_num_seqs: int = 1
    num_draft_tokens: int = 5
    tree_nodes: int | None = None
    num_gpus: int = 1

    def __post_init__(self) -> None:
        _check_range("max-seq-len", self.max_seq_len, 1, 1 << 24)
        _check_range("max-num-seqs", self.max_num_seqs, 1, 1 << 16)
        _check_range("num-gpus", self.num_gpus, 1, 1024)
        _check_range("num-draft-tokens", self.num_draft_tokens, 0, MAX_DRAFT_TOKENS)
        if self.tree_nodes is not None:
            _check_range("tree-nodes", self.tree_nodes, max(self.num_draft_tokens, 1), 4096)
        if (self.draft is not None) != (self.method.weights is DraftWeights.MODEL):
            raise OptionError(
                f"method {self.method.name} and --draft-model do not go together: a draft model needs a method that "
                "runs one, and such a method needs a --draft-model"
            )

    @property
    def num_nodes(self) -> int:
        if not self.method.drafts:
            return 0
        return self.num_draft_tokens if self.tree_nodes is None else self.tree_nodes

    @property
    def cached_tokens(self) -> int:
        """The cache holds a whole sequence and, during verification, the draft tokens of the step."""
        return self.max_seq_len + self.num_nodes + (1 if self.num_nodes else 0)

    @property
    def kv_bits(self) -> float:
        return self.precision.compute_bits if self.kv_precision is None else self.kv_precision.body.bits

    @property
    def drafter(self) -> ModelSizes | None:
        """The weights that draft: the draft model, or the head as a small model; None where there are none."""
        return head_sizes(self.target, self.method) if self.method.weights is DraftWeights.HEAD else self.draft

    @property
    def drafter_precision(self) -> Precision:
        return self.draft_precision or (self.precision if self.draft else _head_precision(self.precision))


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One line of the plan: its bytes over all GPUs, and those on the fullest one."""

    name: str
    bytes: int
    fullest: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The whole plan, itemised."""

    deployment: Deployment
    parts: tuple[MemoryPart, ...]

    @property
    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def fullest_bytes(self) -> int:
        """What the fullest GPU must hold; with one GPU, everything."""
        return sum(part.fullest for part in self.parts)


def plan_memory(deployment: Deployment) -> MemoryPlan:
    """Itemise the memory of a deployment.

    Several GPUs divide the target and its cache by whole layers; the drafter, the buffers and the activations are
    counted on the fullest of them.
    """
    target = deployment.target
    share = ceil(target.num_layers / deployment.num_gpus) / target.num_layers
    weights, cache = weight_bytes(target, deployment.precision), kv_bytes(target, deployment)
    parts = [
        MemoryPart("target weights", weights, ceil(weights * share)),
        MemoryPart("target KV cache", cache, ceil(cache * share)),
        *(_undivided(name, size) for name, size in _drafter_bytes(deployment).items()),
        _undivided("tree and q buffers", buffer_bytes(deployment)),
        _undivided("activations", activation_bytes(deployment)),
    ]
    return MemoryPlan(deployment, tuple(part for part in parts if part.bytes))


def kv_bytes(sizes: ModelSizes, deployment: Deployment) -> int:
    """One model's cache, with every sequence of the batch at its full length.

    Sliding-window layers are counted at full length: a window that has moved on cannot be rolled back on rejection.
    """
    values = sizes.kv_values_per_token * deployment.cached_tokens * deployment.max_num_seqs
    return round(values * deployment.kv_bits / 8)


def buffer_bytes(deployment: Deployment) -> int:
    """Logits and probabilities of every verified node, the q each draft token was drawn from, and the tree mask."""
    row_bytes = deployment.max_num_seqs * deployment.target.vocab_size * _FLOAT_BYTES
    if deployment.num_nodes == 0:
        return 2 * row_bytes
    verified = 2 * (deployment.num_nodes + 1) * row_bytes
    drawn = deployment.num_nodes * row_bytes if deployment.method.sampled else 0
    mask = (deployment.num_nodes + 1) * deployment.max_num_seqs * deployment.cached_tokens
    return verified + drawn + mask


def activation_bytes(deployment: Deployment) -> int:
    """The peak of one layer: the residual, its norm, and either attention's four or the MLP's three rows."""
    sizes = deployment.target
    step_tokens = (deployment.num_nodes + 1) * deployment.max_num_seqs
    tokens = max(min(deployment.max_seq_len, PREFILL_CHUNK), step_tokens)
    attention = 2 * (sizes.num_heads + sizes.num_kv_heads) * sizes.head_dim
    mlp = sizes.mlp_matrices * sizes.intermediate_size * max(sizes.num_experts_per_token, 1)
    return tokens * (2 * sizes.hidden_size + max(attention, mlp)) * deployment.precision.compute_bits // 8


def head_sizes(target: ModelSizes, method: DraftMethod) -> ModelSizes:
    """A head as a small model; the target's embedding and output matrix are shared.

    An EAGLE head is one decoder layer of the target's size and a matrix that joins state and token. Medusa has, for
    each of its positions, a residual block and an output matrix of its own over the vocabulary.
    """
    hidden = target.hidden_size
    joining = 2 * hidden * hidden if method.head_layers else 0
    vocab_block = hidden * hidden + hidden + hidden * target.vocab_size
    return replace(
        target,
        name=f"{method.name} head for {target.name}",
        num_layers=method.head_layers,
        vocab_size=0,
        num_learned_positions=0,
        num_experts=0,
        num_experts_per_token=0,
        intermediate_size=target.intermediate_size * max(target.num_experts_per_token, 1),
        small_outside=target.small_outside if method.head_layers else 0,
        other_parameters=joining + method.head_vocab_blocks * vocab_block,
        stored_bytes=None,
        notes=(),
    )


def _drafter_bytes(deployment: Deployment) -> Mapping[str, int]:
    drafter = deployment.drafter
    if drafter is None:
        return {}
    label = "draft" if deployment.draft else "head"
    return {
        f"{label} weights": weight_bytes(drafter, deployment.drafter_precision),
        f"{label} KV cache": kv_bytes(drafter, deployment),
    }


def _head_precision(target: Precision) -> Precision:
    """Heads are trained and kept in floats even where the target is quantised."""
    return PRECISIONS["fp32"] if target.compute_bits == 32 else PRECISIONS["bf16"]


def _undivided(name: str, size: int) -> MemoryPart:
    return MemoryPart(name, size, size)


def _check_range(option: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise OptionError(f"--{option} must be a whole number from {least} to {most}, not {value}")
