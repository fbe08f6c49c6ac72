"""Memory by device: pinned host buffers, and caches that cost only what is filled."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

from paceline.device.properties import on_host, supports_float64, supports_graphs

HUGE_UNIT = 1 << 21  # bytes; smaller buffers hold none


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the host, pinned where that makes the copy to `device` asynchronous."""
    return torch.zeros(shape, dtype=dtype, pin_memory=supports_graphs(device))


def zeroed_cache(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for keys or values, all zeros: attention may read, with weight 0, entries that no token has written yet.

    On a CPU the system provides such memory only when it is touched, so a cache costs what sequences fill of it. It
    comes in small units: of the huge ones the first tokens of a sequence touch two in each layer, and clearing those
    takes as long as a pass.
    """
    if not on_host(device) or 0 in shape:  # a mapping has at least one byte
        return torch.zeros(shape, dtype=dtype, device=device)
    mapping = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(mapping, dtype=dtype).view(shape)


def weight_buffer(size: int) -> Tensor:
    """Bytes on the host for weights that every pass reads from end to end: in huge units where the system has them.

    A pass over a gigabyte in units of 4 kB looks up as many addresses as it has units.
    """
    if size < HUGE_UNIT or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    mapping = mmap.mmap(-1, size, access=mmap.ACCESS_COPY)
    with suppress(OSError):  # a system without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


class Upload:
    """Copies a host buffer to the device again and again. The host must not refill it before the last copy has left.

    The copy runs beside the host, which is often several passes ahead.
    """

    def __init__(self, host: Tensor, device: Tensor) -> None:
        self._host, self._device = host, device
        self._sent = torch.cuda.Event() if device.is_cuda else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """The host buffer may be filled."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def for_sampling(logits: Tensor) -> Tensor:
    """Logits where tokens can be drawn from them: on the host where the device has no float64."""
    return logits if supports_float64(logits.device) else logits.cpu()
