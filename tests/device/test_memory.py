"""Memory of a cache: zeros, aligned as torch aligns, and on a CPU only there once it is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.device import memory
from paceline.device.memory import Upload, for_sampling, host_buffer, zeroed_cache

STATM = Path("/proc/self/statm")
ALIGNMENT = 64  # bytes: as torch aligns its own memory
SYSTEM_PAGES_PER_GIGABYTE = (1 << 30) // 4096
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_holds_zeros(dtype: torch.dtype) -> None:
    blocks = zeroed_cache((2, 48, 3, 16), dtype, CPU)
    assert blocks.dtype == dtype and blocks.shape == (2, 48, 3, 16) and blocks.is_contiguous()
    assert not blocks.any() and blocks.data_ptr() % ALIGNMENT == 0
    blocks[1, 5] = 1
    assert int(blocks.sum()) == 48


@pytest.mark.skipif(not STATM.exists(), reason="reads from the system how much memory the process really has")
def test_a_cache_costs_what_is_filled_of_it() -> None:
    def resident() -> int:
        return int(STATM.read_text().split()[1])

    before = resident()
    blocks = zeroed_cache((1 << 28,), torch.float32, CPU)  # a gigabyte
    blocks[:1000] = 1
    assert resident() - before < SYSTEM_PAGES_PER_GIGABYTE // 8


def test_a_host_buffer_is_pinned_only_for_a_gpu() -> None:
    buffer = host_buffer((2, 3), torch.int64, CPU)
    assert buffer.shape == (2, 3) and not buffer.any() and not buffer.is_pinned()


@pytest.mark.gpu
def test_a_host_buffer_is_refilled_only_after_its_copy_has_left() -> None:
    """The copy waits behind long work; what the host writes next must not travel with it."""
    target = torch.zeros(4, dtype=torch.int64, device="cuda")
    host = host_buffer((4,), torch.int64, target.device)
    upload, busy = Upload(host, target), torch.randn(8192, 8192, device="cuda")
    copies = []
    for value in range(4):
        upload.wait()
        host.fill_(value)
        busy = busy @ busy / 90.0
        upload.send()
        copies.append(target.clone())
    assert [int(copy[0]) for copy in copies] == [0, 1, 2, 3]


def test_logits_are_sampled_on_the_host_where_the_device_has_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2, 5)
    assert for_sampling(logits) is logits
    monkeypatch.setattr(memory, "supports_float64", lambda device: device.type == "cpu")
    with pytest.raises(NotImplementedError, match="meta"):  # stands for another device: nothing can be copied from it
        for_sampling(torch.empty(2, 5, device="meta"))
