"""Going on from an early exit: what the lower layers have computed for the draft tokens is not computed again.

An exit writes the keys of its layers into the sequence cache's own blocks, and leaves here the states that left its last layer.
Verification then runs the lower layers only over what the exit has not read (the last draft token), and the upper ones over
everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.types import Row


@dataclass(slots=True, eq=False)
class Ahead:
    """What an exit has computed past `start` tokens of a sequence cache, pass by pass."""

    layer: int
    start: int
    tokens: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # each [tokens, width], as they left the layer

    @property
    def end(self) -> int:
        return self.start + sum(part.shape[0] for part in self.tokens)

    def add(self, tokens: Tensor, states: Tensor) -> None:
        self.tokens.append(tokens)
        self.states.append(states)

    def reaches(self, row: Row) -> Tensor | None:
        """The states of the row's first nodes; None where the row is not what the exit has read."""
        read = torch.cat(self.tokens)
        count = read.shape[0]
        if row.seq_cache.length != self.start or not row.is_chain or len(row.parents) <= count:
            return None
        return torch.cat(self.states) if torch.equal(row.ids()[:count], read) else None


def common_layer(found: list[Ahead | None]) -> int | None:
    """The one layer all exits of a pass were taken at; None: there are none, or they differ."""
    layers = {ahead.layer for ahead in found if ahead is not None}
    return layers.pop() if len(layers) == 1 else None


def merged(known: list[Tensor | None], fresh: Tensor, widths: list[int]) -> Tensor:
    """States of all nodes, row by row: first what is known of a row, then what was computed now."""
    parts: list[Tensor] = []
    at = 0
    for states, width in zip(known, widths):
        left = width - (0 if states is None else states.shape[0])
        parts += ([] if states is None else [states]) + [fresh[at : at + left]]
        at += left
    return torch.cat(parts)
