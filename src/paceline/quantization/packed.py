"""Packed weights on a GPU: only the weights have fewer bits, and a kernel dequantizes them as it reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.device.properties import on_host
from paceline.layers.gemm_types import Epilogue, Gemm, GemmOutput, Linear, SavedWeight
from paceline.quantization.packed_layout import STEP, Kind, pack_high, pack_words, unpack_words
from paceline.quantization.quantized_weight import BlockScales, QuantizedWeight

KERNEL_ROWS = 64  # above that the weight is dequantized and multiplied by cuBLAS
GROUP_SIZES = (16, 32, 64)  # beside multiples of a step; no smaller than the words of one


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear(Linear):
    """Codes in words as quantization/packed_layout.py says, with one scale a group of columns. Inputs stay exact."""

    words: Tensor  # int32 [steps, out_features, words of a step]
    scales: Tensor  # [groups, out_features]
    kind: Kind
    group_size: int  # input features that share a scale
    in_features: int
    zeros: Tensor | None = None  # [groups, out_features]
    order: Tensor | None = None  # int64 [in_features]
    table: Tensor | None = None  # float32 [16]
    rounding: torch.dtype | None = None
    high: Tensor | None = None  # uint8 or int16 [steps, out_features, words of a step]
    block: BlockScales | None = None  # [groups, out_features]

    @property
    def out_features(self) -> int:
        return self.words.shape[1]

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

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight as the format's own library unpacks it."""
        if not on_host(self.words.device) and dtype != torch.float64:
            from paceline.quantization.packed_triton import unpack

            return unpack(self, dtype)
        return self._unpacked().dequantize(dtype)

    def _unpacked(self) -> QuantizedWeight:
        zeros = None if self.zeros is None else self.zeros.t()
        block = None if self.block is None else self.block.mapped(Tensor.t)
        codes = unpack_words(self.words, self.kind, self.in_features, self.high)
        parts = (self.kind, codes, self.scales.t(), self.group_size, zeros, self.order, self.table, self.rounding)
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
            return tensor[:, places]

        zeros, high = (None if part is None else take(part) for part in (self.zeros, self.high))
        block = None if self.block is None else self.block.mapped(take)
        return replace(self, words=take(self.words), scales=take(self.scales), zeros=zeros, high=high, block=block)

    def saved(self) -> SavedWeight | None:
        """Weights that are converted at load have codes and scales alone."""
        if any(part is not None for part in (self.zeros, self.order, self.table, self.high, self.block)):
            return None
        numbers = {"kind": int(self.kind), "group_size": self.group_size, "in_features": self.in_features}
        return SavedWeight("packed", {"words": self.words, "scales": self.scales}, numbers)

    @classmethod
    def restored(cls, saved: SavedWeight) -> PackedLinear:
        """What `saved` has made."""
        tensors, numbers = saved.tensors, saved.numbers
        kind, group_size, in_features = (numbers[name] for name in ("kind", "group_size", "in_features"))
        return cls(tensors["words"], tensors["scales"], Kind(kind), group_size, in_features)

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


def fits_kernel(weight: QuantizedWeight) -> bool:
    """Whether the kernel takes groups of this size."""
    groups = weight.scales.shape[1]
    small = weight.group_size in GROUP_SIZES and weight.group_size >= weight.kind.words
    return groups == 1 or small or weight.group_size % STEP == 0


def pack_weight(weight: QuantizedWeight) -> PackedLinear:
    """A quantized weight as the kernel reads it; `fits_kernel` says whether it can be."""
    scales, zeros = weight.scales.t().contiguous(), weight.zeros
    return PackedLinear(
        pack_words(weight.codes, weight.kind),
        scales,
        weight.kind,
        weight.codes.shape[1] if scales.shape[0] == 1 else weight.group_size,
        weight.codes.shape[1],
        None if zeros is None else zeros.t().to(torch.bfloat16).contiguous(),
        weight.order,
        weight.table,
        weight.rounding,
        pack_high(weight.codes, weight.kind),
        None if weight.block is None else weight.block.mapped(lambda part: part.t().contiguous()),
    )


def round_weight(weight: Tensor, kind: Kind, group_size: int) -> QuantizedWeight:
    """A weight rounded to 8 or 4 bits, symmetric, with one scale for every `group_size` columns of a row."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, group_size)
    largest = (1 << (kind.bits - 1)) - 1
    scales = (groups.abs().amax(dim=-1) / largest).clamp_min(1e-8)
    scales = scales if kind is Kind.INT8 else scales.to(torch.bfloat16)
    codes = (groups / scales.float()[..., None]).round_().clamp_(-largest - 1, largest).add_(largest + 1)
    return QuantizedWeight(kind, codes.view(rows, columns).to(torch.uint8), scales, group_size)
