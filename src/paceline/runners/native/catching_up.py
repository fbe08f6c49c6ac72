"""What a draft model has not read yet of the sequences that it is to draft for.

A new sequence lacks its whole prompt, which has a graph of its own. One that took a few steps without drafts lacks a
few tokens: such sequences are read together, in the narrow passes of a decode step. Read with prompts, or one by one,
they would cost more than their drafts bring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.core.types import DraftInput, Row
from paceline.device.graphs import NUM_SEQS, rounded_up

LEAD_TOKENS = 2  # what a drafting graph reads of a sequence; pass_inputs.LEAD_TOKENS, here without importing Triton
DECODE_NODES = 2  # of a sequence: a decode pass reads them
CATCH_UP_WIDTHS = (DECODE_NODES, 4, 8)  # the same where a pass is one kernel; sizes that graphs are made ready for
QUICK_PASSES = 4  # of one kernel that are together still quicker than the graphs of prompts


@dataclass(frozen=True, slots=True)
class CatchUpPass:
    """Rows that are read together. is_quick: in a narrow pass."""

    rows: list[Row]
    is_quick: bool = False


@dataclass(frozen=True, slots=True)
class QuickReading:
    """How little of a sequence is read in narrow passes: `nodes` in each of them, `most` tokens in all."""

    nodes: int = 0
    most: int = 0

    @classmethod
    def of(cls, num_seqs: int, persistent_rows: int | None) -> QuickReading:
        """persistent_rows: of a pass that is one kernel; None: there is no such kernel."""
        seqs = rounded_up(num_seqs, NUM_SEQS)
        if persistent_rows is None or seqs is None or persistent_rows < DECODE_NODES * seqs:
            return cls(DECODE_NODES, DECODE_NODES)
        nodes = max(width for width in CATCH_UP_WIDTHS if width * seqs <= persistent_rows)
        return cls(nodes, QUICK_PASSES * nodes)


def catch_up_passes(drafts: list[DraftInput], quick: QuickReading) -> Iterator[CatchUpPass]:
    """All but the last tokens of every sequence, which the drafting graph itself reads. Each pass is read before the
    next one is asked for."""
    behind = [draft for draft in drafts if num_lacking(draft) > 0]
    if long := [draft for draft in behind if num_lacking(draft) > quick.most]:
        yield CatchUpPass([_row(draft, num_lacking(draft)) for draft in long])
    short = [draft for draft in behind if num_lacking(draft) > 0]
    while short:
        yield CatchUpPass([_row(draft, min(num_lacking(draft), quick.nodes)) for draft in short], is_quick=True)
        short = [draft for draft in short if num_lacking(draft) > 0]


def num_lacking(draft: DraftInput) -> int:
    return len(draft.ids) - LEAD_TOKENS - draft.seq_cache.length


def _row(draft: DraftInput, count: int) -> Row:
    start = draft.seq_cache.length
    return Row.chain(draft.seq_cache, draft.ids[start : start + count])
