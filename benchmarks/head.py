"""How well a head drafts for its target: tokens per step by kind of prompt, as chains and as a tree.

    python benchmarks/head.py --prompts FOLDER [MODEL] [--method eagle] [--draft-model DIR] [--chain 3,5] [--tree 24]

Greedy. Tokens per second are over all prompts of a kind, after one prompt that is not counted, prefill included; with
--batch 1 they are what one user gets. The last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from paceline import SpeculativeDecoder
from paceline.core.stats import SpecStats


def by_category(
    decoder: SpeculativeDecoder, prompts: list[dict[str, str]], chat: bool, length: int
) -> dict[str, SpecStats]:
    stats: dict[str, SpecStats] = defaultdict(SpecStats)
    decoder.generate(inputs_of(prompts[:1], chat), max_new_tokens=length)
    for category in dict.fromkeys(item["category"] for item in prompts):
        inputs = inputs_of([item for item in prompts if item["category"] == category], chat)
        began = time.perf_counter()
        results = decoder.generate(inputs, max_new_tokens=length)
        seconds = time.perf_counter() - began
        for result in results:
            stats[category].add(result.stats)
        stats[category].seconds = seconds
    for part in list(stats.values()):
        stats["all"].add(part)
    return dict(stats)


def inputs_of(prompts: list[dict[str, str]], chat: bool) -> Any:
    return [[{"role": "user", "content": item["prompt"]}] if chat else item["prompt"] for item in prompts]


def shapes_of(args: argparse.Namespace) -> list[tuple[str, int, dict[str, int]]]:
    """Name, k and options of every shape of a draft."""
    chains: list[tuple[str, int, dict[str, int]]] = [("chain", int(k), {}) for k in args.chain.split(",")]
    return chains + ([("tree", args.tree, {"nodes": args.tree})] if args.tree else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="default", metavar="MODEL")
    parser.add_argument("--method", default="eagle")
    parser.add_argument("--draft-model", help="directory of the head; default: the shipped one")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--chain", default="5", metavar="K,…")
    parser.add_argument("--tree", type=int, default=24, help="nodes; 0: no tree")
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--batch", type=int, default=8, help="prompts generated at a time")
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt")
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--chat", action="store_true", help="prompts go through the chat template")
    args = parser.parse_args()
    lines = [line for file in sorted(Path(args.prompts).glob("*.jsonl")) for line in file.read_text().splitlines()]
    prompts = [json.loads(line) for line in lines][:: args.every]
    record: dict[str, Any] = {"prompts": len(prompts), "length": args.length, "chat": args.chat}
    chosen = {name: value for name, value in (("dtype", args.dtype), ("device", args.device)) if value}
    for name, k, options in shapes_of(args):
        with SpeculativeDecoder(
            args.model,
            args.draft_model,
            method=args.method,
            num_draft_tokens=k,
            draft_options=options,
            max_num_seqs=args.batch,
            prefix_cache_tokens=0,
            **chosen,
        ) as decoder:
            counts = by_category(decoder, prompts, args.chat, args.length)
        for category, stats in counts.items():
            positions = " ".join(f"{rate:.3f}" for rate in stats.acceptance_by_position)
            rates = f"tau {stats.tokens_per_step:.3f}  {stats.tokens_per_second:7.1f} tokens/s"
            print(f"{name} {k:3} {category:10} {rates}  by position {positions}", flush=True)
            record[f"{name} {k} {category}"] = stats.as_dict()
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
