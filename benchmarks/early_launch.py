"""Launch of a compiled kernel that may start before the kernel ahead of it has ended (programmatic dependent launch).

Such a kernel asks for its weights at once and waits for the kernel ahead only where it reads what that one writes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a value in a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


def launch_early(
    kernel: Any, grid: tuple[int, int, int], threads: int, shared_memory: int, arguments: list[Tensor | int]
) -> None:
    """Launch a kernel of `compiled_kernel` on the current stream. Tensors are passed as pointers, integers as int."""
    values = [_value(argument) for argument in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    early = (_Attribute * 1)(_Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1, b""))
    stream = torch.cuda.current_stream().cuda_stream
    config = _Config((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(threads, 1, 1), shared_memory, stream, early, 1)
    result = _driver().cuLaunchKernelEx(ctypes.byref(config), kernel.func, pointers, None)
    if result != 0:
        raise RuntimeError(f"a kernel could not be launched: CUDA error {result}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _value(argument: Tensor | int) -> ctypes.c_void_p | ctypes.c_int:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int(argument)
