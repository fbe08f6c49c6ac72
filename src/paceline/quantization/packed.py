"""Packed weights on a GPU: only the weights have fewer bits, and a kernel dequantizes them as it reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.device.properties import on_host
from paceline.layers.gemm_types import Epilogue, Gemm, GemmOutput, Linear, SavedWeight
from paceline.layers.weight_pieces import WHOLE_ROW, PieceFormat, Pieces, WeightPiece
from paceline.quantization.packed_layout import (
    STEP,
    TILE,
    Kind,
    groups_of_span,
    pack_high,
    pack_words,
    tiled,
    unpack_words,
    untiled,
)
from paceline.quantization.quantized_weight import OUTER_GROUP, BlockScales, QuantizedWeight

KERNEL_ROWS = 64  # above that the weight is dequantized and multiplied by cuBLAS
GROUP_SIZES = (16, 32, 64)  # beside multiples of a step; no smaller than the words of one


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear(Linear):
    """Codes in words as quantization/packed_layout.py says, with one scale a group of columns. Inputs stay exact."""

    words: Tensor  # int32, or int16 of 2 and 3 bits: [tiles, steps, 16, words of a step]
    scales: Tensor  # [tiles, spans, 16, groups of a span]
    kind: Kind
    group_size: int  # input features that share a scale; in_features where all of them do
    in_features: int
    out_features: int
    zeros: Tensor | None = None  # as scales
    order: Tensor | None = None  # int64 [in_features]
    table: Tensor | None = None  # float32 [16]
    rounding: torch.dtype | None = None
    high: Tensor | None = None  # uint8 or int16, as words
    block: BlockScales | None = None  # as scales; the outer ones [tiles, in_features / 256, 16, 1]

    @property
    def groups(self) -> int:
        """Of a row."""
        return -(-self.in_features // self.group_size)

    @property
    def quantizes_input(self) -> bool:
        return False

    @property
    def kernel_rows(self) -> int:
        return KERNEL_ROWS

    @property
    def nbytes(self) -> int:
        beside = (self.scales, self.zeros, self.high, self.block)
        return self.words.nbytes + sum(part.nbytes for part in beside if part is not None)

    @property
    def pass_pieces(self) -> Pieces | None:
        form = _piece_format(self)
        if form is None:
            return None
        block = self.block or BlockScales()
        outer = (block.outer_scales, block.outer_minimums)
        beside = (self.words, self.high, self.scales, block.minimums, *outer)
        shared = WHOLE_ROW if self.groups == 1 else max(self.group_size // STEP, 1).bit_length() - 1
        return (WeightPiece(form, self.out_features, self.in_features, *beside, shared),)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight as the format's own library unpacks it."""
        if not on_host(self.words.device) and dtype != torch.float64:
            from paceline.quantization.packed_triton import unpack

            return unpack(self, dtype)
        return self._unpacked().dequantize(dtype)

    def _unpacked(self) -> QuantizedWeight:
        def by_row(tensor: Tensor) -> Tensor:
            return untiled(tensor, self.out_features)[:, : self.groups]  # without padding, which outer scales have not

        scales, zeros = by_row(self.scales), None if self.zeros is None else by_row(self.zeros)
        block = None if self.block is None else self.block.mapped(by_row)
        codes = unpack_words(self.words, self.kind, (self.out_features, self.in_features), self.high)
        parts = (self.kind, codes, scales, self.group_size, zeros, self.order, self.table, self.rounding)
        return QuantizedWeight(*parts, block)

    def rows(self, places: Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows of the weight: [places, in_features] of int64 [places]."""
        if not on_host(self.words.device):
            from paceline.quantization.packed_triton import unpack

            return unpack(self, dtype, places)
        return self._taken(places).dequantize(dtype)

    def _taken(self, places: Tensor) -> PackedLinear:
        """The same weight with some of its rows."""

        def take(tensor: Tensor) -> Tensor:
            return tiled(tensor[places // TILE, :, places % TILE].flatten(1), tensor.shape[-1])

        words, scales, rows = take(self.words), take(self.scales), len(places)
        zeros, high = (None if part is None else take(part) for part in (self.zeros, self.high))
        block = None if self.block is None else self.block.mapped(take)
        return replace(self, words=words, scales=scales, out_features=rows, zeros=zeros, high=high, block=block)

    def saved(self) -> SavedWeight | None:
        """Weights that are converted at load have codes and scales alone."""
        if any(part is not None for part in (self.zeros, self.order, self.table, self.high, self.block)):
            return None
        numbers = {"kind": int(self.kind), "group_size": self.group_size}
        numbers |= {"in_features": self.in_features, "out_features": self.out_features}
        return SavedWeight("packed", {"words": self.words, "scales": self.scales}, numbers)

    @classmethod
    def restored(cls, saved: SavedWeight) -> PackedLinear:
        """What `saved` has made."""
        tensors, numbers = saved.tensors, saved.numbers
        group_size, columns, rows = (numbers[name] for name in ("group_size", "in_features", "out_features"))
        return cls(tensors["words"], tensors["scales"], Kind(numbers["kind"]), group_size, columns, rows)

    def as_embedding(self, dtype: torch.dtype) -> PackedEmbedding:
        return PackedEmbedding(self, dtype)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.dequantize(x.dtype), bias)

    def launch(self, gemm: Gemm, x: Tensor, epilogue: Epilogue) -> GemmOutput | None:
        from paceline.quantization.packed_triton import launch_packed

        normed = gemm.normed(x, epilogue)
        return launch_packed(gemm, normed if self.order is None else normed[:, self.order], self, epilogue)


@dataclass(frozen=True, slots=True, eq=False)
class PackedEmbedding:
    """An embedding in a packed weight: the rows of the tokens asked for are unpacked."""

    linear: PackedLinear
    dtype: torch.dtype

    def __getitem__(self, tokens: Tensor) -> Tensor:
        rows = self.linear.rows(tokens.flatten(), self.dtype)
        return rows.view(*tokens.shape, self.linear.in_features)


def _piece_format(linear: PackedLinear) -> PieceFormat | None:
    """The format of this name in the kernel of a whole pass; None: it has none for this weight."""
    even = linear.in_features % STEP == 0 and linear.out_features % TILE == 0  # it reads whole tiles
    if not even or any(part is not None for part in (linear.zeros, linear.order, linear.table)):
        return None
    if linear.block is not None:
        return _block_format(linear, linear.block)
    steps = linear.group_size // STEP
    shared = linear.groups == 1 or (linear.group_size % STEP == 0 and steps.bit_count() == 1)
    formats = {
        (Kind.INT4, torch.bfloat16): PieceFormat.INT4,
        (Kind.FP8, torch.float32): PieceFormat.FP8,
    }
    return formats.get((linear.kind, linear.scales.dtype)) if shared else None


def _block_format(linear: PackedLinear, block: BlockScales) -> PieceFormat | None:
    """Of weights in blocks of GGUF files: those of 256 columns."""
    if block.outer_scales is None or linear.in_features % OUTER_GROUP:
        return None
    formats = {(Kind.INT4, True): PieceFormat.Q4_K, (Kind.INT6, False): PieceFormat.Q6_K}
    return formats.get((linear.kind, block.has_minimums))


def fits_kernel(weight: QuantizedWeight) -> bool:
    """Whether the kernel takes groups of this size."""
    groups = weight.scales.shape[1]
    small = weight.group_size in GROUP_SIZES and weight.group_size >= weight.kind.words
    return groups == 1 or small or weight.group_size % STEP == 0


def pack_weight(weight: QuantizedWeight) -> PackedLinear:
    """A quantized weight as the kernel reads it; `fits_kernel` says whether it can be."""
    out_features, in_features = weight.codes.shape
    group_size = in_features if weight.scales.shape[1] == 1 else weight.group_size
    width, zeros = groups_of_span(group_size, in_features), weight.zeros
    return PackedLinear(
        pack_words(weight.codes, weight.kind),
        tiled(weight.scales, width),
        weight.kind,
        group_size,
        in_features,
        out_features,
        None if zeros is None else tiled(zeros.to(torch.bfloat16), width),
        weight.order,
        weight.table,
        weight.rounding,
        pack_high(weight.codes, weight.kind),
        None if weight.block is None else _tiled_block(weight.block, width),
    )


def _tiled_block(block: BlockScales, width: int) -> BlockScales:
    """width: of the minimums; those of 256 input features have no neighbours."""
    parts = ((block.minimums, width), (block.outer_scales, 1), (block.outer_minimums, 1))
    minimums, outer_scales, outer_minimums = (None if part is None else tiled(part, size) for part, size in parts)
    return BlockScales(minimums, outer_scales, outer_minimums, block.nibbles)


def round_weight(weight: Tensor, kind: Kind, group_size: int) -> QuantizedWeight:
    """A weight rounded to 8 or 4 bits, symmetric, with one scale for every `group_size` columns of a row."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, group_size)
    largest = (1 << (kind.bits - 1)) - 1
    scales = (groups.abs().amax(dim=-1) / largest).clamp_min(1e-8)
    scales = scales if kind is Kind.INT8 else scales.to(torch.bfloat16)
    codes = (groups / scales.float()[..., None]).round_().clamp_(-largest - 1, largest).add_(largest + 1)
    return QuantizedWeight(kind, codes.view(rows, columns).to(torch.uint8), scales, group_size)
