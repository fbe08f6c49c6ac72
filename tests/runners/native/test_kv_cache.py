"""Pages of a cache: zeros, aligned as torch aligns, and on a CPU not there before they are used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.runners.native.kv_cache import empty_blocks

STATM = Path("/proc/self/statm")
ALIGNED = 64  # bytes: as torch aligns its own memory
PAGES_OF_A_GIGABYTE = (1 << 30) // 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_are_zeros(dtype: torch.dtype) -> None:
    blocks = empty_blocks((2, 48, 3, 16), dtype, torch.device("cpu"))
    assert blocks.dtype == dtype and blocks.shape == (2, 48, 3, 16) and blocks.is_contiguous()
    assert not blocks.any() and blocks.data_ptr() % ALIGNED == 0
    blocks[1, 5] = 1
    assert int(blocks.sum()) == 48


@pytest.mark.skipif(not STATM.exists(), reason="asks the system how much memory the process really has")
def test_a_cache_costs_what_is_filled_of_it() -> None:
    def held() -> int:
        return int(STATM.read_text().split()[1])

    before = held()
    blocks = empty_blocks((1 << 28,), torch.float32, torch.device("cpu"))  # a gigabyte
    blocks[:1000] = 1
    assert held() - before < PAGES_OF_A_GIGABYTE // 8
