"""When a head is swapped in, and when it is rolled back: two tests, each with a stated error probability.

swap      On the same held-out sequences the new head has more draft tokens accepted than the old one in so many that
          a head that is no better has at most SWAP_ERROR of doing so (an exact sign test), and more in all.
rollback  The share of first draft tokens accepted in live sequences is so much lower after the swap that a head that
          is as good has at most ROLLBACK_ERROR of it (a permutation test of whole sequences, at three looks).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SWAP_ERROR = 0.01
ROLLBACK_ERROR = 0.01
LOOKS = (16, 32, 64)  # live sequences after a swap at which the heads are compared; after the last one it stays
FEWEST_BEFORE = 8  # live sequences before the swap, with fewer of which nothing can be compared
PERMUTATIONS = 2000


# --- swap -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplayComparison:
    """Accepted draft tokens of two heads on the same sequences."""

    old: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def p_value(self) -> float:
        """How probable so many better sequences are for a head that is no better."""
        better = sum(new > old for old, new in zip(self.old, self.new))
        worse = sum(new < old for old, new in zip(self.old, self.new))
        return sign_test(better, worse)

    @property
    def is_better(self) -> bool:
        return sum(self.new) > sum(self.old) and self.p_value <= SWAP_ERROR


def sign_test(better: int, worse: int) -> float:
    """The probability of at least so many heads among better + worse tosses of a fair coin."""
    tosses = better + worse
    return sum(math.comb(tosses, heads) for heads in range(better, tosses + 1)) / 2**tosses


# --- rollback ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """First draft tokens of one live sequence: how many were accepted, and of how many."""

    accepted: int
    offered: int


def first_token_rate(seqs: Sequence[FirstTokens]) -> float:
    """Acceptance at position 1 over all of them."""
    offered = sum(seq.offered for seq in seqs)
    return sum(seq.accepted for seq in seqs) / offered if offered else 0.0


def is_lower(before: Sequence[FirstTokens], after: Sequence[FirstTokens]) -> bool:
    """Whether a head is rolled back. Called after every sequence; compares only at the looks."""
    if len(after) not in LOOKS or len(before) < FEWEST_BEFORE:
        return False
    return permutation_test(before, after) <= ROLLBACK_ERROR / len(LOOKS)


def permutation_test(before: Sequence[FirstTokens], after: Sequence[FirstTokens]) -> float:
    """How probable so large a fall of the rate is where it does not matter which sequences came after the swap."""
    seqs = [*before, *after]
    counts = np.array([[seq.accepted, seq.offered] for seq in seqs], dtype=np.float64)
    is_after = np.zeros((1 + PERMUTATIONS, len(seqs)), dtype=np.float64)
    is_after[:, len(before) :] = 1.0
    is_after[1:] = np.random.default_rng(len(seqs)).permuted(is_after[1:], axis=1)
    falls = _rates((1 - is_after) @ counts) - _rates(is_after @ counts)
    return float((falls >= falls[0]).mean())  # the first row is what was seen


def _rates(sums: np.ndarray) -> np.ndarray:
    """[rows, accepted and offered] -> the share accepted of each row."""
    rates: np.ndarray = sums[:, 0] / np.maximum(1.0, sums[:, 1])
    return rates


def is_settled(num_after: int) -> bool:
    """A head that has not been rolled back by now stays."""
    return num_after >= LOOKS[-1]
