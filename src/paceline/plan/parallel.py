"""A model divided over GPUs: what one GPU of each pipeline stage holds.

Pipeline stages hold consecutive layers; the first has the embedding, the last the output matrix. The GPUs of a stage
share each matrix (tensor parallel): heads, MLP rows and the vocabulary are divided, norms are not, and where there are
fewer key/value heads than GPUs, each GPU keeps one whole head. This is how vLLM divides a model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from paceline.errors import OptionError
from paceline.plan.model_sizes import ModelSizes
from paceline.plan.precision import Precision, weight_bytes
from paceline.plan.weights import LayerSizes


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage, by its number from 0. first_layer: also from 0."""

    number: int
    first_layer: int
    num_layers: int
    is_first: bool
    is_last: bool


def stages(num_layers: int, pipeline_parallel_size: int) -> list[Stage]:
    """Layers spread evenly; what remains goes to the stages before the last, as the last has the output matrix."""
    size = pipeline_parallel_size
    counts = [num_layers // size] * size
    for place in range(2, num_layers % size + 2):
        counts[-place] += 1
    starts = [sum(counts[:number]) for number in range(size)]
    return [Stage(n, starts[n], counts[n], n == 0, n == size - 1) for n in range(size)]


def stage_sizes(sizes: ModelSizes, stage: Stage, tensor_parallel_size: int) -> ModelSizes:
    """What one GPU of a stage holds, as a model of its own. A tied table is on the first stage and on the last."""
    has_table = stage.is_first or stage.is_last
    whole = stage.is_first and stage.is_last
    return replace(
        sizes,
        num_layers=stage.num_layers,
        num_heads=sizes.num_heads // tensor_parallel_size,
        num_kv_heads=max(1, sizes.num_kv_heads // tensor_parallel_size),
        intermediate_size=ceil(sizes.intermediate_size / tensor_parallel_size),
        shared_expert_size=ceil(sizes.shared_expert_size / tensor_parallel_size),
        vocab_size=ceil(sizes.vocab_size / tensor_parallel_size) if has_table else 0,
        tied_embeddings=sizes.tied_embeddings if whole else True,  # one table, whichever of the two it is
        small_outside=sizes.small_outside if stage.is_last else 0,
        num_learned_positions=sizes.num_learned_positions if stage.is_first else 0,
        other_parameters=sizes.other_parameters if stage.is_first else 0,
        stored_bytes=None,
        layers=tuple(layer.shared_by(tensor_parallel_size) for layer in _layers(sizes, stage)),
    )


def _layers(sizes: ModelSizes, stage: Stage) -> tuple[LayerSizes, ...]:
    return sizes.layers[stage.first_layer : stage.first_layer + stage.num_layers]


def stage_weight_bytes(sizes: ModelSizes, precision: Precision, stage: Stage, tensor_parallel_size: int) -> int:
    """On each GPU of a stage. Files on disk count by their own size, divided as their weights are."""
    counted = weight_bytes(replace(sizes, stored_bytes=None), precision)
    stored = weight_bytes(sizes, precision) / counted if counted else 1.0
    return ceil(weight_bytes(stage_sizes(sizes, stage, tensor_parallel_size), precision) * stored)


def divides(sizes: ModelSizes, tensor_parallel_size: int) -> bool:
    """Whether the heads of a model can be shared by this many GPUs. A head without layers has none to share."""
    if sizes.num_layers == 0:
        return True
    num_heads, num_kv_heads = sizes.num_heads, sizes.num_kv_heads
    return num_heads % tensor_parallel_size == 0 and (
        num_kv_heads % tensor_parallel_size == 0 or tensor_parallel_size % num_kv_heads == 0
    )


def check_division(sizes: ModelSizes, num_gpus: int, pipeline_parallel_size: int) -> None:
    """Raise OptionError where the GPUs do not make whole stages, or the stages cannot share the heads."""
    if pipeline_parallel_size > sizes.num_layers:
        layers = f"{sizes.name} has {sizes.num_layers} layers"
        raise OptionError(f"--pipeline-parallel-size {pipeline_parallel_size} is too many: {layers}")
    if num_gpus % pipeline_parallel_size:
        raise OptionError(
            f"--num-gpus {num_gpus} is no multiple of --pipeline-parallel-size {pipeline_parallel_size}, and every "
            "stage has as many GPUs"
        )
    size = num_gpus // pipeline_parallel_size
    if not divides(sizes, size):
        heads = f"{sizes.num_heads} attention heads and {sizes.num_kv_heads} key/value heads"
        raise OptionError(
            f"{size} GPUs cannot share the {heads} of {sizes.name}; divide it by layers: "
            f"--pipeline-parallel-size {num_gpus}"
        )
