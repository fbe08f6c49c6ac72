"""Embeddings: the last hidden states of a prompt, pooled into one vector. No part of the decoding loop."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from paceline.core.protocols import Runner
from paceline.core.types import Row, SequenceCache
from paceline.engines.local.kv_manager import KVManager
from paceline.errors import ContextLengthExceeded, OptionError, OutOfMemory, PromptError

POOLINGS = ("mean", "last", "cls")


class Embedder:
    """Reads prompts with a view of the target that returns hidden states. The target's own passes stay as they are."""

    def __init__(self, target: Runner, kv: KVManager, chunk: int) -> None:
        self._target, self._kv, self._chunk = target, kv, chunk
        self._view: Runner | None = None

    def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        """A vector of length 1. Raises OptionError, PromptError, CapabilityError or OutOfMemory."""
        self._check(token_ids, pooling)
        if self._view is None:
            self._view = self._target.hidden_view()
        seq_cache = self._target.new_cache()
        try:
            if not self._kv.reserve(seq_cache, len(token_ids)):
                raise OutOfMemory("there are no free blocks for this input now; retry later, or send a shorter one")
            pooled = _pooled(self._hidden_states(self._view, seq_cache, token_ids), pooling)
        finally:
            self._target.free(seq_cache)
            self._kv.blocks.release(seq_cache)
        vector: list[float] = (pooled / pooled.norm().clamp_min(1e-12)).tolist()
        return vector

    def _check(self, token_ids: list[int], pooling: str) -> None:
        info = self._target.info
        limit = min(info.max_seq_len, self._kv.capacity)
        if pooling not in POOLINGS:
            raise OptionError(f"pooling is one of {', '.join(POOLINGS)}; not {pooling!r}")
        if not token_ids:
            raise PromptError("the input is empty; there is nothing to embed")
        if len(token_ids) > limit:
            raise ContextLengthExceeded(f"the input has {len(token_ids)} tokens, too large for the {limit} that fit")
        if not 0 <= min(token_ids) <= max(token_ids) < info.vocab_size:
            raise PromptError(f"token ids are from 0 to {info.vocab_size - 1}")

    def _hidden_states(self, view: Runner, seq_cache: SequenceCache, token_ids: list[int]) -> Iterator[Tensor]:
        """Chunk by chunk. [tokens, hidden_size]"""
        for start in range(0, len(token_ids), self._chunk):
            chunk = token_ids[start : start + self._chunk]
            output = view.forward([Row.chain(seq_cache, chunk)], last_only=True)
            view.commit(seq_cache, list(range(len(chunk))))
            assert output.hidden is not None, "the view returns them"
            yield output.hidden.float()


def _pooled(chunks: Iterator[Tensor], pooling: str) -> Tensor:
    """One vector of all chunks, without keeping them."""
    first = next(chunks)
    total, count, last = first.sum(0), first.shape[0], first[-1].clone()
    head = first[0].clone()
    for chunk in chunks:
        total, count, last = total + chunk.sum(0), count + chunk.shape[0], chunk[-1].clone()
    return {"mean": total / count, "last": last, "cls": head}[pooling]
