"""Descriptions of matrices for the copy unit: what the driver is told, and what if it has none."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from paceline.device import tensor_maps
from paceline.device.kernel_cache import CompileError
from paceline.device.tensor_maps import MatrixMap, encode

CPU = torch.device("cpu")


class Driver:
    """Keeps what it is told, and writes the number of the call into the map."""

    def __init__(self, result: int = 0) -> None:
        self.result, self.calls = result, []

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        place = arguments[0].value
        assert place % 64 == 0
        (ctypes.c_int64 * 16).from_address(place)[:] = [len(self.calls)] * 16
        return self.result


def use(driver: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps.ctypes, "CDLL", lambda name: driver)


def test_the_driver_is_told_sizes_strides_and_the_box(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    use(driver, monkeypatch)
    maps = encode([MatrixMap(4096, 100, 256, 12, box_columns=128), MatrixMap(8192, 40, 64, 8, parts=2)], CPU)
    assert maps.tolist() == [[1] * 16, [2] * 16]
    first, second = driver.calls
    assert first[3].value == 4096
    # 64 columns, rows, parts, further columns: how many there are, how far apart they lie, how many a box has.
    assert (list(first[4]), list(first[5]), list(first[6])) == ([64, 100, 1, 4], [512, 51_200, 128], [64, 12, 1, 2])
    assert (list(second[4]), list(second[5]), list(second[6])) == ([64, 40, 2, 1], [128, 5_120, 128], [64, 8, 2, 1])


def test_a_map_that_the_driver_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use(Driver(result=1), monkeypatch)
    with pytest.raises(CompileError, match="error 1"):
        encode([MatrixMap(4096, 100, 256, 12)], CPU)


def test_a_driver_without_maps_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use(object(), monkeypatch)
    with pytest.raises(CompileError, match="no tensor maps"):
        encode([MatrixMap(4096, 100, 256, 12)], CPU)
