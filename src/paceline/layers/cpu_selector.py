"""The path of a candidate selector in one call of the compiled CPU kernels (layers/cpu_selector.c).

Through torch the path of three rows is some thirty small operations, which take longer than the head's layers.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.device.properties import on_host
from paceline.layers.cpu_kernels import library

MAX_CANDIDATES = 64  # as in cpu_selector.c


class CSelector(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("before", "after", "target_ids")),
        *((name, ctypes.c_int32) for name in ("rank", "vocab_size", "draft_vocab_size", "top_k")),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class SelectedPath:
    """Tokens of one sequence, ids of the target, and how sure the head is of each. Both [depth]."""

    tokens: Tensor
    confidence: Tensor


class CompiledSelector:
    """The codebooks of a selector as they are: changed in place, they are changed here too. `of` makes it."""

    def __init__(self, before: Tensor, after: Tensor, target_ids: Tensor, top_k: int) -> None:
        self._weights = (before, after, target_ids)
        places = (tensor.data_ptr() for tensor in self._weights)
        self._structure = CSelector(*places, before.shape[1], before.shape[0], after.shape[0], top_k)

    @classmethod
    def of(cls, before: Tensor, after: Tensor, target_ids: Tensor, top_k: int) -> CompiledSelector | None:
        """before [vocab_size, rank], after [draft_vocab_size, rank], target_ids int64. None: the kernels lack it."""
        books = (before.detach(), after.detach())
        fits = all(book.dtype == torch.float32 and book.is_contiguous() and on_host(book.device) for book in books)
        if not fits or top_k > MAX_CANDIDATES or library() is None:
            return None
        return cls(*books, target_ids.contiguous(), top_k)

    def path(self, logits: Tensor, gates: Tensor, anchor: int) -> SelectedPath:
        """logits float32 [depth, draft_vocab_size], gates float32 [depth, rank] -> the greedy path after the anchor."""
        depth, compiled = logits.shape[0], library()
        assert compiled is not None and logits.dtype == gates.dtype == torch.float32
        logits, gates = logits.contiguous(), gates.contiguous()
        tokens, confidence = torch.empty(depth, dtype=torch.int64), torch.empty(depth)
        inputs = (ctypes.c_void_p(logits.data_ptr()), ctypes.c_void_p(gates.data_ptr()), depth)
        outputs = (ctypes.c_void_p(tokens.data_ptr()), ctypes.c_void_p(confidence.data_ptr()))
        structure = ctypes.byref(self._structure)
        if compiled.paceline_select_path(structure, *inputs, ctypes.c_int64(anchor), *outputs):
            raise IndexError(f"the selector knows no token {anchor}")
        return SelectedPath(tokens, confidence)
