"""Pages of a cache: zeros, aligned as torch aligns, and on a CPU not there before they are used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.runners.native.slots import empty_pages

STATM = Path("/proc/self/statm")
ALIGNED = 64  # bytes: as torch aligns its own memory
PAGES_OF_A_GIGABYTE = (1 << 30) // 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_are_zeros(dtype: torch.dtype) -> None:
    pages = empty_pages((2, 48, 3, 16), dtype, torch.device("cpu"))
    assert pages.dtype == dtype and pages.shape == (2, 48, 3, 16) and pages.is_contiguous()
    assert not pages.any() and pages.data_ptr() % ALIGNED == 0
    pages[1, 5] = 1
    assert int(pages.sum()) == 48


@pytest.mark.skipif(not STATM.exists(), reason="asks the system how much memory the process really has")
def test_a_cache_costs_what_is_filled_of_it() -> None:
    def held() -> int:
        return int(STATM.read_text().split()[1])

    before = held()
    pages = empty_pages((1 << 28,), torch.float32, torch.device("cpu"))  # a gigabyte
    pages[:1000] = 1
    assert held() - before < PAGES_OF_A_GIGABYTE // 8
