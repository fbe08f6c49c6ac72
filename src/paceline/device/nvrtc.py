"""CUDA C++ compiled at run time, through the NVRTC library that torch brings: no compiler on the user's machine.

A compiled kernel is kept on disk, keyed by its source, its options and the library's version, so that a second start
only loads it.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from paceline.device.kernel_cache import CompileError, cache_folder, keep


def compiled_kernel(source: str, name: str, defines: Sequence[str], shared_memory: int) -> Any:
    """The kernel `name` of this source for the current device. Raises CompileError.

    shared_memory: bytes that a launch asks for.
    """
    major, minor = torch.cuda.get_device_capability()
    options = [f"--gpu-architecture=sm_{major}{minor}", "-std=c++17", "-default-device", *defines]
    try:
        from torch.cuda import _utils as torch_nvrtc

        module: Any = torch_nvrtc._cuda_load_module(_binary(torch_nvrtc, source, options), [name])
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise CompileError(f"the kernel {name} could not be built: {error}") from error
    kernel = module[name]
    kernel.set_shared_memory_config(shared_memory)
    return kernel


def _binary(torch_nvrtc: Any, source: str, options: list[str]) -> bytes:
    key = hashlib.sha256("\n".join([source, *options, str(torch.version.cuda)]).encode()).hexdigest()
    file = cache_folder() / f"{key[:32]}.cubin"
    if file.is_file():
        return file.read_bytes()
    binary = _compile(torch_nvrtc._get_gpu_rtc_library(), source, options)
    keep(file, binary)
    return binary


def _compile(library: ctypes.CDLL, source: str, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None), "")
    try:
        encoded = [option.encode() for option in options]
        result = library.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
        _check(result, "" if result == 0 else _log(library, program))
        size = ctypes.c_size_t()
        _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "")
        binary = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, binary), "")
        return binary.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")


def _check(result: int, log: str) -> None:
    if result != 0:
        raise RuntimeError(f"NVRTC error {result} {log}".strip())
