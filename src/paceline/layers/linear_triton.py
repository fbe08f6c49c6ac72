"""Launches of the product kernels for unquantized weights, and of the argmax over their output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from paceline.layers.gemm_kernels import argmax_kernel, project_kernel, vector_kernel
from paceline.layers.gemm_tiling import tiling
from paceline.layers.gemm_types import Epilogue, Gemm, GemmOutput

VECTOR_COLUMNS = 2  # of one program
ARGMAX_COLUMNS = 32  # the same for the LM head
VECTOR_WARPS = 4


def launch_unquantized(gemm: Gemm, x: Tensor, weight: Tensor, epilogue: Epilogue) -> GemmOutput:
    """x · weightᵀ by the kernel that suits the number of rows."""
    if gemm.fits_vector(x):
        return _by_vector(gemm, x, weight, epilogue)
    return _by_tile(gemm, gemm.normed(x, epilogue), weight, epilogue)


def columns_of(weight_rows: int, epilogue: Epilogue) -> int:
    """Columns of the output: a gate halves the rows of the weight."""
    return weight_rows // (2 if epilogue.gate else 1)


def _by_vector(gemm: Gemm, x: Tensor, weight: Tensor, epilogue: Epilogue) -> GemmOutput:
    columns, in_features = columns_of(weight.shape[0], epilogue), x.shape[1]
    per_program = ARGMAX_COLUMNS if epilogue.argmax else VECTOR_COLUMNS
    output = gemm.buffers(x, columns, per_program, epilogue)
    vector_kernel[(triton.cdiv(columns, per_program), x.shape[0])](
        x, gemm.or_none(epilogue.norm), weight, gemm.or_none(epilogue.bias), gemm.or_none(epilogue.residual),
        output.out, output.best_value, output.best_index, columns, in_features, gemm.eps,
        NORM=epilogue.norm is not None, COLUMNS=per_program, IN_FEATURES=triton.next_power_of_2(in_features),
        num_warps=VECTOR_WARPS, **gemm.flags(epilogue),
    )
    return output


def _by_tile(gemm: Gemm, x: Tensor, weight: Tensor, epilogue: Epilogue) -> GemmOutput:
    columns, in_features = columns_of(weight.shape[0], epilogue), x.shape[1]
    tile = tiling(columns, in_features, epilogue.gate, gemm.tile_rows(x.shape[0]))
    output = gemm.buffers(x, columns, tile.columns, epilogue)
    project_kernel[(triton.cdiv(columns, tile.columns), triton.cdiv(x.shape[0], tile.rows))](
        x, weight, gemm.or_none(epilogue.bias), gemm.or_none(epilogue.residual),
        output.out, output.best_value, output.best_index, x.shape[0], columns, in_features,
        EVEN=in_features % tile.step == 0, TRANSPOSED=tile.transposed, ROWS=tile.rows, COLUMNS=tile.columns,
        STEP=tile.step, num_warps=tile.warps, num_stages=tile.stages,
        **gemm.flags(epilogue, use_pdl=not tile.transposed),
    )
    return output


@dataclass(frozen=True, slots=True, eq=False)
class ArgmaxResult:
    """The best token of each row and, if asked for, its input vector."""

    token: Tensor  # int64 [rows]
    hidden_states: Tensor | None  # [rows, hidden_size]


def argmax(gemm: Gemm, product: GemmOutput, embedding: Tensor | None = None) -> ArgmaxResult:
    """Join the argmax of all programs. embedding: also look the tokens up in it."""
    rows, programs = product.best_index.shape
    if programs == 1:
        token = product.best_index[:, 0].to(torch.int64)
        return ArgmaxResult(token, None if embedding is None else embedding[token])
    token = torch.empty(rows, dtype=torch.int64, device=product.out.device)
    hidden_size = 1 if embedding is None else embedding.shape[1]
    hidden_states = gemm.none if embedding is None else embedding.new_empty(rows, hidden_size)
    argmax_kernel[(rows,)](
        product.best_value, product.best_index, token, gemm.or_none(embedding), hidden_states, programs, hidden_size,
        EMBED=embedding is not None, BLOCKS=triton.next_power_of_2(programs),
        HIDDEN_SIZE=triton.next_power_of_2(hidden_size), USE_PDL=gemm.use_pdl, **gemm.pdl_launch,
    )
    return ArgmaxResult(token, None if embedding is None else hidden_states)
