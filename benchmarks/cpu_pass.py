"""What a pass costs on a CPU by the tokens in it: kernel figures, not what a user gets (that is fresh.py).

    python benchmarks/cpu_pass.py --dtype int4                              the default model, one thread
    python benchmarks/cpu_pass.py --model FILE.gguf --widths 1,4,8 --context 500 --threads 2

Widths take turns and the best of all repeats counts, so that other work on the machine disturbs little. With one thread
CPU milliseconds are printed, with several those of the clock. `head` is the LM head alone, in the same unit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from paceline.build import open_runner
from paceline.config import ModelConfig
from paceline.core.protocols import Runner
from paceline.core.types import Row
from paceline.engines.local.warmup import different_tokens

Clock = Callable[[], float]


def best_passes(runner: Runner, widths: list[int], context: int, repeats: int, clock: Clock) -> dict[int, float]:
    """Seconds of a pass over so many tokens behind `context` cached ones."""
    seq_cache, tokens = runner.new_cache(), different_tokens(runner.info, max(widths))
    runner.forward([Row.chain(seq_cache, different_tokens(runner.info, context))], last_only=True)
    best = dict.fromkeys(widths, float("inf"))
    for _ in range(repeats):
        for width in widths:
            began = clock()
            runner.forward([Row.chain(seq_cache, tokens[:width])])
            best[width] = min(best[width], clock() - began)
            runner.truncate(seq_cache, context)
    return best


def best_heads(runner: Runner, widths: list[int], repeats: int, clock: Clock) -> dict[int, float]:
    """Seconds of the LM head over so many rows."""
    rows = torch.randn(max(widths), runner.embed(torch.tensor([0])).shape[-1])
    best = dict.fromkeys(widths, float("inf"))
    for _ in range(repeats):
        for width in widths:
            began = clock()
            runner.lm_head(rows[:width])
            best[width] = min(best[width], clock() - began)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype")
    parser.add_argument("--widths", default="1,2,3,4,5,6,8,12,16", metavar="N,N")
    parser.add_argument("--context", type=int, default=200, metavar="N", help="tokens that are cached")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--repeats", type=int, default=20, metavar="N")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    widths = [int(width) for width in args.widths.split(",")]
    runner = open_runner(ModelConfig(args.model, dtype=args.dtype, device="cpu"), "cpu")
    with torch.inference_mode():
        passes = best_passes(runner, widths, args.context, args.repeats, clock)
        heads = best_heads(runner, widths, args.repeats, clock)
    print("| tokens | pass, ms | in passes of one | head, ms |\n|---|---|---|---|")
    for width in widths:
        relative = passes[width] / passes[widths[0]]
        print(f"| {width} | {1e3 * passes[width]:.2f} | {relative:.2f} | {1e3 * heads[width]:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
