"""Launch of the kernel for packed integer weights."""

from __future__ import annotations

from typing import Protocol

import triton
from torch import Tensor

from paceline.layers.gemm_types import Epilogue, Gemm, GemmOutput
from paceline.layers.linear_triton import ARGMAX_COLUMNS, VECTOR_WARPS, columns_of
from paceline.quantization.packed_kernel import packed_kernel


class PackedWeights(Protocol):
    """What the kernel reads of a packed linear layer."""

    @property
    def values(self) -> Tensor: ...

    @property
    def scales(self) -> Tensor: ...

    @property
    def bits(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def group_size(self) -> int: ...


COLUMNS = 8  # of one program
STEP = 512  # columns of the weight that a program reads at a time


def launch_packed(gemm: Gemm, x: Tensor, linear: PackedWeights, epilogue: Epilogue) -> GemmOutput:
    """x, already normed, through a packed linear layer."""
    columns, in_features = columns_of(linear.out_features, epilogue), x.shape[1]
    per_program = ARGMAX_COLUMNS if epilogue.argmax else COLUMNS
    output = gemm.buffers(x, columns, per_program, epilogue)
    packed_kernel[(triton.cdiv(columns, per_program), x.shape[0])](
        x, linear.values, linear.scales, gemm.or_none(epilogue.bias), gemm.or_none(epilogue.residual),
        output.out, output.best_value, output.best_index, columns, in_features, linear.scales.shape[1],
        BITS=linear.bits, GROUP=linear.group_size, COLUMNS=per_program, STEP=STEP, num_warps=VECTOR_WARPS,
        **gemm.flags(epilogue),
    )
    return output
