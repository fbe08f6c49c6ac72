"""Resuming from an early exit: what the lower layers have computed for the draft tokens is not computed again.

An exit writes the keys of its layers into the sequence's own blocks, and keeps here the hidden states behind its last
layer. Verification then runs the lower layers only over what the exit has not read (the last draft token), and the
upper layers over everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.types import Row


@dataclass(slots=True, eq=False)
class EarlyExitState:
    """What an exit has computed past `start` tokens of a sequence cache, pass by pass."""

    layer: int
    start: int
    tokens: list[Tensor] = field(default_factory=list)
    hidden_states: list[Tensor] = field(default_factory=list)  # each [tokens, hidden_size], behind the layer

    @property
    def end(self) -> int:
        return self.start + sum(part.shape[0] for part in self.tokens)

    def add(self, tokens: Tensor, hidden_states: Tensor) -> None:
        self.tokens.append(tokens)
        self.hidden_states.append(hidden_states)

    def matching(self, row: Row) -> Tensor | None:
        """The hidden states of the row's first nodes; None where the row is not what the exit has read."""
        read = torch.cat(self.tokens)
        count = read.shape[0]
        if row.seq_cache.length != self.start or not row.is_chain or len(row.parents) <= count:
            return None
        return torch.cat(self.hidden_states) if torch.equal(row.ids()[:count], read) else None


def common_layer(states: list[EarlyExitState | None]) -> int | None:
    """The layer that all exits of a pass were taken at; None: there are none, or they differ."""
    layers = {state.layer for state in states if state is not None}
    return layers.pop() if len(layers) == 1 else None


def merged(reused: list[Tensor | None], computed: Tensor, row_sizes: list[int]) -> Tensor:
    """Hidden states of all nodes, row by row: first what the exit has computed, then what this pass has."""
    parts: list[Tensor] = []
    start = 0
    for states, size in zip(reused, row_sizes):
        count = size - (0 if states is None else states.shape[0])
        parts += ([] if states is None else [states]) + [computed[start : start + count]]
        start += count
    return torch.cat(parts)
