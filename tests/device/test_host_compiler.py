"""C compiled at load: kept on disk, rebuilt where the file is damaged, refused in words where it cannot be built."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch  # loads the OpenMP runtime that libraries share

from paceline.device import host_compiler
from paceline.device.host_compiler import COMPILER_VARIABLE, COMPILERS, compiled_library
from paceline.device.kernel_cache import CACHE_VARIABLE, CompileError

SOURCE = "int answer(void) { return 42; }"


def can_compile() -> bool:
    runs_openmp = torch.backends.openmp.is_available() and Path("/proc/self/maps").exists()
    return runs_openmp and any(map(shutil.which, COMPILERS))


needs_compiler = pytest.mark.skipif(not can_compile(), reason="no C compiler here")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The last argument of every call of the compiler."""
    arguments: list[str] = []
    call = host_compiler._call
    monkeypatch.setattr(host_compiler, "_call", lambda *given: (arguments.append(given[-1]), call(*given)))
    return arguments


@needs_compiler
def test_the_second_start_loads_what_the_first_has_compiled(calls: list[str], folder: Path) -> None:
    assert compiled_library(SOURCE).answer() == 42
    assert len(calls) == 2 and len(list(folder.glob("*.so"))) == 1  # compiled, linked; nothing else is left behind
    assert compiled_library(SOURCE).answer() == 42
    assert len(calls) == 2


@pytest.mark.slow
@needs_compiler
def test_another_source_is_another_library(folder: Path) -> None:
    assert compiled_library(SOURCE.replace("42", "41")).answer() == 41
    assert compiled_library(SOURCE.replace("42", "43")).answer() == 43
    assert len(list(folder.glob("*.so"))) == 2


@needs_compiler
def test_a_damaged_file_is_compiled_again(folder: Path) -> None:
    key = host_compiler._key(SOURCE, host_compiler.OPTIONS, host_compiler._compiler())
    folder.mkdir(parents=True)
    (folder / f"{key}.so").write_bytes(b"half a library")
    assert compiled_library(SOURCE).answer() == 42


@needs_compiler
def test_a_cache_that_cannot_be_written_costs_time_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "kernels"))
    assert compiled_library(SOURCE).answer() == 42


@needs_compiler
def test_a_source_that_does_not_compile_is_named(folder: Path) -> None:
    with pytest.raises(CompileError, match="error"):
        compiled_library("int answer(void) { return }")
    assert not list(folder.glob("*"))


@pytest.mark.parametrize("compiler", ["none", "/no/such/compiler"])
def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    monkeypatch.setenv(COMPILER_VARIABLE, compiler)
    with pytest.raises(CompileError, match="no C compiler"):
        compiled_library(SOURCE)
