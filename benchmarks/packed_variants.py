"""Kernel benchmark: variants of products with packed weights beside the kernel in use.

    PYTHONPATH=src python3 benchmarks/packed_variants.py                 int4 and fp8, 1 and 16 rows: under 150 s

Shapes, weights and timing are those of packed_kernel.py. Each variant is a way to cut the product of
packed_mma.cu: tiles, warps_m, warps_k, stages, splits. A result is compared with the Triton kernel's
(`error`: relative), with itself, and each row with the row alone (`bits`).

Variants run in a process of their own: one that hangs or crashes is ended, named, and the next one goes on. Prints a
table and the best variant of each shape; the last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from packed_kernel import (
    COMPILE_ONLY,
    DEVICE,
    SHAPES,
    copies,
    epilogue_of,
    graph_microseconds,
    limit,
    packed,
    product_of,
)
from packed_mma import MmaTiling, launch_mma, planned, row_count_of
from torch import Tensor

from paceline.layers.gemm import GemmLauncher
from paceline.layers.gemm_types import Epilogue
from paceline.quantization.packed import PackedLinear

DEADLINE = 140.0  # seconds, of the whole run
COMPILE_SECONDS = 70.0
START_SECONDS, CASE_SECONDS = 40.0, 12.0  # of a process until its first line, between two lines
MAX_ERROR = 0.01
MAX_FAILURES = 8  # processes that hang or crash
BASELINE = "triton"
# tiles, warps_m, warps_k, stages, splits
GATE_UP = ((2, 9, 2, 3, 1), (2, 9, 2, 2, 1), (2, 9, 1, 5, 1), (2, 9, 1, 3, 1), (2, 18, 1, 4, 2), (2, 5, 2, 3, 1))
DOWN = ((2, 7, 2, 3, 8), (1, 7, 2, 4, 4), (1, 7, 2, 6, 4), (1, 14, 1, 4, 8), (1, 14, 1, 6, 8), (1, 7, 4, 3, 4))
QKV = ((1, 9, 2, 5, 4), (1, 9, 1, 7, 4), (1, 5, 4, 4, 2), (1, 3, 7, 5, 1), (1, 2, 7, 5, 1))
OUTPUT = ((1, 7, 2, 5, 4), (1, 7, 1, 7, 4), (1, 4, 4, 4, 2), (1, 2, 7, 5, 1), (1, 2, 14, 3, 1))
LM_HEAD = ((2, 9, 2, 3, 1), (2, 9, 1, 5, 1))
VARIANTS = {"gate_up": GATE_UP, "down": DOWN, "qkv": QKV, "output": OUTPUT, "lm_head": LM_HEAD}


@dataclass(frozen=True, slots=True)
class Case:
    shape: str
    format: str
    variant: tuple[int, ...] | None  # None: the Triton kernel

    @property
    def name(self) -> str:
        return BASELINE if self.variant is None else "-".join(map(str, self.variant))


def cases(formats: list[str], shapes: list[str]) -> list[Case]:
    return [
        Case(shape, name, variant)
        for name in formats
        for shape in shapes
        for variant in (None, *VARIANTS[shape])
        if not (shape == "lm_head" and name != "int4")
    ]


# --- the process that measures ----------------------------------------------------------------------------------------


class Bench:
    """Weights of the current shape, and its products."""

    def __init__(self) -> None:
        self.gemm = GemmLauncher(torch.bfloat16, torch.device(DEVICE), 1e-6)
        self.held: tuple[str, str] | None = None
        self.linears: list[PackedLinear] = []

    def weights(self, case: Case) -> list[PackedLinear]:
        if self.held != (case.shape, case.format):
            self.linears = []
            torch.cuda.empty_cache()
            self.linears = copies(lambda: packed(SHAPES[case.shape], case.format))
            self.held = (case.shape, case.format)
        return self.linears

    def product(self, case: Case, x: Tensor, epilogue: Epilogue, linear: PackedLinear) -> Tensor:
        if case.variant is None:
            return self.gemm.product(x, linear, epilogue).out
        output = launch_mma(self.gemm, x, linear, epilogue, MmaTiling(*case.variant))
        assert output is not None
        return output.out

    def measure(self, case: Case, rows: int) -> dict[str, Any]:
        shape, linears = SHAPES[case.shape], self.weights(case)
        if case.variant is not None and not fits(case, linears[0], rows):
            return {"note": "shared memory"}
        x = torch.randn(rows, shape.in_features, device=DEVICE).bfloat16()
        epilogue = replace(epilogue_of(shape, rows), argmax=False)
        checks = {} if case.variant is None else self.checks(case, x, epilogue, linears[0])
        work = partial(product_of, self.gemm, x, epilogue)
        if case.variant is not None:
            work = partial(self.product, case, x, epilogue)
        microseconds = graph_microseconds(work, linears)
        if case.variant is not None:  # the counters are zero again, and nothing was raced for
            checks["again"] = bool(torch.equal(*(self.product(case, x, epilogue, linears[0]) for _ in range(2))))
        return {"microseconds": microseconds, "limit": limit(linears[0]), **checks}

    def checks(self, case: Case, x: Tensor, epilogue: Epilogue, linear: PackedLinear) -> dict[str, Any]:
        out = self.product(case, x, epilogue, linear)
        reference = self.product(replace(case, variant=None), x, epilogue, linear).float()
        error = float((out.float() - reference).norm() / reference.norm())
        same = [self.same_row(case, x, epilogue, linear, out, row) for row in {0, len(x) - 1}]
        return {"error": error, "bits": all(same)}

    def same_row(self, case: Case, x: Tensor, epilogue: Epilogue, linear: PackedLinear, out: Tensor, row: int) -> bool:
        residual = epilogue.residual
        alone = replace(epilogue, residual=None if residual is None else residual[row : row + 1].contiguous())
        return bool(torch.equal(self.product(case, x[row : row + 1].contiguous(), alone, linear)[0], out[row]))


def fits(case: Case, linear: PackedLinear, rows: int) -> bool:
    assert case.variant is not None
    return planned(MmaTiling(*case.variant), linear.kind, linear.words.shape[0], row_count_of(rows)) is not None


def work_through(args: argparse.Namespace) -> None:
    """Measure every case from number `args.begin` on, a line of JSON before and after each."""
    bench, rows = Bench(), [int(count) for count in args.rows.split(",")]
    for number, case in enumerate(cases(args.formats.split(","), args.shapes.split(","))):
        if number < args.begin:
            continue
        print(json.dumps({"begin": number}), flush=True)
        for count in rows:
            try:
                result = bench.measure(case, count)
            except Exception as error:  # a variant that does not compile is named in the table
                result = {"note": f"{type(error).__name__} {error}"[:160].replace("\n", " ")}
            print(json.dumps({"rows": count, **asdict(case), "variant": case.name, **result}), flush=True)
            if "CUDA error:" in result.get("note", ""):
                sys.exit(1)  # the device is lost to this process


# --- the process that watches -----------------------------------------------------------------------------------------


def compile_baselines(args: argparse.Namespace) -> None:
    """The Triton kernels in use, into the cache on disk, many at a time."""
    running = []
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "packed_variants.py")
    for name in args.formats.split(","):
        for shape in args.shapes.split(","):
            for count in args.rows.split(","):
                if shape == "lm_head" and name != "int4":
                    continue
                command = [sys.executable, script, "--compile", "--formats", name, "--shapes", shape, "--rows", count]
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                running.append(subprocess.Popen(command, env=os.environ | {COMPILE_ONLY: "1"}, **quiet))
    wait(running, COMPILE_SECONDS)


def wait(running: list[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def compile_one(args: argparse.Namespace) -> None:
    bench = Bench()
    for case in cases(args.formats.split(","), args.shapes.split(",")):
        if case.variant is None:
            bench.measure(case, int(args.rows))


def lines_of(process: subprocess.Popen[str], deadline: float) -> Iterator[dict[str, Any]]:
    """What the process prints, until it ends or is silent for too long."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for text in process.stdout:
            lines.put(text)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    patience = START_SECONDS
    while time.monotonic() < deadline:
        try:
            text = lines.get(timeout=min(patience, max(0.1, deadline - time.monotonic())))
        except queue.Empty:
            return
        if text is None:
            return
        if text.startswith("{"):
            yield json.loads(text)
            patience = CASE_SECONDS


def watch(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Results of all cases; a process that hangs or dies is followed by one that leaves its case out."""
    results: list[dict[str, Any]] = []
    every, number, deadline = cases(args.formats.split(","), args.shapes.split(",")), 0, args.started + DEADLINE
    failures = 0
    while number < len(every) and failures < MAX_FAILURES and time.monotonic() < deadline - 10:
        command = [sys.executable, __file__, "--worker", "--begin", str(number), "--formats", args.formats]
        command += ["--shapes", args.shapes, "--rows", args.rows]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for line in lines_of(process, deadline):
            if "begin" in line:
                number = line["begin"]
            else:
                results.append(line)
                print(row_of(line), flush=True)
        if ended(process) != 0 or number < len(every) - 1:
            failures += 1
            print(f"{every[number].shape} {every[number].format} {every[number].name}: hung or crashed", flush=True)
        number += 1
    return results


def ended(process: subprocess.Popen[str]) -> int:
    """The exit status of a process that has nothing more to say, or that is made to end."""
    try:
        return process.wait(timeout=3)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def row_of(result: dict[str, Any]) -> str:
    head = f"{result['shape']:8} {result['format']:5} {result['rows']:3} rows {result['variant']:14}"
    if "note" in result:
        return f"{head} {result['note']}"
    checks = ""
    if "error" in result:
        wrong = "  WRONG" if not result["error"] < MAX_ERROR else ""
        flags = f"bits {'equal' if result['bits'] else 'DIFFER'}  again {'equal' if result['again'] else 'DIFFERS'}"
        checks = f"  error {result['error']:.5f}{wrong}  {flags}"
    share = result["limit"] / result["microseconds"] if result["microseconds"] else 0.0
    return f"{head} {result['microseconds']:8.2f} us  limit {result['limit']:7.2f}  {share:4.0%}{checks}"


def is_right(result: dict[str, Any]) -> bool:
    if "note" in result:
        return False
    return "error" not in result or (result["error"] < MAX_ERROR and result["bits"] and result["again"])


def best_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest right variant of each shape, format and number of rows."""
    best: dict[tuple[str, str, int], dict[str, Any]] = {}
    for result in filter(is_right, results):
        key = (result["format"], result["shape"], result["rows"])
        if key not in best or result["microseconds"] < best[key]["microseconds"]:
            best[key] = result
    return list(best.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="int4,fp8")
    parser.add_argument("--shapes", default="gate_up,down,qkv,output,lm_head")
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.started = time.monotonic()
    if args.compile:
        compile_one(args)
        return 0
    if args.worker:
        work_through(args)
        return 0
    compile_baselines(args)
    print(f"compiled in {time.monotonic() - args.started:.0f} s", flush=True)
    results = watch(args)
    print("\nbest")
    for result in best_of(results):
        print(row_of(result))
    print(json.dumps({"benchmark": "packed_variants", "device": torch.cuda.get_device_name(), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
