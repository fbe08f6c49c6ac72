"""LoRA: a low-rank product added to a linear layer for the rows of a pass that ask for it.

The weights of the model are shared by all adapters and stay in their own format. Which rows have which adapter is
written down once before the layers run; a row without one computes what it computes without this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from paceline.layers.gemm_types import Linear


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """What an adapter adds to one linear layer: up · down · x, the scale already in `up`."""

    down: Tensor  # [rank, in_features]
    up: Tensor  # [out_features, rank]

    def __call__(self, x: Tensor) -> Tensor:
        return (x @ self.down.T) @ self.up.T


@dataclass(frozen=True, slots=True)
class LoraSpan:
    """Neighbouring rows with one adapter."""

    lora: str
    rows: slice


@dataclass(slots=True)
class LoraRows:
    """The rows of the pass under way that have an adapter."""

    spans: list[LoraSpan] = field(default_factory=list)

    def begin(self, loras: list[str | None], counts: list[int]) -> None:
        """The next pass: sequence i has counts[i] rows, all with adapter loras[i]."""
        self.spans, start = [], 0
        for lora, group in groupby(zip(loras, counts), key=lambda pair: pair[0]):
            stop = start + sum(count for _, count in group)
            if lora is not None and stop > start:
                self.spans.append(LoraSpan(lora, slice(start, stop)))
            start = stop


@dataclass(frozen=True, slots=True, eq=False)
class LoraLinear(Linear):
    """A linear layer, and what each adapter adds to it. Its products are eager: no kernel knows of adapters."""

    inner: Linear
    deltas: dict[str, LowRank]  # by adapter; none for one that leaves this layer as it is
    rows: LoraRows

    @property
    def out_features(self) -> int:
        return self.inner.out_features

    @property
    def in_features(self) -> int:
        return self.inner.in_features

    @property
    def quantizes_input(self) -> bool:
        return self.inner.quantizes_input

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + sum(delta.down.nbytes + delta.up.nbytes for delta in self.deltas.values())

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        product = self.inner(x, bias)
        for span in self.rows.spans:
            if span.lora in self.deltas:
                product[span.rows] += self.deltas[span.lora](x[span.rows])
        return product

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.inner.dequantize(dtype)
