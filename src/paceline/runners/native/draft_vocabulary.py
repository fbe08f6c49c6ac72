"""How much of its vocabulary a draft model chooses from.

The LM head is a large part of a small model, and every draft token reads all of it. The vocabularies of byte-pair
encodings are ordered: what was merged first, and so is written most, has the lowest ids. In most sequences nearly every
token is in the first quarter. A token past the rows that are read cannot be drafted; the target then writes it itself,
so the output is the same and only acceptance falls. The last tokens of a sequence tell how often that would be.
"""

from __future__ import annotations

from collections.abc import Iterable

WHOLE_VOCABULARY = 0  # as a draft chain is told (DraftChain.set)
LEAST_SIZE = 65_536  # of a vocabulary: a smaller LM head saves too little time
DIVISORS = (4, 2)  # of the vocabulary: the smallest part comes first
MULTIPLE = 1024  # of rows: whole tiles
RECENT_TOKENS = 256  # of a sequence: they tell what comes next
MOST_MISSED = 0.02  # of them
SPECIAL_TOKENS = 512  # at the end of a vocabulary: chat templates write them


def draft_vocabulary(vocab_size: int, sequences: Iterable[list[int]]) -> int:
    """Rows of the LM head, from the first on, that draft tokens of these sequences are chosen from."""
    if vocab_size < LEAST_SIZE:
        return WHOLE_VOCABULARY
    written = [_ordinary_tokens(ids, vocab_size) for ids in sequences]
    parts = (-(-vocab_size // (divisor * MULTIPLE)) * MULTIPLE for divisor in DIVISORS)
    return next((rows for rows in parts if all(_suffices(rows, ids) for ids in written)), WHOLE_VOCABULARY)


def _ordinary_tokens(ids: list[int], vocab_size: int) -> list[int]:
    """The last tokens of a sequence without special ones. Those among the first ids are never missed anyway."""
    return [token for token in ids[-RECENT_TOKENS:] if token < vocab_size - SPECIAL_TOKENS]


def _suffices(rows: int, ids: list[int]) -> bool:
    return sum(token >= rows for token in ids) <= MOST_MISSED * len(ids)
