"""Weights on a CPU in the blocks of the compiled kernels (layers/cpu_kernels.c).

A product rounds its input to 8 bits, one scale for every 32 values of a token, so a token's numbers do not depend on
the tokens beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.device.memory import weight_buffer
from paceline.layers.cpu_kernels import (
    BLOCK_ROWS,
    CLinear,
    WeightBlocks,
    WeightKind,
    blocks_product,
    joined,
    pack_blocks,
    unpack_blocks,
)
from paceline.layers.gemm_types import Linear, SavedWeight


@dataclass(frozen=True, slots=True, eq=False)
class BlockedLinear(Linear):
    """Weights with the same input, joined by rows; each piece may be stored in another way."""

    blocks: tuple[WeightBlocks, ...]
    _structure: CLinear = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_structure", joined(self.blocks))

    @property
    def out_features(self) -> int:
        return sum(piece.rows for piece in self.blocks)

    @property
    def in_features(self) -> int:
        return self.blocks[0].columns

    @property
    def quantizes_input(self) -> bool:
        return any(piece.kind != WeightKind.FLOAT32 for piece in self.blocks)

    @property
    def nbytes(self) -> int:
        return sum(piece.data.nbytes for piece in self.blocks)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        added = None if bias is None else bias.float().contiguous()
        return blocks_product(x.float(), self._structure, added).to(x.dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([unpack_blocks(piece) for piece in self.blocks]).to(dtype)

    def first_rows(self, count: int) -> BlockedLinear | None:
        if len(self.blocks) > 1 or count % BLOCK_ROWS:
            return None
        return BlockedLinear((replace(self.blocks[0], rows=count),))

    def saved(self) -> SavedWeight | None:
        if len(self.blocks) > 1:
            return None
        piece = self.blocks[0]
        numbers = {"kind": int(piece.kind), "rows": piece.rows, "columns": piece.columns}
        return SavedWeight("blocked", {"data": piece.data}, numbers)

    @classmethod
    def restored(cls, saved: SavedWeight) -> BlockedLinear:
        """What `saved` has made, in memory of its own: a pass reads a mapped file more slowly."""
        numbers, data = saved.numbers, saved.tensors["data"]
        buffer = weight_buffer(data.nbytes).copy_(data)
        return cls((WeightBlocks(buffer, WeightKind(numbers["kind"]), numbers["rows"], numbers["columns"]),))

    def as_embedding(self, dtype: torch.dtype) -> BlockedEmbedding:
        return BlockedEmbedding(self.blocks[0])


@dataclass(frozen=True, slots=True, eq=False)
class BlockedEmbedding:
    """An embedding in blocks: the rows of the tokens asked for are unpacked."""

    blocks: WeightBlocks

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def linear(self) -> BlockedLinear:
        return BlockedLinear((self.blocks,))

    def __getitem__(self, tokens: Tensor) -> Tensor:
        rows = unpack_blocks(self.blocks, tokens.flatten())
        return rows.view(*tokens.shape, self.blocks.columns)


def block(weight: Tensor, bits: int) -> BlockedLinear:
    """A weight in blocks of the kernels; layers/cpu_kernels.fits_blocks says whether it can be."""
    return BlockedLinear((pack_blocks(weight, bits),))
