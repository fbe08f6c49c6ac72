"""Does it fit, and if not, what would make it fit: a shorter context, fewer bits, more GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from paceline.plan.hardware import Card
from paceline.plan.memory import MemoryPlan, Method, Setting, plan_memory
from paceline.plan.precision import Precision, find_precision

# A context below this is no use to anybody, so it is not offered as a way out.
SHORTEST_CONTEXT = 512
_CONTEXT_STEP = 256
_MOST_GPUS = 16
_FEWER_BITS_TORCH = ("bf16", "int8", "int4")
_FEWER_BITS_GGUF = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K")


class Outcome(Enum):
    FITS = "fits"
    FITS_IF_CHANGED = "fits with changes"
    DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, slots=True)
class Change:
    """A way to make it fit: in words, as the options to add, and what would then be left on the fullest GPU."""

    words: str
    options: str
    left_bytes: int


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """`left_bytes` is negative when bytes are missing; `longest_context` is 0 when not even a short one fits."""

    outcome: Outcome
    left_bytes: int
    longest_context: int
    changes: tuple[Change, ...]


def verifier(plan: MemoryPlan, card: Card) -> VerifyResult:
    """Holds a plan against a card (as many of them as the setting says)."""
    setting = plan.setting
    left = card.usable_bytes - plan.fullest_bytes
    longest = longest_context(setting, card)
    if left >= 0:
        return VerifyResult(Outcome.FITS, left, longest, ())
    changes = (*_changes_here(setting, card, longest), *_more_gpus(setting, card))
    on_this_hardware = any("--gpus" not in change.options for change in changes)
    outcome = Outcome.FITS_IF_CHANGED if on_this_hardware else Outcome.DOES_NOT_FIT
    return VerifyResult(outcome, left, longest, changes)


def longest_context(setting: Setting, card: Card) -> int:
    """The longest text that fits, up to what the model was made for; 0 when none worth having does."""
    most = max(setting.target.context, setting.context)

    def fits(context: int) -> bool:
        return _left(replace(setting, context=context), card) >= 0

    if fits(most):
        return most
    steps = _largest(lambda count: fits(count * _CONTEXT_STEP), most // _CONTEXT_STEP)
    context = steps * _CONTEXT_STEP
    return context if context >= min(SHORTEST_CONTEXT, most) else 0


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest count up to `most` for which it holds, when it holds for all smaller ones; 0 when for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _left(setting: Setting, card: Card) -> int:
    return card.usable_bytes - plan_memory(setting).fullest_bytes


def _changes_here(setting: Setting, card: Card, longest: int) -> Iterator[Change]:
    """Ways out on the same hardware, the mildest first."""
    if longest:
        shorter = replace(setting, context=longest)
        yield Change(f"a context of {longest:,} tokens", f"--context {longest}", _left(shorter, card))
    if setting.guesser is not None:
        alone = replace(setting, method=Method.NGRAM, draft=None, draft_precision=None)
        if (left := _left(alone, card)) >= 0:
            yield Change("guessing from the text itself, with no second model", "--method ngram", left)
    yield from _first_fitting(setting, card)


def _first_fitting(setting: Setting, card: Card) -> Iterator[Change]:
    """The least drastic quantisation that fits at this context; else the most drastic with a shorter text."""
    smaller = [replace(setting, precision=precision) for precision in _fewer_bits(setting.precision)]
    for choice in smaller:
        if (left := _left(choice, card)) >= 0:
            name = choice.precision.name
            yield Change(f"weights in {name}", f"--dtype {name}", left)
            return
    if smaller and (context := longest_context(smaller[-1], card)):
        name = smaller[-1].precision.name
        left = _left(replace(smaller[-1], context=context), card)
        words = f"weights in {name} and a context of {context:,} tokens"
        yield Change(words, f"--dtype {name} --context {context}", left)


def _fewer_bits(precision: Precision) -> list[Precision]:
    names = _FEWER_BITS_GGUF if precision.gguf else _FEWER_BITS_TORCH
    schemes = [find_precision(name) for name in names]
    return [scheme for scheme in schemes if scheme.body.bits < precision.body.bits]


def _more_gpus(setting: Setting, card: Card) -> Iterator[Change]:
    """How many cards it takes as it is, and how many with the fewest bits."""
    if gpus := _cards_needed(setting, card):
        left = _left(replace(setting, gpus=gpus), card)
        yield Change(f"{gpus} of these cards", f"--gpus {gpus}", left)
    smallest = [replace(setting, precision=precision) for precision in _fewer_bits(setting.precision)[-1:]]
    for choice in smallest:
        fewer = _cards_needed(choice, card)
        if fewer and (gpus == 0 or fewer < gpus):
            name, left = choice.precision.name, _left(replace(choice, gpus=fewer), card)
            yield Change(f"{fewer} of these cards and weights in {name}", f"--gpus {fewer} --dtype {name}", left)


def _cards_needed(setting: Setting, card: Card) -> int:
    """The smallest number of cards, above the one at hand, that holds it; 0 when none does."""
    for gpus in range(setting.gpus + 1, _MOST_GPUS + 1):
        if _left(replace(setting, gpus=gpus), card) >= 0:
            return gpus
    return 0
