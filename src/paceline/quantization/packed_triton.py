"""Launch of the kernel for packed integer weights."""

from __future__ import annotations

import triton
from torch import Tensor

from paceline.layers.gemm import GemmLauncher, GemmOutput
from paceline.layers.linear import Epilogue
from paceline.layers.linear_triton import ARGMAX_COLUMNS, VECTOR_WARPS, columns_of
from paceline.quantization.packed import PackedLinear
from paceline.quantization.packed_kernel import packed_kernel

COLUMNS = 8  # of one program
STEP = 512  # columns of the weight that a program reads at a time


def launch_packed(gemm: GemmLauncher, x: Tensor, linear: PackedLinear, epilogue: Epilogue) -> GemmOutput:
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
