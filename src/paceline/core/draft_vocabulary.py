"""How much of its vocabulary a draft model chooses from.

The LM head is a large part of a small model, and every draft token reads all of it. The vocabularies of byte-pair
encodings are ordered: what was merged first, and so is written most, has the lowest ids. In most sequences nearly every
token is in the first half. A token past the rows that are read cannot be drafted; the target then writes it itself,
so the output is the same and only acceptance falls. The last tokens of a sequence tell how often that would be.
"""

from __future__ import annotations

from collections.abc import Iterable

WHOLE_VOCABULARY = 0  # as a draft chain is told (DraftChain.set), and a runner
LEAST_SIZE = 65_536  # of a vocabulary: a smaller LM head saves too little time
# Parts of a vocabulary, the smallest first: its divisor, and the share of recent tokens that it may miss. Of a step's
# time a quarter saves about 5% on a GPU and 13% on a CPU, a half two thirds of that; a missed token costs a little less
# than a token.
PARTS = ((4, 0.02), (2, 0.035))
MULTIPLE = 1024  # of rows: whole tiles
RECENT_TOKENS = 256  # of a sequence: they tell what comes next
SPECIAL_TOKENS = 512  # at the end of a vocabulary: chat templates write them


def draft_vocabulary(vocab_size: int, sequences: Iterable[list[int]]) -> int:
    """Rows of the LM head, from the first on, that draft tokens of these sequences are chosen from."""
    if vocab_size < LEAST_SIZE:
        return WHOLE_VOCABULARY
    written = [_ordinary_tokens(ids, vocab_size) for ids in sequences]
    for divisor, most_missed in PARTS:
        rows = -(-vocab_size // (divisor * MULTIPLE)) * MULTIPLE
        if all(_num_missed(rows, ids) <= most_missed * len(ids) for ids in written):
            return rows
    return WHOLE_VOCABULARY


def _ordinary_tokens(ids: list[int], vocab_size: int) -> list[int]:
    """The last tokens of a sequence without special ones. Those among the first ids are never missed anyway."""
    return [token for token in ids[-RECENT_TOKENS:] if token < vocab_size - SPECIAL_TOKENS]


def _num_missed(rows: int, ids: list[int]) -> int:
    return sum(token >= rows for token in ids)
