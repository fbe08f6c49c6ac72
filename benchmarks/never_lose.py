"""Does `-k auto` lose where guessing is hopeless, and does it win nearly all there is to win where it is not?

    python benchmarks/never_lose.py                          # the default model in fp32
    python benchmarks/never_lose.py --dtype int8 --limit 6 --repeats 3

Hopeless: prompts of random tokens, and a draft from another world (a Llama with random weights and the target's
vocabulary) guessing on them and on real prompts. Good: code, where fixed values of k run beside `auto`. Everything is
`paceline bench`: settings take turns, speed-ups are medians over plain decoding. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline import cli
from paceline.hub import locate

RANDOM_PROMPTS = 4
RANDOM_LENGTH = 48
FIXED = "2,4,7"


def write_stranger(target: str, folder: Path) -> str:
    """A small Llama that knows nothing, with the target's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(locate(target).folder)
    torch.manual_seed(1)
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 3}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=3, **sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_random_prompts(target: str, file: Path) -> str:
    from transformers import AutoTokenizer

    tokenizer, dice = AutoTokenizer.from_pretrained(locate(target).folder), random.Random(5)
    lines = []
    for _ in range(RANDOM_PROMPTS):
        ids = [dice.randrange(100, len(tokenizer)) for _ in range(RANDOM_LENGTH)]
        lines.append(json.dumps({"prompt": tokenizer.decode(ids)}))
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def bench(out: Path, *words: str) -> dict[str, float]:
    """Speed-ups by setting of one `paceline bench`."""
    status = cli.main(["bench", "--report", "none", "--out", str(out), *words])
    if status:
        sys.exit(status)
    run = json.loads(out.read_text())["runs"][-1]
    return {one["name"]: one["speedup"]["median"] for one in run["settings"] if one.get("speedup")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="default")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each kind")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--only", choices=["hopeless", "good"])
    args = parser.parse_args()
    common = ["--target", args.target, "--dtype", args.dtype, "--repeats", str(args.repeats)]
    common += ["--max-new-tokens", str(args.max_new_tokens), "--limit", str(args.limit)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        out = place / "results.json"
        if args.only != "good":
            stranger = ["--draft", write_stranger(args.target, place / "stranger"), "--draft-tokens", "auto"]
            noise = ["--prompts", write_random_prompts(args.target, place / "random.jsonl"), "--ignore-end"]
            found["random tokens"] = bench(out, *common, *stranger, *noise, "--methods", "ngram,suffix,draft,auto")
            found["stranger"] = bench(out, *common, *stranger, "--prompts", "builtin:chat", "--methods", "draft")
        if args.only != "hopeless":
            words = ["--draft-tokens", f"{FIXED},auto", "--prompts", "builtin:code", "--methods", "ngram,eagle,auto"]
            found["good"] = bench(out, *common, *words)
    print(json.dumps({"dtype": args.dtype, "speedups": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
