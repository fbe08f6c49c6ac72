"""What one drafter reads of the states that a target returns.

Drafters of one target may read different layers: the target returns the states of all of them, each layer once and in
rising order, and every drafter takes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from paceline.core.types import RowOutput


def all_layers(exposed: Iterable[int], layers: Iterable[int]) -> tuple[int, ...]:
    """Each of these layers once, in rising order: what a target returns for all its drafters."""
    return tuple(sorted({*exposed, *layers}))


class StateView:
    """The last states, or those that enter some layers, joined in the order in which they were asked for."""

    def __init__(self, layers: tuple[int, ...], exposed: Callable[[], tuple[int, ...]]) -> None:
        """layers: (): the last states. exposed: the layers whose states the target returns now."""
        self._layers, self._exposed = layers, exposed

    def of(self, output: RowOutput) -> Tensor | None:
        """The states of an output; None where the target returned none. [positions, features]"""
        if not self._layers:
            return output.hidden
        features, exposed = output.features, self._exposed()
        if features is None or exposed == self._layers:
            return features
        parts = features.chunk(len(exposed), dim=-1)
        return torch.cat([parts[exposed.index(layer)] for layer in self._layers], dim=-1)
