"""What a device can do."""

from __future__ import annotations

import torch

from paceline.device import properties

CPU = torch.device("cpu")


def test_a_cpu_has_no_graphs_and_runs_in_float32() -> None:
    assert properties.on_host("cpu") and not properties.on_host("cuda:1")
    assert not properties.supports_graphs("cpu") and properties.supports_graphs("cuda:1")
    assert properties.default_dtype("cpu") == "float32" and properties.default_dtype("cuda") == "bfloat16"
    assert not properties.supports_pdl(CPU) and properties.multiprocessor_count(CPU) == properties.HOST_MULTIPROCESSORS


def test_integer_weights_have_kernels_on_cpus_and_cuda_only() -> None:
    assert [properties.supports_integer_weights(name) for name in ("cpu", "cuda:0", "mps")] == [True, True, False]


def test_wide_tiles_need_two_byte_numbers_on_a_gpu() -> None:
    cuda = torch.device("cuda")
    assert properties.fits_wide_tiles(cuda, 2) and not properties.fits_wide_tiles(cuda, 4)
    assert properties.fits_wide_tiles(CPU, 4)


def test_waiting_for_a_cpu_returns_at_once() -> None:
    assert properties.synchronize("cpu") is None
