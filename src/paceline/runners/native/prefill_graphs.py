"""Captured first reads of prompts.

A prompt of a few hundred tokens is little work for a GPU, but hundreds of launches for its host, and all other sequences
wait meanwhile. Here the first read of a sequence is one graph: padded to a fixed width, since nothing looks at what comes
after it, the padding stored on a block that belongs to no sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.core.types import ModelOutput
from paceline.device.graphs import Captured, Pool
from paceline.runners.native.eager_ops import EagerBatch, EagerOps, TextPart
from paceline.runners.native.model import run_layers
from paceline.runners.native.weights import Weights

WIDTHS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


class Reader(Protocol):
    """What captured reads need of their runner."""

    weights: Weights
    plain: EagerOps
    rope_cache: Tensor
    want_hidden: bool
    feature_layers: tuple[int, ...]
    last_layer: int
    scratch: int  # a place in the cache that belongs to no sequence

    def speak(self, hidden: Tensor) -> Tensor:
        """States behind the final norm -> logits."""


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """What a read left: tensors of the graph, to be copied before the next one."""

    logits: Tensor  # [1, vocab] after the last token
    hidden: Tensor | None  # [width, …] padding included
    features: Tensor | None


@dataclass(slots=True, eq=False)
class _Prepared:
    """One captured width and the integers it reads."""

    tokens: Tensor
    places: Tensor
    last: Tensor
    run: Callable[[], _Read]


class PrefillGraphs:
    """First reads of single sequences, captured by width on first use. Without a pool they run launch by launch (tests)."""

    def __init__(self, reader: Reader, pool: Pool | None) -> None:
        self._reader, self._pool = reader, pool
        self._device = reader.rope_cache.device
        self._prepared: dict[Any, _Prepared] = {}

    def fits(self, tokens: int) -> bool:
        return 2 < tokens <= WIDTHS[-1]

    def read(self, tokens: Tensor, places: Tensor) -> ModelOutput:
        """Read a sequence from its first token on. Both int64 [count]; places: where its tokens lie in the flat cache."""
        count = tokens.shape[0]
        prepared = self._width(next(width for width in WIDTHS if width >= count))
        prepared.tokens[:count].copy_(tokens, non_blocking=True)
        prepared.places[:count].copy_(places, non_blocking=True)
        prepared.places[count:] = self._reader.scratch
        prepared.last.fill_(count - 1)
        output = prepared.run()
        hidden, features = (None if part is None else part[:count].clone() for part in (output.hidden, output.features))
        return ModelOutput(output.logits.clone(), [1], hidden, features, [count])

    def _width(self, width: int) -> _Prepared:
        reader = self._reader
        key = (width, reader.want_hidden, reader.feature_layers)
        if key not in self._prepared:
            tokens = torch.zeros(width, dtype=torch.int64, device=self._device)
            places = torch.full_like(tokens, reader.scratch)  # recording runs the pass: it must not write into a sequence
            last = torch.zeros(1, dtype=torch.int64, device=self._device)
            prepared = _Prepared(tokens, places, last, lambda: self._work(prepared))
            if self._pool is not None:
                prepared.run = Captured(lambda: self._work(prepared), "the read of a prompt", self._pool)
            self._prepared[key] = prepared
        return self._prepared[key]

    def _work(self, given: _Prepared) -> _Read:
        reader, width = self._reader, given.tokens.shape[0]
        turn = reader.rope_cache[:width].to(reader.weights.embedding.dtype)[:, None]
        cosines, sines = turn[:, :, 0], turn[:, :, 1]
        part = TextPart(0, width, 0, given.places, given.places, None)
        batch = EagerBatch(torch.cat([cosines, cosines], dim=-1), torch.cat([-sines, sines], dim=-1), [part])
        stream = reader.weights.embedding[given.tokens]
        states = run_layers(
            reader.weights, stream, batch, reader.plain, reader.feature_layers, last=reader.last_layer
        )
        wanted = states.stream if reader.want_hidden else states.stream[given.last]
        hidden = reader.plain.norm(wanted, reader.weights.final_norm)
        output = hidden[given.last] if reader.want_hidden else hidden
        return _Read(reader.speak(output), hidden if reader.want_hidden else None, states.features)
