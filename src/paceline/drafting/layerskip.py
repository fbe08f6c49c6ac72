"""Self-speculation: the target itself, left after a few of its layers, draft tokens what all of them will say.

The exit works on the target's own sequence caches and cache: what stands before the draft tokens has already been read by the
lower layers, so drafting begins at once and a sequence costs no second cache. What the exit writes lies behind the sequence cache's
length, where verification writes again, unless the runner can go on from it (`Resuming`).

An exit adapter (heads/exit.py) translates the inner layer's state for the target's head; without one the head reads
it as it is, which only models trained for early exits do well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter, Runner
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, Row, RowOutput, SequenceCache, StepResult
from paceline.drafting.draft_sampling import SampledDraft, choose
from paceline.errors import PairError
from paceline.heads.exit_adapter import ExitAdapter


@runtime_checkable
class Resuming(Protocol):
    """An exit whose work verification can go on from, instead of computing the drafted layers again."""

    def rollback_draft(self, seq_cache: SequenceCache, length: int) -> None:
        """Like trim; but the next pass over this sequence cache may use what the exit has computed past `length`."""


class LayerSkip(Drafter):
    """Drafts a chain with the lower layers of the target."""

    needs: frozenset[Capability] = frozenset({Capability.EARLY_EXIT})

    def __init__(self, target: Runner, layer: int | None = None, adapter: ExitAdapter | None = None) -> None:
        """layer: the exit lies after it; by default the adapter's, or a quarter of the model's layers."""
        if adapter is not None:
            _check_pair(adapter, target, layer)
            layer = adapter.config.layer
        self.layer = layer if layer is not None else max(1, target.info.num_layers // 4)
        self.exit: Runner = target.early_exit(self.layer, adapter)

    def through(self, exit_: Runner) -> LayerSkip:
        """The same drafter with another runner of its exit."""
        twin = copy.copy(self)
        twin.exit = exit_
        return twin

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        """NoDraft to read: the lower layers know the sequence."""

    @torch.inference_mode()
    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        drawn = [SampledDraft() for _ in seqs]
        lengths = [_seq_cache(seq).length for seq in seqs]
        for depth in range(max(num_draft_tokens, default=0)):
            active = [index for index, budget in enumerate(num_draft_tokens) if depth < budget]
            rows = [_row(seqs[index], drawn[index]) for index in active]
            logits = self._logits(rows)
            best = logits.argmax(dim=-1, keepdim=True)
            choose([seqs[i] for i in active], best, logits.__getitem__, [drawn[i] for i in active])
        for seq, length, mine in zip(seqs, lengths, drawn):
            if mine.tokens:
                self._give_back(_seq_cache(seq), length)
        return [mine.chain(seq) for mine, seq in zip(drawn, seqs)]

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        pass

    def end(self, seq: Sequence) -> None:
        pass

    def _logits(self, rows: list[Row]) -> Tensor:
        """One pass of the exit over one token a sequence. [sequences, vocab]"""
        output = self.exit.forward(rows, last_only=True)
        for row in rows:
            self.exit.commit(row.seq_cache, [0])
        return output.logits

    def _give_back(self, seq_cache: SequenceCache, length: int) -> None:
        """The sequence cache as verification expects it: every token of the sequence but the last."""
        restore: Callable[[SequenceCache, int], None] = self.exit.truncate
        if isinstance(self.exit, Resuming):
            restore = self.exit.rollback_draft
        restore(seq_cache, length)


def _seq_cache(seq: Sequence) -> SequenceCache:
    assert seq.seq_cache is not None, "prefill opens the slot"
    return seq.seq_cache


def _row(seq: Sequence, drawn: SampledDraft) -> Row:
    """The last token of the sequence, then the last draft token."""
    if drawn.tokens:
        return Row(_seq_cache(seq), drawn.tokens[-1], [-1])
    return Row.chain(_seq_cache(seq), seq.ids[-1:])


def _check_pair(adapter: ExitAdapter, target: Runner, layer: int | None) -> None:
    """Raise PairError where an adapter was made for another target or another layer."""
    config, info = adapter.config, target.info
    if config.hidden_size != info.hidden_size:
        raise PairError(f"this adapter reads states of {config.hidden_size} values; {info.name} has {info.hidden_size}")
    if layer not in (None, config.layer):
        raise PairError(f"this adapter was trained for an exit after layer {config.layer}, not {layer}")
