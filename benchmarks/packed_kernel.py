"""Kernel benchmark: products with packed weights against the time that reading their bytes takes.

    PYTHONPATH=src python3 benchmarks/packed_kernel.py                         bf16, int4 and fp8: about a minute
    PYTHONPATH=src python3 benchmarks/packed_kernel.py --formats all --rows 1,2,4,6,8,16,32,64
    PYTHONPATH=src python3 benchmarks/packed_kernel.py --sweep --formats int4 --rows 1,16      tiles beside the chosen

The shapes are those of a 7.5B model (hidden 3584, intermediate 18944, vocabulary 152064). Every product is timed inside
a CUDA graph that goes through many copies of the weight, more than the cache of the GPU holds, and compared with
bytes / 4.3 TB/s and with the bf16 kernel on the same shape. `bits`: whether each row of a pass equals the row alone.

Kernels are compiled by processes of their own first, so that measuring waits for none. Prints a table; the last line on
stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from paceline.layers.gemm import GemmLauncher
from paceline.layers.gemm_types import Epilogue, Linear
from paceline.layers.linear import UnquantizedLinear
from paceline.quantization.packed import PackedLinear
from paceline.quantization.packed_layout import STEP, TILE, Kind, groups_of_span, tiled
from paceline.quantization.packed_triton import PackedTiling, launch_packed, packed_tiling

BANDWIDTH = 4.3e12  # bytes a second that this GPU copies at
CACHE_BYTES = 250e6  # copies of a weight take at least as much
REPEATS = 5
PROCESSES = 16
COMPILE_ONLY = "PACKED_KERNEL_COMPILE_ONLY"
DEVICE = "cuda"


@dataclass(frozen=True, slots=True)
class Shape:
    """A product of the 7.5B model."""

    out_features: int
    in_features: int
    gate: bool = False
    argmax: bool = False
    residual: bool = False


SHAPES = {
    "qkv": Shape(4608, 3584),
    "output": Shape(3584, 3584, residual=True),
    "gate_up": Shape(2 * 18944, 3584, gate=True),
    "down": Shape(3584, 18944, residual=True),
    "lm_head": Shape(152064, 3584, argmax=True),
}
# kind, input features that share a scale (0: all), dtype of the scales, whether there are zero points
FORMATS: dict[str, tuple[Kind, int, torch.dtype, bool]] = {
    "int4": (Kind.INT4, 128, torch.bfloat16, False),
    "int4-g32": (Kind.INT4, 32, torch.bfloat16, False),
    "awq": (Kind.INT4, 128, torch.float16, True),
    "int8": (Kind.INT8, 0, torch.float32, False),
    "fp8": (Kind.FP8, 0, torch.float32, False),
    "fp8-block": (Kind.FP8, 128, torch.float32, False),
    "mxfp4": (Kind.FP4, 32, torch.float32, False),
    "nf4": (Kind.LUT4, 64, torch.float32, False),
}


@dataclass(frozen=True, slots=True)
class Measurement:
    shape: str
    format: str
    rows: int
    microseconds: float
    limit_microseconds: float
    bits_equal: bool | None = None
    tile: dict[str, int] | None = None

    @property
    def share(self) -> float:
        """Of the bandwidth."""
        return self.limit_microseconds / self.microseconds if self.microseconds else 0.0


def packed(shape: Shape, name: str) -> PackedLinear:
    """A random weight in a format."""
    kind, group, dtype, has_zeros = FORMATS[name]
    steps, rows, tiles = -(-shape.in_features // STEP), shape.out_features, -(-shape.out_features // TILE)
    words = torch.randint(-(2**31), 2**31 - 1, (tiles, steps, TILE, kind.words), dtype=torch.int32, device=DEVICE)
    if kind is Kind.FP8:
        words &= 0x3F3F3F3F  # no code that stands for no number
    group = group or shape.in_features
    groups, width = shape.in_features // group, groups_of_span(group, shape.in_features)
    scales = tiled((torch.rand(rows, groups, device=DEVICE) * 0.01 + 0.01).to(dtype), width)
    zeros = torch.randint(0, 16, (rows, groups), device=DEVICE).to(torch.bfloat16) if has_zeros else None
    zeros = None if zeros is None else tiled(zeros, width)
    table = torch.linspace(-1, 1, 16, device=DEVICE) if kind is Kind.LUT4 else None
    return PackedLinear(words, scales, kind, group, shape.in_features, rows, zeros, None, table)


def unquantized(shape: Shape) -> UnquantizedLinear:
    return UnquantizedLinear(torch.randn(shape.out_features, shape.in_features, device=DEVICE).bfloat16() * 0.02)


def copies(make: Callable[[], Linear]) -> list[Linear]:
    """Weights of one kind that the cache does not hold together; a single one where kernels are only compiled."""
    first = make()
    if COMPILE_ONLY in os.environ:
        return [first]
    return [first] + [make() for _ in range(min(48, max(1, int(CACHE_BYTES // first.nbytes))))]


def epilogue_of(shape: Shape, rows: int) -> Epilogue:
    columns = shape.out_features
    residual = torch.randn(rows, columns, device=DEVICE).bfloat16() if shape.residual else None
    return Epilogue(residual=residual, gate=shape.gate, argmax=shape.argmax)


def graph_microseconds(work: Callable[[Linear], Any], linears: list[Linear]) -> float:
    """Time of one product, the best of several runs through all copies; 0 for a single copy, which only compiles."""
    if len(linears) == 1:
        work(linears[0])
        return 0.0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for linear in linears[:2]:
            work(linear)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for linear in linears:
            work(linear)
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(linears))
    return min(times)


def limit(linear: Linear) -> float:
    return 1e6 * linear.nbytes / BANDWIDTH


def same_bits(gemm: GemmLauncher, x: Tensor, linear: Linear, epilogue: Epilogue) -> bool:
    """Whether the first and the last row of a pass equal the rows alone."""
    out = gemm.product(x, linear, epilogue).out
    for row in {0, x.shape[0] - 1}:
        residual = epilogue.residual
        part = replace(epilogue, residual=None if residual is None else residual[row : row + 1].contiguous())
        if not torch.equal(gemm.product(x[row : row + 1].contiguous(), linear, part).out[0], out[row]):
            return False
    return True


def error_of(gemm: GemmLauncher, shape: Shape, linear: PackedLinear) -> float:
    """Relative error of a product against float64 over the dequantized weight; a part of the columns is enough."""
    x = torch.randn(5, shape.in_features, device=DEVICE).bfloat16()
    out = gemm.product(x, linear, Epilogue()).out[:, :512].double()
    exact = x.double() @ linear.dequantize(torch.float32)[:512].double().t()
    return float((out - exact).norm() / exact.norm())


def product_of(gemm: GemmLauncher, x: Tensor, epilogue: Epilogue, linear: Linear) -> None:
    gemm.product(x, linear, epilogue)


def tiled_product(
    gemm: GemmLauncher, x: Tensor, epilogue: Epilogue, tile: PackedTiling, linear: PackedLinear
) -> None:
    launch_packed(gemm, x, linear, epilogue, tile)


def measure(gemm: GemmLauncher, shape_name: str, name: str, rows: list[int]) -> Iterator[Measurement]:
    shape = SHAPES[shape_name]
    linears = copies(lambda: unquantized(shape) if name == "bf16" else packed(shape, name))
    for count in rows:
        x, epilogue = torch.randn(count, shape.in_features, device=DEVICE).bfloat16(), epilogue_of(shape, count)
        time = graph_microseconds(partial(product_of, gemm, x, epilogue), linears)
        equal = None if name == "bf16" and count > 16 else same_bits(gemm, x, linears[0], epilogue)
        yield Measurement(shape_name, name, count, time, limit(linears[0]), equal)


def sweep(gemm: GemmLauncher, shape_name: str, name: str, rows: list[int]) -> Iterator[Measurement]:
    """The same with other tiles; the fastest first."""
    shape = SHAPES[shape_name]
    linears = copies(lambda: packed(shape, name))
    steps = linears[0].words.shape[1]
    for count in rows:
        x, epilogue = torch.randn(count, shape.in_features, device=DEVICE).bfloat16(), epilogue_of(shape, count)
        results = []
        for tile in tiles(packed_tiling(shape.out_features, steps, count, gate=shape.gate), steps, shape):
            try:
                time = graph_microseconds(partial(tiled_product, gemm, x, epilogue, tile), linears)
            except Exception as error:  # a tile that does not fit the shared memory
                print(f"{tile}: {str(error)[:80]}", file=sys.stderr)
                continue
            results.append(Measurement(shape_name, name, count, time, limit(linears[0]), tile=asdict(tile)))
        yield from sorted(results, key=lambda result: result.microseconds)[:6]


def tiles(usual: PackedTiling, steps: int, shape: Shape) -> Iterator[PackedTiling]:
    splits = (usual.splits,) if usual.splits == 1 else sorted({usual.splits, usual.splits // 2})
    for split, (columns, warps), stages in product(splits, ((64, 2), (64, 4), (128, 2), (128, 4), (256, 4)), (4, 6)):
        if split:
            per_split = -(-steps // split)
            yield PackedTiling(
                usual.rows, columns // 2 if shape.gate else columns, -(-steps // per_split), per_split, warps, stages
            )


def compile_kernels(args: argparse.Namespace) -> None:
    """Compile what is going to be measured into the cache on disk, many kernels at a time."""
    waiting = [
        [sys.executable, __file__, "--formats", name, "--shapes", shape, "--rows", count]
        + (["--sweep"] if args.sweep else [])
        for name, shape, count in product(args.formats.split(","), args.shapes.split(","), args.rows.split(","))
    ]
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        while waiting and len(running) < PROCESSES:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            running.append(subprocess.Popen(waiting.pop(), env=os.environ | {COMPILE_ONLY: "1"}, **quiet))
        running.pop(0).wait()


def line(result: Measurement) -> str:
    tile = "" if result.tile is None else "  " + " ".join(f"{key}={value}" for key, value in result.tile.items())
    bits = "" if result.bits_equal is None else ("  bits equal" if result.bits_equal else "  BITS DIFFER")
    return (
        f"{result.shape:8} {result.format:10} {result.rows:3} rows {result.microseconds:8.2f} us  limit "
        f"{result.limit_microseconds:7.2f} us  {result.share:5.0%}{bits}{tile}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="bf16,int4,fp8", help="some of them, or all")
    parser.add_argument("--rows", default="1,6,16,64")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    args.formats = ",".join(["bf16", *FORMATS]) if args.formats == "all" else args.formats
    if COMPILE_ONLY not in os.environ:
        compile_kernels(args)
    gemm = GemmLauncher(torch.bfloat16, torch.device(DEVICE), 1e-6)
    rows = [int(count) for count in args.rows.split(",")]
    results = []
    for name in args.formats.split(","):
        if name != "bf16":
            error = error_of(gemm, SHAPES["qkv"], packed(SHAPES["qkv"], name))
            print(f"{name}: relative error {error:.5f}", flush=True)
        for shape_name in args.shapes.split(","):
            for result in (sweep if args.sweep else measure)(gemm, shape_name, name, rows):
                print(line(result), flush=True)
                results.append(asdict(result))
    print(json.dumps({"benchmark": "packed_kernel", "device": torch.cuda.get_device_name(), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
