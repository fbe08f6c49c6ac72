"""What a device can do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from paceline.device import properties
from paceline.errors import OptionError

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


# --- the device of a user ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "mps", "device"),
    [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_the_default_is_cuda_then_mps_then_the_cpu(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(cuda))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert properties.chosen_device(None) == properties.chosen_device("auto") == device
    assert properties.chosen_device(None, ("cuda", "cpu")) == ("cuda" if cuda else "cpu")


def test_a_device_that_is_not_there_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert properties.chosen_device("cuda:1") == "cuda:1"
    for name, words in (("cuda:2", "cuda:1"), ("mps", "no MPS device"), ("meta", "must be"), ("gpu", "must be")):
        with pytest.raises(OptionError, match=words):
            properties.chosen_device(name)


def test_apples_gpus_have_no_float64_no_graphs_and_no_integer_weights() -> None:
    assert not properties.supports_float64("mps") and properties.supports_float64("cpu")
    assert not properties.supports_graphs("mps") and not properties.supports_integer_weights("mps")
    assert properties.default_dtype("mps") == "bfloat16"


@pytest.mark.parametrize(
    ("capability", "shared_memory", "sizes"),
    [((9, 0), 232_448, [2, 4]), ((8, 0), 166_912, [2, 4]), ((8, 9), 101_376, [2]), ((7, 5), 65_536, [])],
    ids=["H200", "A100", "L4", "T4"],
)
def test_fused_kernels_need_ampere_and_room_for_their_tiles(
    capability: tuple[int, int], shared_memory: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SimpleNamespace(major=capability[0], minor=capability[1], shared_memory_per_block_optin=shared_memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert [size for size in (2, 4, 8) if properties.supports_fused_kernels("cuda", size)] == sizes
    assert not properties.supports_fused_kernels("cpu", 2)


def test_a_thread_uses_the_device_that_is_named_by_number() -> None:
    assert isinstance(properties.device_in_use("cuda:1"), torch.cuda.device)
    for name in ("cpu", "cuda", "mps"):
        with properties.device_in_use(name):
            pass
