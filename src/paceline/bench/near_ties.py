"""Is the output the same, and if not, is that floating point or a bug?

A pass over several tokens does not round like a pass over one, so two tokens whose logits are closer than that rounding
may change places. Such a near-tie is a property of floating point, not of speculation: plain decoding has it too when
the batch or the kernel changes. Any wider difference is a bug. The rounding is measured, not assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from paceline.core.protocols import Runner
from paceline.core.types import Row

LEAST_TOLERANCE = 1e-4
SAFETY = 4.0  # times the rounding measured on one context: other contexts may be worse
TAIL = 6  # last tokens of a context that are read one by one


class Agreement(Enum):
    """How two greedy outputs of one prompt compare."""

    SAME = "same"
    NEAR_TIE = "near-tie"
    BUG = "bug"


@dataclass(frozen=True, slots=True)
class GreedyComparison:
    """Two outputs of one prompt. index: the first token that differs; gap: how much the target prefers the first."""

    agreement: Agreement
    index: int = -1
    gap: float = 0.0
    tolerance: float = 0.0

    def __str__(self) -> str:
        if self.agreement is Agreement.SAME:
            return "same"
        gap = f"logit gap {self.gap:.3g}, rounding up to {self.tolerance:.3g}"
        return f"{self.agreement.value} at token {self.index}: {gap}"


def summary(comparisons: list[GreedyComparison]) -> str:
    """One line over many comparisons, with the first bug among them."""
    agreements = [comparison.agreement for comparison in comparisons]
    line = f"{agreements.count(Agreement.SAME)} of {len(comparisons)} outputs equal"
    if near_ties := agreements.count(Agreement.NEAR_TIE):
        line += f", {near_ties} differ at a near-tie"
    bugs = bugs_in(comparisons)
    return f"{line}; {bugs[0]}" if bugs else line


def bugs_in(comparisons: list[GreedyComparison]) -> list[GreedyComparison]:
    return [comparison for comparison in comparisons if comparison.agreement is Agreement.BUG]


def rounding(target: Runner, context: list[int]) -> float:
    """How much a logit changes by the way its context is read: at once, the last tokens at once, or one by one.

    All three, since a runner may round alike in two of them: kernels that are bit-equal at every width say nothing
    about those of another program, but a prompt is read by other kernels than draft tokens are.
    """
    tail = min(TAIL, len(context) - 1)
    if tail < 1:
        return 0.0
    seq_cache = target.new_cache()
    try:
        output = target.forward([Row.chain(seq_cache, context[:-tail])], last_only=True)
        for token in context[-tail:]:
            output = target.forward([Row.chain(seq_cache, [token])])
        one_by_one = output.logits[-1].float().cpu()
        target.truncate(seq_cache, 0)
        at_once = target.forward([Row.chain(seq_cache, context)], last_only=True).logits[-1].float().cpu()
    finally:
        target.free(seq_cache)
    wide = _logits_after(target, context[:-tail], context[-tail:])[-1]
    return max(float((logits - one_by_one).abs().max()) for logits in (wide, at_once))


def compare(target: Runner, prompt: list[int], plain: list[int], other: list[int]) -> GreedyComparison:
    """Compare a greedy output with the plain one. At the first difference the target says how close the tokens are."""
    if plain == other:
        return GreedyComparison(Agreement.SAME)
    shorter = min(len(plain), len(other))
    index = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), shorter)
    if index >= shorter:
        return GreedyComparison(Agreement.BUG, index, float("inf"))  # one ends where the other goes on
    context = prompt + plain[:index]
    logits = _logits_after(target, context[:-1], context[-1:])[-1]
    gap = float(logits[plain[index]] - logits[other[index]])
    tolerance = max(LEAST_TOLERANCE, SAFETY * rounding(target, context))
    agreement = Agreement.NEAR_TIE if abs(gap) <= tolerance else Agreement.BUG
    return GreedyComparison(agreement, index, gap, tolerance)


def _logits_after(target: Runner, prefix: list[int], tokens: list[int]) -> Tensor:
    """Logits after each of `tokens`, read in one pass after `prefix`. [tokens, vocab], on the CPU."""
    seq_cache = target.new_cache()
    try:
        if prefix:
            target.forward([Row.chain(seq_cache, prefix)], last_only=True)
        return target.forward([Row.chain(seq_cache, tokens)]).logits.float().cpu()
    finally:
        target.free(seq_cache)
