"""What lookahead decoding gains: no second model, no training.

    python benchmarks/lookahead.py --prompts code.jsonl            # one JSON object a line, with a field `prompt`
    python benchmarks/lookahead.py --prompts code.jsonl --columns 10 --run 4 --prompts-used 8

Greedy, through the chat template where the model has one. The last line is one JSON document; `text_only` is the
same pool without the window, which shows what the window itself gains.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from paceline import SpeculativeDecoder
from paceline.core.stats import SpecStats

BUILT_IN = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a Python class for a stack with push, pop, peek and is_empty.",
    "Write a Python function that checks whether a string is a palindrome.",
    "Write a Python function that merges two sorted lists.",
]


def read_prompts(path: Path | None, used: int) -> list[str]:
    """The first prompts of a file, or the built-in ones."""
    if path is None:
        return BUILT_IN[:used]
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()][:used]


def measure(prompts: list[str], model: str, k: int, new_tokens: int, options: dict[str, Any]) -> SpecStats:
    """Generate every output; all counts added up."""
    total = SpecStats()
    with SpeculativeDecoder(
        model, method="lookahead", num_draft_tokens=k, draft_options=options, prefix_cache_tokens=0
    ) as decoder:
        for prompt in prompts:
            result = decoder.generate([{"role": "user", "content": prompt}], max_new_tokens=new_tokens)
            total.add(result.stats)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--prompts-used", type=int, default=10)
    parser.add_argument("--columns", type=int, default=12)
    parser.add_argument("--run", type=int, default=5)
    parser.add_argument("--kept", type=int, default=8)
    parser.add_argument("--k", type=int, default=12, help="draft tokens a step, over all runs tried")
    parser.add_argument("--new-tokens", type=int, default=128)
    args = parser.parse_args()
    options = {"columns": args.columns, "run": args.run, "kept": args.kept}
    prompts = read_prompts(args.prompts, args.prompts_used)
    taus: dict[str, float] = {}
    for name, window in (("lookahead", True), ("text_only", False)):
        stats = measure(prompts, args.model, args.k, args.new_tokens, {**options, "window": window})
        taus[name] = round(stats.tokens_per_step, 3)
        print(f"{name:10} {taus[name]:.2f} tokens per step", flush=True)
    print(json.dumps({**options, "k": args.k, "prompts": len(prompts), "tokens_per_step": taus}))


if __name__ == "__main__":
    main()
