"""Compile every kernel for an H100 or H200 without one: what the interpreter forgives, the compiler does not.

Run as a program of its own, since the interpreter is chosen for a whole process.
"""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.runners.native import kernels
from paceline.runners.native.gemm_tiling import TALL_TILES, TILE_ROWS

HALF, FLOAT, LONG, INT = "*bf16", "*fp32", "*i64", "*i32"
ATTENTION = {"GROUP": 3, "KV_HEADS": 3, "HALF": 32, "PAGE": 64, "CHUNK_TOKENS": 128, "EARLY": True, "HANDS_ON": True}


def attention(nodes: int, rows: int, head_norm: bool) -> tuple[dict[str, str], dict[str, object]]:
    pointers = dict.fromkeys(("qkv", "keys", "values", "query_norm", "key_norm", "out"), HALF)
    pointers |= dict.fromkeys(("turns", "partial", "partial_stats"), FLOAT) | {"arrived": INT}
    pointers |= dict.fromkeys(("lengths", "counts", "depths", "sights", "pages"), LONG)
    numbers = {"offset": "i32", "table_width": "i32", "layer_base": "i64", "most_chunks": "i32", "lanes": "i32"}
    numbers |= {"eps": "fp32", "scale": "fp32"}
    fixed = ATTENTION | {"NODES": nodes, "ROWS": rows, "FRESH": triton.next_power_of_2(nodes), "HEAD_NORM": head_norm}
    parts = triton.cdiv(nodes, rows // 3)
    return pointers | numbers, fixed | {"PARTS": parts}


def product(rows: int, **flags: bool) -> tuple[dict[str, str], dict[str, object]]:
    signature = dict.fromkeys(("x", "weight", "bias", "residual"), HALF)
    signature |= {"out": FLOAT if flags["BEST"] else HALF, "best_value": FLOAT, "best_index": INT}
    signature |= {"rows": "i32", "columns": "i32", "inner": "i32"}
    tall = rows > TILE_ROWS
    cut = {"TALL": tall, "ROWS": rows, "COLUMNS": 64 if tall else 32, "STEP": 64}
    return signature, flags | cut | {"EARLY": True, "EVEN": False}


def vector(**flags: bool) -> tuple[dict[str, str], dict[str, object]]:
    signature = dict.fromkeys(("x", "norm", "weight", "bias", "residual"), HALF)
    signature |= {"out": FLOAT if flags["BEST"] else HALF, "best_value": FLOAT, "best_index": INT}
    signature |= {"columns": "i32", "inner": "i32", "eps": "fp32"}
    return signature, flags | {"EARLY": True, "COLUMNS": 2, "INNER": 1024}


def packed(bits: int, **flags: bool) -> tuple[dict[str, str], dict[str, object]]:
    signature = dict.fromkeys(("x", "bias", "residual"), HALF) | {"weight": "*i8" if bits == 8 else "*u8"}
    signature |= {"scale": FLOAT, "out": FLOAT if flags["BEST"] else HALF, "best_value": FLOAT, "best_index": INT}
    signature |= {"columns": "i32", "inner": "i32", "groups": "i32"}
    fixed = {"EARLY": True, "BITS": bits, "GROUP": 576 if bits == 8 else 32, "COLUMNS": 8, "STEP": 512}
    return signature, flags | fixed


def compile_one(kernel: object, signature: dict[str, str], fixed: dict[str, object]) -> None:
    kinds = signature | dict.fromkeys(fixed, "constexpr")
    ordered = {name: kinds[name] for name in kernel.arg_names}  # type: ignore[attr-defined]
    source = ASTSource(fn=kernel, signature=ordered, constexprs=fixed)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def main() -> int:
    plain = {"BIAS": False, "ADD": False, "GATE": False, "BEST": False}
    for flags in (plain | {"BIAS": True}, plain | {"ADD": True}, plain | {"GATE": True}, plain | {"BEST": True}):
        for rows in (TILE_ROWS, *TALL_TILES):
            compile_one(kernels.project_kernel, *product(rows, **flags))
        compile_one(kernels.vector_kernel, *vector(NORM=not flags["ADD"], **flags))
        compile_one(kernels.packed_kernel, *packed(8, **flags))
        compile_one(kernels.packed_kernel, *packed(4, **flags))
    for nodes, rows, head_norm in ((1, 16, False), (2, 16, False), (6, 16, False), (16, 32, True)):
        compile_one(kernels.attend_kernel, *attention(nodes, rows, head_norm))
    norm = {"x": HALF, "weight": HALF, "out": HALF, "width": "i32", "eps": "fp32"}
    compile_one(kernels.norm_kernel, norm, {"EARLY": True, "WIDTH": 1024})
    compile_one(kernels.gate_kernel, {"both": HALF, "out": HALF, "inner": "i32"}, {"BLOCK_COLUMNS": 1024})
    best = {"best_value": FLOAT, "best_index": INT, "out": LONG, "embedding": HALF, "stream": HALF}
    best |= {"blocks": "i32", "width": "i32"}
    compile_one(kernels.best_kernel, best, {"EARLY": True, "EMBED": True, "BLOCKS": 2048, "WIDTH": 1024})
    print("compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
