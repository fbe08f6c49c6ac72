"""Prompts, read in chunks.

THE INVARIANT: between steps a sequence cache holds every token of its sequence but the last.

The last token is read together with the draft tokens that follow it, so plain decoding, prefill and verification are
the same pass.
"""

from __future__ import annotations

import torch

from paceline.core.draft_tree import DraftTree
from paceline.core.sequence import Sequence
from paceline.core.types import Row, RowOutput
from paceline.kv.block_manager import BLOCK_SIZE


def num_unread(seq: Sequence) -> int:
    """Tokens that the cache must still take before a step: all but the last."""
    assert seq.seq_cache is not None
    return len(seq.ids) - 1 - seq.seq_cache.length


def prefill_row(seq: Sequence, chunk: int) -> Row:
    """The next tokens of a prompt, at most `chunk`, cut at a block: results do not depend on the cut."""
    assert seq.seq_cache is not None
    start, last = seq.seq_cache.length, len(seq.ids) - 1
    end = min(start + chunk, last)
    if end < last and end - end % BLOCK_SIZE > start:
        end -= end % BLOCK_SIZE
    return Row.chain(seq.seq_cache, seq.ids[start:end])


def step_row(seq: Sequence, tree: DraftTree) -> Row:
    """The last token of the sequence, not yet read, and the draft tokens after it."""
    assert seq.seq_cache is not None, "admission opens the cache"
    assert seq.seq_cache.length == len(seq.ids) - 1, "a cache holds every token of its sequence but the last"
    return Row(seq.seq_cache, tree.tokens, [-1] + [parent + 1 for parent in tree.parents], lead=seq.ids[-1])


def join_chunks(chunks: list[RowOutput]) -> RowOutput | None:
    """The outputs of a prompt read in chunks, as if it had been read at once."""
    if len(chunks) < 2:
        return chunks[0] if chunks else None
    hidden = [chunk.hidden for chunk in chunks if chunk.hidden is not None]
    features = [chunk.features for chunk in chunks if chunk.features is not None]
    return RowOutput(
        chunks[-1].logits, torch.cat(hidden) if hidden else None, torch.cat(features) if features else None
    )
