"""Kernels compiled at run time are kept on disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.device import kernel_cache, nvrtc


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The options of every compilation; nothing is compiled."""
    calls: list[list[str]] = []

    def compile_source(library: Any, source: str, options: list[str]) -> bytes:
        calls.append(options)
        return source.encode()

    monkeypatch.setattr(nvrtc, "_compile", compile_source)
    monkeypatch.setenv(kernel_cache.CACHE_VARIABLE, str(tmp_path / "kernels"))
    return calls


FAKE = SimpleNamespace(_get_gpu_rtc_library=lambda: None)


def test_the_second_start_loads_what_the_first_has_compiled(compiles: list[list[str]]) -> None:
    first, second = (nvrtc._binary(FAKE, "code", ["-DA=1"]) for _ in range(2))
    assert first == second == b"code"
    assert len(compiles) == 1


def test_other_shapes_are_compiled_again(compiles: list[list[str]]) -> None:
    for options in (["-DA=1"], ["-DA=2"]):
        nvrtc._binary(FAKE, "code", options)
    assert compiles == [["-DA=1"], ["-DA=2"]]


def test_a_cache_that_cannot_be_written_costs_time_only(
    compiles: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(kernel_cache.CACHE_VARIABLE, str(tmp_path / "file" / "kernels"))
    assert nvrtc._binary(FAKE, "code", []) == b"code"
