"""C compiled at load with the compiler of the user's machine, for CPU kernels that torch has no operation for.

The library is kept on disk, keyed by its source, its options, the compiler and the CPU, so that a second start only
loads it. It uses the OpenMP runtime that torch has loaded: a second one would bring a second pool of threads, and the
two would wait for each other's cores. Where there is no compiler, callers run their torch operations instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from paceline.device.kernel_cache import CompileError, cache_folder, keep

COMPILERS = ("cc", "gcc", "clang")
COMPILER_VARIABLE = "PACELINE_COMPILER"  # another compiler, or `none`
# No contraction: the compiler would join a product and a sum in some loops and not in others. Loops are written with
# vectors in the order that runs fast; reordering them spills registers.
OPTIONS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-schedule-insns", "-fno-tree-vectorize", "-fPIC")
LINK_OPTIONS = ("-shared", "-Wl,-z,now")  # now: a function that the process does not have shows when loading
LONGEST_S = 120


def compiled_library(source: str, more_options: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The C source as a library in this process. more_options: behind OPTIONS. Raises CompileError."""
    compiler, options = _compiler(), OPTIONS + more_options
    _share_openmp()
    file = cache_folder() / f"{_key(source, options, compiler)}.so"
    if file.is_file():
        try:
            return ctypes.CDLL(str(file))
        except OSError:  # damaged, or of another system with the same home
            pass
    return _built(source, options, compiler, file)


def _compiler() -> Path:
    chosen = os.environ.get(COMPILER_VARIABLE)
    places = map(shutil.which, [chosen] if chosen else COMPILERS)
    place = None if chosen == "none" else next(filter(None, places), None)
    if place is None:
        raise CompileError(f"there is no C compiler ({chosen or ', '.join(COMPILERS)})")
    return Path(place).resolve()


def _share_openmp() -> None:
    """Let libraries loaded from here on find the functions of the runtime that torch has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        runtime = next(line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line)
        ctypes.CDLL(runtime, ctypes.RTLD_GLOBAL)
    except (OSError, StopIteration) as error:
        raise CompileError("torch runs here without the OpenMP runtime of GCC") from error


def _key(source: str, options: tuple[str, ...], compiler: Path) -> str:
    status = compiler.stat()
    identity = (source, *options, *LINK_OPTIONS, str(compiler), str(status.st_mtime_ns), str(status.st_size), _cpu())
    return hashlib.sha256("\n".join(identity).encode()).hexdigest()[:32]


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    named = ("features", "flags", "cpu part", "cpu implementer", "model name")
    return "\n".join(sorted({line for line in lines if line.lower().startswith(named)}))


def _built(source: str, options: tuple[str, ...], compiler: Path, file: Path) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        code, part, library = (Path(folder, f"kernels.{ending}") for ending in ("c", "o", "so"))
        code.write_text(source)
        _call(compiler, *options, "-c", str(code), "-o", str(part))
        _call(compiler, *LINK_OPTIONS, str(part), "-o", str(library), "-lm")
        keep(file, library.read_bytes())
        try:
            return ctypes.CDLL(str(library))
        except OSError as error:
            raise CompileError(f"the compiled library cannot be loaded: {error}") from error


def _call(compiler: Path, *arguments: str) -> None:
    command = [str(compiler), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{compiler} cannot be run: {error}") from error
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"it ended with {result.returncode}"]
        raise CompileError(f"{compiler} fails: {next((line for line in lines if 'error' in line), lines[0])}")
