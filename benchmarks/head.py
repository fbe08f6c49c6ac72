"""How well a head drafts for its target: tokens per step by kind of prompt, as a chain and as a tree.

    python benchmarks/head.py --prompts FOLDER [MODEL] [--method eagle] [--draft-model DIR] [--chain 5] [--tree 24]

Greedy, and only counted, not timed. The last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from paceline import SpeculativeDecoder
from paceline.core.stats import SpecStats


def by_category(
    decoder: SpeculativeDecoder, prompts: list[dict[str, str]], chat: bool, length: int
) -> dict[str, SpecStats]:
    stats: dict[str, SpecStats] = defaultdict(SpecStats)
    inputs: Any = [[{"role": "user", "content": item["prompt"]}] if chat else item["prompt"] for item in prompts]
    for item, result in zip(prompts, decoder.generate(inputs, max_new_tokens=length)):
        stats[item["category"]].add(result.stats)
        stats["all"].add(result.stats)
    return dict(stats)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="default", metavar="MODEL")
    parser.add_argument("--method", default="eagle")
    parser.add_argument("--draft-model", help="directory of the head; default: the shipped one")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--chain", type=int, default=5)
    parser.add_argument("--tree", type=int, default=24, help="nodes; 0: no tree")
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt")
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--chat", action="store_true", help="prompts go through the chat template")
    args = parser.parse_args()
    lines = [line for file in sorted(Path(args.prompts).glob("*.jsonl")) for line in file.read_text().splitlines()]
    prompts = [json.loads(line) for line in lines][:: args.every]
    record: dict[str, Any] = {"prompts": len(prompts), "length": args.length, "chat": args.chat}
    shapes = {"chain": (args.chain, {})} | ({"tree": (args.tree, {"nodes": args.tree})} if args.tree else {})
    for name, (k, options) in shapes.items():
        with SpeculativeDecoder(
            args.model,
            args.draft_model,
            method=args.method,
            num_draft_tokens=k,
            draft_options=options,
            max_num_seqs=8,
            prefix_cache_tokens=0,
        ) as decoder:
            counts = by_category(decoder, prompts, args.chat, args.length)
        for category, stats in counts.items():
            positions = " ".join(f"{rate:.3f}" for rate in stats.acceptance_by_position)
            print(f"{name} {k:3} {category:10} tau {stats.tokens_per_step:.3f}  by position {positions}", flush=True)
            record[f"{name} {category}"] = stats.as_dict()
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
