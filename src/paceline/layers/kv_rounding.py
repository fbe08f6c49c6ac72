"""Keys and values in eight bits (e4m3), as a cache may keep them. LOSSY: the output is not that of the model.

The bytes have no scale: numbers of keys and values are small, and what is larger than 448 becomes that. A token is
rounded once, when it is written, and always read from the cache, so it is treated alike alone and among draft tokens.
The Triton form is in layers/attention_kernels.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
STORED_DTYPE = torch.uint8  # torch indexes no eight-bit floats


def to_cache(numbers: Tensor, cache: Tensor) -> Tensor:
    """Keys or values as a cache stores them: as they are, or as bytes."""
    if cache.dtype != STORED_DTYPE:
        return numbers
    return numbers.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(STORED_DTYPE)


def from_cache(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Entries of a cache as numbers that attention reads."""
    return stored if stored.dtype != STORED_DTYPE else stored.view(torch.float8_e4m3fn).to(dtype)
