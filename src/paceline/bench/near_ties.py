"""Is the text the same, and if not, is that the arithmetic or a bug?

A pass over several tokens does not round like a pass over one, so two tokens whose logits are closer than that
rounding may change places. Such a near-tie is a property of floating point, not of speculation: plain decoding has it
too when the batch or the kernel changes. Anything wider is a bug. The rounding is measured, not assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from paceline.core.protocols import Runner
from paceline.core.types import Row

LEAST_TOLERANCE = 1e-4
SAFETY = 4.0  # times the rounding seen on one context: other contexts may be worse
LOOKED_AT = 6  # last tokens of a context that are read one by one


class Kind(Enum):
    SAME = "same"
    NEAR_TIE = "near-tie"
    BUG = "bug"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers to one prompt. place: the first token that differs; gap: by how much the target prefers the first."""

    kind: Kind
    place: int = -1
    gap: float = 0.0
    tolerance: float = 0.0

    def __str__(self) -> str:
        if self.kind is Kind.SAME:
            return "same"
        return f"{self.kind.value} at token {self.place}: logit gap {self.gap:.3g}, rounding up to {self.tolerance:.3g}"


def rounding(target: Runner, context: list[int]) -> float:
    """How much a logit changes by the way its context is read: at once, the last tokens at once, or one by one.

    All three, since a runner may round alike in two of them: kernels that are made to be bit-equal at every width say
    nothing about another program's, but reading a prompt goes through other kernels than those.
    """
    tail = min(LOOKED_AT, len(context) - 1)
    if tail < 1:
        return 0.0
    seq_cache = target.new_cache()
    try:
        output = target.forward([Row.chain(seq_cache, context[:-tail])], last_only=True)
        for token in context[-tail:]:
            output = target.forward([Row.chain(seq_cache, [token])])
        steps = output.logits[-1].float().cpu()
        target.truncate(seq_cache, 0)
        at_once = target.forward([Row.chain(seq_cache, context)], last_only=True).logits[-1].float().cpu()
    finally:
        target.free(seq_cache)
    wide = _after(target, context[:-tail], context[-tail:])[-1]
    return max(float((other - steps).abs().max()) for other in (wide, at_once))


def compare(target: Runner, prompt: list[int], plain: list[int], other: list[int]) -> Comparison:
    """Hold one greedy answer against the plain one. Where they part, ask the target how close the two tokens are."""
    if plain == other:
        return Comparison(Kind.SAME)
    place = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), min(len(plain), len(other)))
    if place >= min(len(plain), len(other)):
        return Comparison(Kind.BUG, place, float("inf"))  # one ends where the other goes on: no token to compare
    context = prompt + plain[:place]
    output = _after(target, context[:-1], context[-1:])[-1]
    gap = float(output[plain[place]] - output[other[place]])
    tolerance = max(LEAST_TOLERANCE, SAFETY * rounding(target, context))
    kind = Kind.NEAR_TIE if abs(gap) <= tolerance else Kind.BUG
    return Comparison(kind, place, gap, tolerance)


def _after(target: Runner, read: list[int], tokens: list[int]) -> Tensor:
    """Logits after each of `tokens`, read in one pass behind `read`. [tokens, vocab], on the CPU."""
    seq_cache = target.new_cache()
    try:
        if read:
            target.forward([Row.chain(seq_cache, read)], last_only=True)
        return target.forward([Row.chain(seq_cache, tokens)]).logits.float().cpu()
    finally:
        target.free(seq_cache)
