"""Records of several steps in a row, which a device takes without the host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass

from torch import Tensor

from paceline.core.types import RowOutput, SequenceCache, VerifyResult

LOOP_TOKENS = 256  # that a sequence may grow by in several steps in a row: their places in the cache are reserved
STEPS_AHEAD = 2  # of a loop, that are queued or being read
MOST_LEAVES = 8  # second choices of draft tokens that one step verifies at most


@dataclass(frozen=True, slots=True)
class LeafLimits:
    """When the second choice for a draft token is worth verifying beside it.

    least  tokens that it must promise
    rates  how often second choices are right, by bin of their confidence
    """

    least: float
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """When a chain of draft tokens no longer pays, for a device that decides it by itself.

    least   tokens that one more draft token of every sequence must promise, all together
    rates   how often draft tokens are accepted, by bin of their confidence
    leaves  which second choices are sent too; None: none
    """

    least: float
    rates: tuple[float, ...]
    leaves: LeafLimits | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LoopProgress:
    """What one of several steps in a row has brought, on the device.

    accepted     draft tokens of each sequence, up to the first that is wrong
    best         the argmax after the sequence and after each draft token: [sequences, draft tokens + 1]; of a tree
                 those on the accepted path come first, as in a chain
    grown        tokens that each sequence has grown by
    last_tokens  of each sequence, the last two
    """

    accepted: Tensor
    best: Tensor
    grown: Tensor
    last_tokens: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LoopInput:
    """A greedy sequence for which several steps are taken in a row.

    seq_cache    the target's; it holds all of `ids` but the last
    has_ended    whether the sequence is over: its caches are then left alone
    draft_cache  the draft model's, where there is one
    most_tokens  that it may still grow by
    """

    seq_cache: SequenceCache
    ids: list[int]
    has_ended: Callable[[], bool]
    num_draft_tokens: int = 0
    draft_cache: SequenceCache | None = None
    most_tokens: int = sys.maxsize


def loop_tokens(inputs: list[LoopInput], num_steps: int) -> int:
    """Tokens that each sequence may grow by in so many steps in a row, or that all together need to their end; and the
    places of second choices behind them.

    What was queued before the host has read that a sequence is over still writes.
    """
    nodes = max(loop.num_draft_tokens for loop in inputs) + 1
    needed = max(loop.most_tokens for loop in inputs) + STEPS_AHEAD * nodes
    return min(num_steps * nodes, needed, max(LOOP_TOKENS, STEPS_AHEAD * nodes)) + leaf_places(inputs)


def leaf_places(inputs: list[LoopInput]) -> int:
    """Places in the cache behind the draft tokens of a step, for second choices. Sequences of a batch send none."""
    return MOST_LEAVES if len(inputs) == 1 and inputs[0].num_draft_tokens else 0


@dataclass(frozen=True, slots=True, eq=False)
class PlainSteps:
    """A few plain steps in a row, of one sequence. output: states that the target returns, a row for each of them."""

    tokens: list[int]
    output: RowOutput


@dataclass(frozen=True, slots=True)
class LoopedStep:
    """One of several steps in a row, of one sequence. source, confidence: as those of a draft tree.

    num_leaves  this many of the last draft tokens are second choices for others
    parents     as those of a draft tree; None: a chain
    """

    draft_tokens: list[int]
    verified: VerifyResult
    source: str = ""
    confidence: list[float] | None = None
    num_leaves: int = 0
    parents: list[int] | None = None


# The steps of all sequences, one after another. Sent True, no further one is begun; one that was begun still comes.
LoopedSteps = Generator[list[LoopedStep], bool | None, None]
# The same without draft tokens: of all sequences, a few steps at a time.
PlainGroups = Generator[list[PlainSteps], bool | None, None]
