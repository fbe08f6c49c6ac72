"""Compiles for a Hopper GPU, without one, what unpacks weights of few bits and multiplies by them. Prints each kind.

    python -m tests.support.compiled_packed KIND ...

The interpreter that tests without a GPU run kernels through takes more than the compiler does.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from paceline.layers.cpu_kernels import GGUF_KINDS
from paceline.layers.gemm import GemmLauncher
from paceline.layers.gemm_types import Epilogue
from paceline.quantization import packed_triton
from paceline.quantization.gguf_codes import read_blocks
from paceline.quantization.packed import PackedLinear, pack_weight
from tests.support.gguf import random_blocks

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int16: "*i16",
    torch.int8: "*i8", torch.uint8: "*u8", torch.int64: "*i64",
}  # fmt: skip


class Compiled:
    """Stands for a kernel: what is launched is compiled and not run."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: object) -> Any:
        return self._compile

    def _compile(self, *arguments: Tensor | int, **named: Any) -> None:
        options = {name: named[name] for name in ("num_warps", "num_stages") if name in named}
        constants = {name: one for name, one in named.items() if name in self.kernel.arg_names}
        names = [name for name in self.kernel.arg_names if name not in constants]
        types = [TYPES[one.dtype] if isinstance(one, Tensor) else "i32" for one in arguments]
        signature = dict(zip(names, types)) | dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants)
        compile(source, target=TARGET, options=options)


def packed(kind: str) -> PackedLinear:
    blocks = torch.from_numpy(random_blocks(kind, 16, 256, 0))
    return pack_weight(read_blocks(blocks, GGUF_KINDS[kind], "x.weight"))


def main(kinds: list[str]) -> None:
    packed_triton.unpack_kernel = Compiled(packed_triton.unpack_kernel)
    packed_triton.packed_kernel = Compiled(packed_triton.packed_kernel)
    packed_triton.on_host = lambda device: False  # as on a GPU: codes are decoded by its own instructions
    gemm = GemmLauncher(torch.bfloat16, torch.device("cpu"), 1e-6)
    for kind in kinds:
        weight = packed(kind)
        packed_triton.unpack(weight, torch.bfloat16)
        gemm.product(torch.zeros(1, weight.in_features, dtype=torch.bfloat16), weight, Epilogue())
        print(kind)


if __name__ == "__main__":
    main(sys.argv[1:])
