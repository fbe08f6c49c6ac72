"""int4 and int8 weights on a CPU in the blocks of the compiled kernels (layers/cpu_kernels.c).

A product rounds its input to 8 bits, one scale for every 32 values of a token, so a token's numbers do not depend on
the tokens beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.layers.cpu_kernels import CWeight, WeightBlocks, blocks_product, pack_blocks, unpack_blocks
from paceline.layers.gemm_types import Epilogue, Gemm, GemmOutput, Linear


@dataclass(frozen=True, slots=True, eq=False)
class BlockedLinear(Linear):
    """Weights in blocks of eight rows; each 32 columns of a row share a scale."""

    blocks: WeightBlocks
    _structure: CWeight = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_structure", self.blocks.structure())

    @property
    def out_features(self) -> int:
        return self.blocks.rows

    @property
    def in_features(self) -> int:
        return self.blocks.columns

    @property
    def quantizes_input(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return self.blocks.data.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        added = None if bias is None else bias.float().contiguous()
        return blocks_product(x.float(), self._structure, added).to(x.dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return unpack_blocks(self.blocks).to(dtype)

    def launch(self, gemm: Gemm, x: Tensor, epilogue: Epilogue) -> GemmOutput | None:
        return None


def block(weight: Tensor, bits: int) -> BlockedLinear:
    """A weight in blocks of the kernels; layers/cpu_kernels.fits_blocks says whether it can be."""
    return BlockedLinear(pack_blocks(weight, bits))
