"""How near is the fused expert product to the time that reading its weights takes? A benchmark of kernels, on CUDA.

    python benchmarks/moe_kernel.py                      # one layer of a model of 30B weights with 3B active ones
    python benchmarks/moe_kernel.py --rows 1 6 16 --sweep

Layers with weights of their own run one after another in one graph, so no weight is found in a cache. The limit is the
bytes of the chosen experts over the bandwidth: 8 experts of one row are 75 MB, 17.6 µs at 4.3 TB/s. `random`: every row
chooses for itself. `overlap`: a row keeps about half of the experts of the row before it, as neighbouring tokens do.
`product` is gate, up, down and weighted sum; `layer` also chooses and groups, from the router's logits on. Nothing is
printed unless the result agrees with the eager reference and a row has the same bits alone and among others.
--sweep: the times of other tilings (layers/moe_tiling.py). The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paceline.layers.linear import UnquantizedLinear
from paceline.layers.moe import MixtureOfExperts, Router, StackedWeights, stacked_experts

KEPT = 0.5  # share of the experts of the row before, with overlap


@dataclass(frozen=True)
class Shape:
    """One layer."""

    hidden_size: int
    num_experts: int
    intermediate_size: int
    top_k: int

    def expert_bytes(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size * 2


def layer_of(shape: Shape) -> MixtureOfExperts:
    """Random weights of a scale that keeps rows as large as they are."""
    experts, hidden, size = shape.num_experts, shape.hidden_size, shape.intermediate_size
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    gate_up = torch.randn(experts, 2 * size, hidden, **options).mul_(hidden**-0.5)
    down = torch.randn(experts, hidden, size, **options).mul_(size**-0.5)
    router = Router(UnquantizedLinear(torch.zeros(experts, hidden, **options)), shape.top_k)
    return MixtureOfExperts(router, stacked_experts(StackedWeights(gate_up, down)))


def choices(rows: int, shape: Shape, kept: float) -> Tensor:
    """The experts of each row [rows, top_k]; `kept` of them are those of the row before."""
    chosen = [torch.randperm(shape.num_experts)[: shape.top_k]]
    for _ in range(rows - 1):
        stay = chosen[-1][torch.rand(shape.top_k) < kept]
        others = [expert for expert in torch.randperm(shape.num_experts).tolist() if expert not in stay.tolist()]
        chosen.append(torch.cat([stay, torch.tensor(others[: shape.top_k - len(stay)], dtype=torch.int64)]))
    return torch.stack(chosen)


def logits_for(chosen: Tensor, shape: Shape) -> Tensor:
    """Logits of a router that chooses these."""
    logits = torch.randn(chosen.shape[0], shape.num_experts)
    return logits.scatter_add_(1, chosen, torch.full(chosen.shape, 20.0)).to(torch.bfloat16).cuda()


def captured(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """The work as a graph, after runs that compile its kernels."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def microseconds(work: Callable[[], Any], parts: int, repeats: int) -> float:
    """Of one of so many parts: the median of five series."""
    graph, series = captured(work), []
    graph.replay()
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        series.append(begin.elapsed_time(end) * 1e3 / repeats / parts)
    return median(series)


class Bench:
    """Layers of one shape, and the kernels over them."""

    def __init__(self, shape: Shape, layers: int, repeats: int, bandwidth: float) -> None:
        from paceline.device.properties import supports_pdl
        from paceline.layers.moe_triton import ExpertKernels

        self.shape, self.repeats, self.bandwidth = shape, repeats, bandwidth
        self.layers = [layer_of(shape) for _ in range(layers)]
        self.kernels = ExpertKernels(supports_pdl(torch.device("cuda")))

    def row(self, rows: int, kept: float) -> dict[str, Any]:
        """Times of one number of rows."""
        from paceline.layers.moe_tiling import expert_tiling

        tiling = self.kernels.tiling or expert_tiling(
            rows * self.shape.top_k, self.shape.num_experts, torch.bfloat16
        )
        x = torch.randn(rows, self.shape.hidden_size, dtype=torch.bfloat16, device="cuda")
        chosen = [choices(rows, self.shape, kept) for _ in self.layers]
        logits = [logits_for(experts, self.shape) for experts in chosen]
        self.check(x, logits[0])
        pairs = list(zip(self.layers, logits))
        tiles = [self.kernels.route(scores, layer.router, tiling.rows) for layer, scores in pairs]

        def product() -> None:
            for layer, tile in zip(self.layers, tiles):
                stacked = layer.experts.stacked
                assert stacked is not None
                self.kernels.products(x, tile, layer, stacked, tiling, x)

        def whole() -> None:
            for layer, scores in pairs:
                self.kernels(x, scores, layer, x)

        distinct = sum(experts.unique().numel() for experts in chosen) / len(chosen)
        limit = distinct * self.shape.expert_bytes() / self.bandwidth * 1e6
        times = {name: self.time(work) for name, work in (("product", product), ("layer", whole))}
        return {
            "rows": rows,
            "routing": "overlap" if kept else "random",
            "experts": round(distinct, 1),
            "limit_us": round(limit, 2),
            **{f"{name}_us": round(time, 2) for name, time in times.items()},
            **{f"{name}_ratio": round(time / limit, 3) for name, time in times.items()},
        }

    def time(self, work: Callable[[], Any]) -> float:
        return microseconds(work, len(self.layers), self.repeats)

    def check(self, x: Tensor, logits: Tensor) -> None:
        """Exit where the kernels disagree with the reference, or a row's bits with those it has alone."""
        from paceline.layers.moe import route

        layer = self.layers[0]
        ours = self.kernels(x, logits, layer)
        reference = layer.experts(x, route(logits, layer.router))
        error = ((ours - reference).float().norm() / reference.float().norm()).item()
        alone = self.kernels(x[:1], logits[:1], layer)
        if error > 0.02 or not torch.equal(alone, ours[:1]):
            sys.exit(f"the kernels are wrong: error {error:.4f}, same bits alone: {torch.equal(alone, ours[:1])}")

    def sweep(self, rows: int) -> dict[str, Any]:
        """Other tilings of both products, the fastest first."""
        return {name: self.swept(rows, name) for name in ("gate_up", "down")}

    def swept(self, rows: int, name: str) -> list[dict[str, Any]]:
        from paceline.layers.moe_tiling import expert_tiling

        usual = expert_tiling(rows * self.shape.top_k, self.shape.num_experts, torch.bfloat16)
        x = torch.randn(rows, self.shape.hidden_size, dtype=torch.bfloat16, device="cuda")
        logits = [logits_for(choices(rows, self.shape, 0.0), self.shape) for _ in self.layers]
        tiles = [self.kernels.route(scores, layer.router, 16) for layer, scores in zip(self.layers, logits)]
        found = []
        for columns, step, stages, warps in itertools.product((16, 32, 64), (64, 128, 256), (3, 4, 6), (2, 4, 8)):
            tile = replace(getattr(usual, name), columns=columns, step=step, stages=stages, warps=warps)
            tiling = replace(usual, **{name: tile})
            try:
                time = self.time(lambda tiling=tiling: self.one_product(x, tiles, tiling, name))
            except Exception as error:  # a tile that does not fit the shared memory
                print(f"  {name} {columns} {step} {stages} {warps}: {type(error).__name__}", file=sys.stderr)
                continue
            found.append({"columns": columns, "step": step, "stages": stages, "warps": warps, "us": round(time, 2)})
        return sorted(found, key=lambda entry: entry["us"])[:8]

    def one_product(self, x: Tensor, tiles: list[Any], tiling: Any, name: str) -> None:
        rows, size = x.shape[0] * self.shape.top_k, self.shape.intermediate_size
        activated = torch.empty(rows, size, dtype=x.dtype, device=x.device).fill_(0.5) if name == "down" else x
        for layer, tile in zip(self.layers, tiles):
            stacked = layer.experts.stacked
            if name == "down":
                self.kernels.down(activated, tile, stacked, tiling)
            else:
                self.kernels.gate_up(x, tile, layer, stacked, tiling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 16])
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--intermediate-size", type=int, default=768)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8, help="layers with weights of their own in one graph")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s that the memory reads at")
    parser.add_argument("--sweep", action="store_true", help="also the times of other tilings")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark times kernels on a CUDA device, and torch sees none here")
    torch.manual_seed(0)
    shape = Shape(args.hidden_size, args.experts, args.intermediate_size, args.top_k)
    bench = Bench(shape, args.layers, args.repeats, args.bandwidth * 1e12)
    results = []
    for rows, kept in itertools.product(args.rows, (0.0, KEPT)):
        if rows == 1 and kept:
            continue
        results.append(bench.row(rows, kept))
        line = results[-1]
        print(
            f"{rows:3} rows, {line['routing']:7}: {line['experts']:5} experts, limit {line['limit_us']:5.1f} µs, "
            f"product {line['product_us']:6.1f} ({line['product_ratio']:.2f}x), layer {line['layer_us']:6.1f} "
            f"({line['layer_ratio']:.2f}x)"
        )
    document = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
    if args.sweep:
        document["sweep"] = {rows: bench.sweep(rows) for rows in args.rows}
        for rows, names in document["sweep"].items():
            for name, entries in names.items():
                print(f"{rows} rows, {name}: {entries[:3]}")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
