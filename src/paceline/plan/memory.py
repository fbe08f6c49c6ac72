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
from paceline.plan.parallel import Stage, check_division, divides, stage_sizes, stage_weight_bytes, stages
from paceline.plan.precision import PRECISIONS, Precision
from paceline.plan.weights import LayerSizes

_FLOAT_BYTES = 4
# A long prompt is read in chunks of this many tokens, so its activations stop growing there.
PREFILL_CHUNK = 2048
MAX_DRAFT_TOKENS = 128
MIN_STATES = 32  # of recurrent layers, at least: sequences that have ended keep theirs as long as there is room
KEPT_INPUTS = 64  # tokens whose inputs recurrent layers keep


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is to be run. Raises OptionError at once for anything impossible.

    max_seq_len counts prompt and answer together; num_nodes are the draft tokens verified in one pass (a chain has
    `num_draft_tokens` of them, a tree more). The GPUs form pipeline stages of layers, and those of a stage share each
    layer; draft_tensor_parallel_size: GPUs that share the draft, 1 or as many as share the target.
    bounded_windows: layers with a sliding window keep no more than it and the tokens of a step.
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
    pipeline_parallel_size: int = 1
    draft_tensor_parallel_size: int | None = None
    bounded_windows: bool = False

    def __post_init__(self) -> None:
        _check_range("max-seq-len", self.max_seq_len, 1, 1 << 24)
        _check_range("max-num-seqs", self.max_num_seqs, 1, 1 << 16)
        _check_range("num-gpus", self.num_gpus, 1, 1024)
        _check_range("num-draft-tokens", self.num_draft_tokens, 0, MAX_DRAFT_TOKENS)
        if self.tree_nodes is not None:
            _check_range("tree-nodes", self.tree_nodes, max(self.num_draft_tokens, 1), 4096)
        _check_range("pipeline-parallel-size", self.pipeline_parallel_size, 1, 1024)
        check_division(self.target, self.num_gpus, self.pipeline_parallel_size)
        self._check_draft_division()
        if (self.draft is not None) != (self.method.weights is DraftWeights.MODEL):
            raise OptionError(
                f"method {self.method.name} and --draft-model do not go together: a draft model needs a method that "
                "runs one, and such a method needs a --draft-model"
            )

    def _check_draft_division(self) -> None:
        size, drafter = self.draft_tensor_parallel_size, self.drafter
        if size not in (None, 1, self.tensor_parallel_size):
            raise OptionError(
                f"--draft-tensor-parallel-size must be 1 or, as the target's, {self.tensor_parallel_size}; not {size}"
            )
        if drafter is not None and not divides(drafter, self.draft_gpus):
            raise OptionError(f"{size} GPUs cannot share the heads of {drafter.name}: --draft-tensor-parallel-size 1")

    @property
    def tensor_parallel_size(self) -> int:
        """GPUs that share each layer of the target."""
        return self.num_gpus // self.pipeline_parallel_size

    @property
    def draft_gpus(self) -> int:
        """GPUs that share the draft: as told, else those of the last stage where its heads can be divided, else one."""
        if self.draft_tensor_parallel_size is not None:
            return self.draft_tensor_parallel_size
        drafter = self.drafter
        return self.tensor_parallel_size if drafter is not None and divides(drafter, self.tensor_parallel_size) else 1

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
class StageMemory:
    """The GPUs of one pipeline stage, which hold the same: bytes of each part on one of them."""

    stage: Stage
    num_gpus: int
    parts: Mapping[str, int]

    @property
    def bytes_each(self) -> int:
        """On the fullest of them: a draft that is not shared is on one alone."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The whole plan, itemised. stages: by pipeline stage; a single GPU is one of them."""

    deployment: Deployment
    parts: tuple[MemoryPart, ...]
    stages: tuple[StageMemory, ...]

    @property
    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def fullest_bytes(self) -> int:
        """What the fullest GPU must hold; with one GPU, everything."""
        return sum(part.fullest for part in self.parts)


def plan_memory(deployment: Deployment) -> MemoryPlan:
    """Itemise the memory of a deployment.

    The draft and the buffers of verification are on the last stage, where tokens are sampled; activations are on all.
    """
    by_stage = tuple(
        StageMemory(stage, deployment.tensor_parallel_size, _stage_parts(deployment, stage))
        for stage in stages(deployment.target.num_layers, deployment.pipeline_parallel_size)
    )
    fullest = max(by_stage, key=lambda item: item.bytes_each)
    names = dict.fromkeys(name for name in PART_NAMES if any(item.parts.get(name) for item in by_stage))
    parts = [
        MemoryPart(name, _holders(deployment, name) * sum(_sizes(by_stage, name)), fullest.parts.get(name, 0))
        for name in names
    ]
    return MemoryPlan(deployment, tuple(parts), by_stage)


def _holders(deployment: Deployment, name: str) -> int:
    """GPUs of a stage that hold a part."""
    return deployment.draft_gpus if name in DRAFTER_PARTS else deployment.tensor_parallel_size


def _sizes(by_stage: tuple[StageMemory, ...], name: str) -> list[int]:
    return [item.parts.get(name, 0) for item in by_stage]


DRAFTER_PARTS = ("draft weights", "draft KV cache", "draft states", "head weights", "head KV cache")
PART_NAMES = ("target weights", "target KV cache", "target states", *DRAFTER_PARTS, "tree and q buffers", "activations")


def _stage_parts(deployment: Deployment, stage: Stage) -> dict[str, int]:
    """On one GPU of a stage."""
    target, gpus = deployment.target, deployment.tensor_parallel_size
    parts = {
        "target weights": stage_weight_bytes(target, deployment.precision, stage, gpus),
        "target KV cache": kv_bytes(stage_sizes(target, stage, gpus), deployment),
        "target states": state_bytes(stage_sizes(target, stage, gpus), deployment),
    }
    if stage.is_last:
        parts |= {**_drafter_bytes(deployment), "tree and q buffers": buffer_bytes(deployment)}
    parts["activations"] = activation_bytes(deployment)
    return {name: size for name, size in parts.items() if size}


def kv_bytes(sizes: ModelSizes, deployment: Deployment) -> int:
    """One model's cache, with every sequence of the batch at its full length.

    Layers with a window count at full length unless the engine bounds them: ours does for models that run natively,
    by a pool whose size follows from the whole cache, so that the full length is an upper bound.
    """
    values = sizes.kv_values(deployment.max_seq_len, bounded=deployment.bounded_windows)
    values += sizes.kv_values_per_token * (deployment.cached_tokens - deployment.max_seq_len)
    return round(deployment.max_num_seqs * values * deployment.kv_bits / 8)


def state_bytes(sizes: ModelSizes, deployment: Deployment) -> int:
    """What recurrent layers keep, however long the sequences are."""
    return sum(_layer_state_bytes(layer, deployment) for layer in sizes.layers)


def _layer_state_bytes(layer: LayerSizes, deployment: Deployment) -> int:
    """Where our own code runs them, a state and the last inputs for a fixed number of sequences at least; else one
    state for each sequence, and while draft tokens are verified a second one to go back to."""
    compute_bytes = deployment.precision.compute_bits // 8
    state = layer.state_values * _FLOAT_BYTES
    if layer.input_values:
        count = max(deployment.max_num_seqs, MIN_STATES)
        return count * (state + KEPT_INPUTS * layer.input_values * compute_bytes)
    copies = 2 if deployment.num_nodes else 1
    return deployment.max_num_seqs * copies * (state + layer.conv_values * compute_bytes)


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
    chosen = sizes.intermediate_size * max(sizes.num_experts_per_token, 1)
    mlp = sizes.mlp_matrices * (chosen + sizes.shared_expert_size)
    inner = ceil(max(attention, mlp) / deployment.tensor_parallel_size)
    return tokens * (2 * sizes.hidden_size + inner) * deployment.precision.compute_bits // 8


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
        small_per_layer=2 * hidden if target.layers else target.small_per_layer,
        intermediate_size=target.intermediate_size * max(target.num_experts_per_token, 1) + target.shared_expert_size,
        shared_expert_size=0,
        small_outside=target.small_outside if method.head_layers else 0,
        other_parameters=joining + method.head_vocab_blocks * vocab_block,
        stored_bytes=None,
        notes=(),
        layers=(),
    )


def _drafter_bytes(deployment: Deployment) -> Mapping[str, int]:
    """On one GPU of those that share the draft, or on the one that has it."""
    drafter = deployment.drafter
    if drafter is None:
        return {}
    label = "draft" if deployment.draft else "head"
    [whole], gpus = stages(drafter.num_layers, 1), deployment.draft_gpus
    return {
        f"{label} weights": stage_weight_bytes(drafter, deployment.drafter_precision, whole, gpus),
        f"{label} KV cache": kv_bytes(stage_sizes(drafter, whole, gpus), replace(deployment, kv_precision=None)),
        f"{label} states": state_bytes(stage_sizes(drafter, whole, gpus), deployment),
    }


def _head_precision(target: Precision) -> Precision:
    """Heads are trained and kept in floats even where the target is quantised."""
    return PRECISIONS["fp32"] if target.compute_bits == 32 else PRECISIONS["bf16"]


def _check_range(option: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise OptionError(f"--{option} must be a whole number from {least} to {most}, not {value}")
