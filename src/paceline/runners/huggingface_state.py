"""What a transformers model carries from pass to pass for one sequence, and how it is taken back.

Keys and values of full attention are cut back. A window that has moved on, a recurrent or a convolution state cannot
be: a checkpoint from before is restored, and the tokens since then are read again, by the same code as the first time.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
)

STATE_NAMES = ("past_key_values", "cache_params", "state")  # outputs of a pass that the next pass takes as inputs
GROWING_LAYERS = (DynamicLayer, DynamicIndexedLayer, LinearAttentionAndFullAttentionLayer)
LENGTH_DIMS = {"keys": -2, "values": -2, "indexer_keys": -2, "indexer_position_ids": -1}
MAX_CHECKPOINTS = 6
UNKNOWN_LENGTH = 1 << 60  # a pass has begun and not ended


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor that only grows: a smaller `length` along `dim` is its earlier value."""

    dim: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.dim, 0, self.length)


@dataclass(frozen=True, slots=True)
class StateCheckpoint:
    """The state after `length` tokens: by input name, what `snapshot` returned."""

    length: int
    contents: dict[str, Any]


class ModelState:
    """The state of one sequence after `length` tokens, with checkpoints to go back to."""

    def __init__(self) -> None:
        self.inputs: dict[str, Any] = {}  # of the next pass
        self.length = 0
        self._checkpoints: list[StateCheckpoint] = []  # shortest first

    def begin_pass(self) -> dict[str, Any]:
        """Keep a checkpoint; returns the inputs of the pass. Until `end_pass` the state counts as broken."""
        if self.length and (not self._checkpoints or self._checkpoints[-1].length < self.length):
            contents = {name: snapshot(value) for name, value in self.inputs.items()}
            self._checkpoints = thinned([*self._checkpoints, StateCheckpoint(self.length, contents)])
        self.length = UNKNOWN_LENGTH
        return self.inputs

    def end_pass(self, output: Any, length: int) -> None:
        """What a pass returned is the state after `length` tokens."""
        self.inputs = {name: output[name] for name in STATE_NAMES if output.get(name) is not None}
        self.length = length

    def rewind(self, length: int) -> None:
        """Go back to the latest checkpoint of at most `length` tokens, or to the beginning, if the state is past it."""
        if self.length <= length:
            return
        checkpoint = self._latest(length)
        if checkpoint is None:
            self.inputs, self.length = {}, 0
        else:
            for name, value in self.inputs.items():
                self.inputs[name] = restored(value, checkpoint.contents[name])
            self.length = checkpoint.length

    def _latest(self, length: int) -> StateCheckpoint | None:
        """The latest checkpoint of at most `length` tokens; those past it are dropped."""
        self._checkpoints = [checkpoint for checkpoint in self._checkpoints if checkpoint.length <= length]
        return self._checkpoints[-1] if self._checkpoints else None

    def fork(self, length: int) -> ModelState:
        """A state of its own, of at most `length` tokens. This one is not changed."""
        twin, source = ModelState(), self._source(length)
        if source is not None:
            twin.length = source.length
            for name, value in self.inputs.items():
                twin.inputs[name] = restored(_twin(value), source.contents[name])
        return twin

    def _source(self, length: int) -> StateCheckpoint | None:
        """The state now if it is of at most `length` tokens, else the latest checkpoint that is."""
        if self.length <= length:
            return StateCheckpoint(self.length, {name: snapshot(value) for name, value in self.inputs.items()})
        return next((part for part in reversed(self._checkpoints) if part.length <= length), None)


def thinned(checkpoints: list[StateCheckpoint]) -> list[StateCheckpoint]:
    """The newest, the oldest, and between them as few as leave no gap of more than twice the distance before it.

    Going back n tokens then reads few more than n again, and few states are kept.
    """
    backwards = checkpoints[::-1]
    newest, kept = backwards[0].length, backwards[:1]
    for checkpoint, older in pairwise(backwards[1:]):
        if newest - older.length > 2 * (newest - kept[-1].length):
            kept.append(checkpoint)
    oldest = backwards[-1:] if len(backwards) > 1 else []
    return [*kept[: MAX_CHECKPOINTS - 1], *oldest][::-1]


def snapshot(value: Any) -> Any:
    """What `restored` needs to bring a state back. Tensors that only grow cost nothing."""
    if isinstance(value, DynamicCache):
        return [_layer_snapshot(layer) for layer in value.layers]
    return _copied(value)


def restored(value: Any, contents: Any) -> Any:
    """The state as it was when `snapshot` returned these contents."""
    if not isinstance(value, DynamicCache):
        return _copied(contents)
    for layer, attributes in zip(value.layers, contents):
        for name, kept in attributes.items():
            setattr(layer, name, kept.of(getattr(layer, name)) if isinstance(kept, Cut) else _copied(kept))
    return value


def _layer_snapshot(layer: Any) -> dict[str, Any]:
    growing = LENGTH_DIMS if type(layer) in GROWING_LAYERS else {}
    return {
        name: Cut(growing[name], value.shape[growing[name]])
        if name in growing and isinstance(value, Tensor)
        else _copied(value)
        for name, value in vars(layer).items()
    }


def _twin(value: Any) -> Any:
    """A cache object with layers of its own, which still share their tensors."""
    if not isinstance(value, DynamicCache):
        return value
    twin = copy.copy(value)
    twin.layers = [copy.copy(layer) for layer in value.layers]
    return twin


def _copied(value: Any) -> Any:
    """In memory of its own: recurrent states are written in place."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(part) for part in value)
    return copy.deepcopy(value)
