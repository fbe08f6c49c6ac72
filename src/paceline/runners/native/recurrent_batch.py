"""Recurrent layers' view of one pass, built from the rows of its sequences: for the kernels, and for the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.layers.linear_attention import RING, DeltaNetSpans, DeltaNetStates, Fold, RecurrentBatch
from paceline.runners.native.sequence_state import StateSpan


def kernel_spans(memory: DeltaNetStates, spans: list[StateSpan]) -> DeltaNetSpans:
    """The rows of a pass for the kernels, in one upload."""
    table = [
        [span.slot, span.state.now.length, span.folded, span.length, span.count, span.start] for span in spans
    ]
    device = memory.states.device
    columns = torch.tensor(table, dtype=torch.int64).T.contiguous().to(device, non_blocking=True)
    slots, state_lengths, folds, lengths, counts, starts = columns.unbind(0)
    node_seqs = torch.tensor([seq for seq, span in enumerate(spans) for _ in range(span.count)], device=device)
    return DeltaNetSpans(memory, slots, state_lengths, folds, lengths, counts, starts, node_seqs)


class BatchIndices:
    """Builds the index tensors of one pass from the rows of its sequences."""

    def __init__(self, memory: DeltaNetStates, spans: list[StateSpan]) -> None:
        self._memory, self._spans, self._context = memory, spans, memory.sizes.taps - 1
        self._steps = max(span.end - span.state.now.length for span in spans)
        self._kept: list[int] = []

    def batch(self) -> RecurrentBatch:
        places = [self._places(span) for span in self._spans]
        first_new = 1 + sum(map(len, places))
        columns = [self._column(span, kept, first_new) for span, kept in zip(self._spans, places)]
        stored = [place for span in self._spans for place in self._stored_places(span)]
        return RecurrentBatch(
            self._memory,
            self._tensor([span.slot for span in self._spans]),
            self._tensor(self._kept),
            self._tensor(columns).T.contiguous(),
            self._tensor([node for seq, span in enumerate(self._spans) for node in self._nodes(seq, span)]),
            self._tensor([node for span in self._spans for node in _stored_nodes(span)]),
            self._tensor(stored),
            self._folds(),
        )

    def _tensor(self, numbers: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._memory.states.device)

    def _places(self, span: StateSpan) -> range:
        """Positions whose inputs the ring has: those after the state, and before it those the convolution reads."""
        return range(max(0, span.state.now.length - self._context), span.length)

    def _column(self, span: StateSpan, kept: range, first_new: int) -> list[int]:
        """What a sequence reads at each step: 0 where there is no token."""
        before = [0] * (self._context - (span.state.now.length - kept.start))
        first_kept = 1 + len(self._kept)
        self._kept += [_place(span, position) for position in kept]
        new = range(first_new + span.start, first_new + span.start + span.count)
        column = [*before, *range(first_kept, first_kept + len(kept)), *new]
        return column + [0] * (self._context + self._steps - len(column))

    def _nodes(self, seq: int, span: StateSpan) -> list[int]:
        first, num_seqs = span.length - span.state.now.length, len(self._spans)
        return [(first + node) * num_seqs + seq for node in range(span.count)]

    def _stored_places(self, span: StateSpan) -> list[int]:
        return [_place(span, span.length + node - span.start) for node in _stored_nodes(span)]

    def _folds(self) -> list[Fold]:
        by_steps: dict[int, list[int]] = {}
        for seq, span in enumerate(self._spans):
            by_steps.setdefault(span.folded - span.state.now.length, []).append(seq)
        return [
            Fold(steps, self._tensor(seqs), self._tensor([self._spans[seq].slot for seq in seqs]))
            for steps, seqs in by_steps.items()
            if steps
        ]


def _place(span: StateSpan, position: int) -> int:
    return span.slot * RING + position % RING


def _stored_nodes(span: StateSpan) -> range:
    """The last nodes of a row, as many as the ring holds."""
    return range(span.start + max(0, span.count - RING), span.start + span.count)
