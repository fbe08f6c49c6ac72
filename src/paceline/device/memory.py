"""Memory by device: pinned host buffers, and caches that cost only what is filled."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from paceline.device.properties import on_host, supports_float64, supports_graphs


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the host, pinned where that makes the copy to `device` asynchronous."""
    return torch.zeros(shape, dtype=dtype, pin_memory=supports_graphs(device))


def zeroed_cache(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for keys or values, all zeros: attention may read, with weight 0, entries that no token has written yet.

    On a CPU the system provides such memory only when it is touched, so a cache costs what sequences fill of it. It
    comes in small units: of the huge ones the first tokens of a sequence touch two in each layer, and clearing those
    takes as long as a pass.
    """
    if not on_host(device):
        return torch.zeros(shape, dtype=dtype, device=device)
    mapping = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(mapping, dtype=dtype).view(shape)


def for_sampling(logits: Tensor) -> Tensor:
    """Logits where tokens can be drawn from them: on the host where the device has no float64."""
    return logits if supports_float64(logits.device) else logits.cpu()
