"""A teacher that reads each sequence once: for a training that meets few sequences many times, as beside a server."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.train.corpus import TrainingBatch
from paceline.train.teacher import BatchStates, Teacher


class SequenceKey(NamedTuple):
    """Whose states they are: of these token ids, entering these layers."""

    tokens: bytes
    layers: tuple[int, ...]


class SequenceStates(NamedTuple):
    """[length, …] each; see BatchStates."""

    final: Tensor
    features: Tensor

    @property
    def nbytes(self) -> int:
        return self.final.nbytes + self.features.nbytes


class RememberingTeacher(Teacher):
    """Keeps the states of the latest sequences, up to so many bytes; one that was forgotten is read again."""

    def __init__(self, model: Any, max_bytes: int) -> None:
        super().__init__(model)
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._remembered: OrderedDict[SequenceKey, SequenceStates] = OrderedDict()

    def batch_states(self, batch: TrainingBatch, layers: tuple[int, ...]) -> BatchStates:
        lengths = batch.lengths.tolist()
        rows = batch.tokens.cpu().numpy()
        keys = [SequenceKey(row[:length].tobytes(), layers) for row, length in zip(rows, lengths)]
        missing = [index for index, key in enumerate(keys) if key not in self._remembered]
        read = {keys[index]: states for index, states in zip(missing, self._read(batch, missing, layers))}
        seqs = [self._remembered.get(key) or read[key] for key in keys]
        for key, states in zip(keys, seqs):
            self._remember(key, states)
        width = batch.tokens.shape[1]
        final = torch.stack([_padded(states.final, width) for states in seqs])
        return BatchStates(final, torch.stack([_padded(states.features, width) for states in seqs]))

    def _read(self, batch: TrainingBatch, missing: list[int], layers: tuple[int, ...]) -> list[SequenceStates]:
        """One pass over the sequences that are not remembered, without the padding that only others need."""
        if not missing:
            return []
        lengths = [int(batch.lengths[index]) for index in missing]
        states = self.states(batch.tokens[missing, : max(lengths)])
        features = states.features(layers)
        return [
            SequenceStates(states.final[row, :length].clone(), features[row, :length].clone())
            for row, length in enumerate(lengths)
        ]

    def _remember(self, key: SequenceKey, states: SequenceStates) -> None:
        if key not in self._remembered:
            self.num_bytes += states.nbytes
        self._remembered[key] = states
        self._remembered.move_to_end(key)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._remembered.popitem(last=False)[1].nbytes


def _padded(states: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(states, (0, 0, 0, width - states.shape[0]))
