"""Does it fit, and if not, what would make it fit: shorter sequences, fewer bits, more GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from paceline.errors import OptionError
from paceline.plan.hardware import Accelerator
from paceline.plan.memory import Deployment, MemoryPlan, plan_memory
from paceline.plan.methods import weightless_method
from paceline.plan.precision import Precision, find_precision

# Sequences shorter than this are of no use, so they are not offered as a way out.
SHORTEST_USEFUL_SEQ_LEN = 512
_SEQ_LEN_STEP = 256
_FEWER_BITS_TORCH = ("bf16", "int8", "int4")
_FEWER_BITS_GGUF = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K")


@dataclass(frozen=True, slots=True)
class FitLimits:
    """What a change may use: precisions by name (None: all), and GPUs that an engine divides a model over."""

    precisions: tuple[str, ...] | None = None
    max_gpus: int = 16


class FitOutcome(Enum):
    FITS = "fits"
    FITS_IF_CHANGED = "fits with changes"
    DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, slots=True)
class FitChange:
    """A way to make it fit: described, as the options to add, and the bytes then free on the fullest GPU."""

    description: str
    options: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """`free_bytes` is negative when bytes are missing; `longest_seq_len` is 0 when no useful length fits."""

    outcome: FitOutcome
    free_bytes: int
    longest_seq_len: int
    changes: tuple[FitChange, ...]


def memory_fit(plan: MemoryPlan, accelerator: Accelerator, limits: FitLimits | None = None) -> MemoryFit:
    """Compare a plan with an accelerator (with as many of them as the deployment says)."""
    deployment = plan.deployment
    free = accelerator.usable_bytes - plan.fullest_bytes
    longest = longest_seq_len(deployment, accelerator)
    if free >= 0:
        return MemoryFit(FitOutcome.FITS, free, longest, ())
    limits = limits or FitLimits()
    fewer_bits = _fewer_bits(deployment.precision, limits)
    here = tuple(_changes_here(deployment, accelerator, longest, fewer_bits))
    outcome = FitOutcome.FITS_IF_CHANGED if here else FitOutcome.DOES_NOT_FIT
    return MemoryFit(outcome, free, longest, (*here, *_more_gpus(deployment, accelerator, fewer_bits, limits.max_gpus)))


def longest_seq_len(deployment: Deployment, accelerator: Accelerator) -> int:
    """The longest sequence that fits, up to what the model supports; 0 when no useful length does."""
    most = max(deployment.target.max_seq_len, deployment.max_seq_len)

    def fits(seq_len: int) -> bool:
        return _free_bytes(replace(deployment, max_seq_len=seq_len), accelerator) >= 0

    if fits(most):
        return most
    seq_len = _SEQ_LEN_STEP * _largest(lambda count: fits(count * _SEQ_LEN_STEP), most // _SEQ_LEN_STEP)
    return seq_len if seq_len >= min(SHORTEST_USEFUL_SEQ_LEN, most) else 0


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest count up to `most` for which it holds, when it holds for all smaller ones; 0 when for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _free_bytes(deployment: Deployment, accelerator: Accelerator) -> int:
    return accelerator.usable_bytes - plan_memory(deployment).fullest_bytes


def _changes_here(
    deployment: Deployment, accelerator: Accelerator, longest: int, fewer_bits: list[Precision]
) -> Iterator[FitChange]:
    """Changes on the same hardware, the mildest first."""
    if longest:
        free = _free_bytes(replace(deployment, max_seq_len=longest), accelerator)
        yield FitChange(f"sequences of {longest:,} tokens", f"--max-seq-len {longest}", free)
    if deployment.drafter is not None:
        method = weightless_method()
        free = _free_bytes(replace(deployment, method=method, draft=None, draft_precision=None), accelerator)
        if free >= 0:
            yield FitChange("drafts from the sequence itself, without a second model", f"--method {method.name}", free)
    yield from _first_fitting_precision(deployment, accelerator, fewer_bits)


def _first_fitting_precision(
    deployment: Deployment, accelerator: Accelerator, fewer_bits: list[Precision]
) -> Iterator[FitChange]:
    """The mildest quantisation that fits at this length; else the strongest with shorter sequences."""
    smaller = [replace(deployment, precision=precision) for precision in fewer_bits]
    for candidate in smaller:
        if (free := _free_bytes(candidate, accelerator)) >= 0:
            name = candidate.precision.name
            yield FitChange(f"weights in {name}", f"--dtype {name}", free)
            return
    if smaller and (seq_len := longest_seq_len(smaller[-1], accelerator)):
        name = smaller[-1].precision.name
        free = _free_bytes(replace(smaller[-1], max_seq_len=seq_len), accelerator)
        description = f"weights in {name} and sequences of {seq_len:,} tokens"
        yield FitChange(description, f"--dtype {name} --max-seq-len {seq_len}", free)


def _fewer_bits(precision: Precision, limits: FitLimits) -> list[Precision]:
    names = _FEWER_BITS_GGUF if precision.gguf else _FEWER_BITS_TORCH
    schemes = [find_precision(name) for name in names if limits.precisions is None or name in limits.precisions]
    return [scheme for scheme in schemes if scheme.body.bits < precision.body.bits]


def _more_gpus(
    deployment: Deployment, accelerator: Accelerator, fewer_bits: list[Precision], max_gpus: int
) -> Iterator[FitChange]:
    """How many GPUs it takes as it is, and how many with the fewest bits."""
    divided = _divided(deployment, accelerator, max_gpus)
    if divided is not None:
        yield FitChange(f"{divided.num_gpus} of these GPUs", _options(divided), _free_bytes(divided, accelerator))
    for precision in fewer_bits[-1:]:
        fewer = _divided(replace(deployment, precision=precision), accelerator, max_gpus)
        if fewer is not None and (divided is None or fewer.num_gpus < divided.num_gpus):
            description = f"{fewer.num_gpus} of these GPUs and weights in {precision.name}"
            options = f"{_options(fewer)} --dtype {precision.name}"
            yield FitChange(description, options, _free_bytes(fewer, accelerator))


def _options(deployment: Deployment) -> str:
    stages = deployment.pipeline_parallel_size
    return f"--num-gpus {deployment.num_gpus}" + (f" --pipeline-parallel-size {stages}" if stages > 1 else "")


def _divided(deployment: Deployment, accelerator: Accelerator, max_gpus: int) -> Deployment | None:
    """On the smallest number of GPUs above the planned one that holds it; None where no number does."""
    for num_gpus in range(deployment.num_gpus + 1, max_gpus + 1):
        for candidate in _divisions(deployment, num_gpus):
            if _free_bytes(candidate, accelerator) >= 0:
                return candidate
    return None


def _divisions(deployment: Deployment, num_gpus: int) -> Iterator[Deployment]:
    """GPUs that share each layer where the heads allow it, and else stages of layers."""
    for size in dict.fromkeys((deployment.pipeline_parallel_size, num_gpus)):
        try:
            yield replace(deployment, num_gpus=num_gpus, pipeline_parallel_size=size, draft_tensor_parallel_size=None)
        except OptionError:
            continue
