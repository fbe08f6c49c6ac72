"""Does `-k auto` lose where drafts are hopeless, and does it gain nearly all there is to gain where they are not?

    python benchmarks/never_lose.py                          # the default model in fp32
    python benchmarks/never_lose.py --dtype int8 --limit 6 --repeats 3

Hopeless: prompts of random tokens, and an untrained draft model (a Llama with random weights and the target's
vocabulary) on them and on real prompts. Good: code, where fixed values of k run beside `auto`. Everything is
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


def write_untrained(model: str, folder: Path) -> str:
    """A small Llama with random weights and the target's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(locate(model).folder)
    torch.manual_seed(1)
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 3}
    untrained = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=3, **sizes))
    untrained.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_random_prompts(model: str, file: Path) -> str:
    from transformers import AutoTokenizer

    tokenizer, rng = AutoTokenizer.from_pretrained(locate(model).folder), random.Random(5)
    lines = []
    for _ in range(RANDOM_PROMPTS):
        ids = [rng.randrange(100, len(tokenizer)) for _ in range(RANDOM_LENGTH)]
        lines.append(json.dumps({"prompt": tokenizer.decode(ids)}))
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def bench(out: Path, *arguments: str) -> dict[str, float]:
    """Speed-ups by setting of one `paceline bench`."""
    status = cli.main(["bench", "--report", "none", "--out", str(out), *arguments])
    if status:
        sys.exit(status)
    run = json.loads(out.read_text())["runs"][-1]
    return {setting["name"]: setting["speedup"]["median"] for setting in run["settings"] if setting.get("speedup")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="default", metavar="MODEL")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each kind")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--only", choices=["hopeless", "good"])
    args = parser.parse_args()
    common = [args.model, "--dtype", args.dtype, "--repeats", str(args.repeats)]
    common += ["--max-new-tokens", str(args.max_new_tokens), "--limit", str(args.limit)]
    speedups: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        if args.only != "good":
            untrained = ["--draft-model", write_untrained(args.model, Path(folder) / "untrained"), "-k", "auto"]
            noise = ["--prompts", write_random_prompts(args.model, Path(folder) / "random.jsonl"), "--ignore-eos"]
            methods = ["--methods", "ngram,suffix,draft_model,auto"]
            speedups["random tokens"] = bench(out, *common, *untrained, *noise, *methods)
            chat = ["--prompts", "builtin:chat", "--methods", "draft_model"]
            speedups["untrained draft model"] = bench(out, *common, *untrained, *chat)
        if args.only != "hopeless":
            code = ["-k", f"{FIXED},auto", "--prompts", "builtin:code", "--methods", "ngram,eagle,auto"]
            speedups["good"] = bench(out, *common, *code)
    print(json.dumps({"dtype": args.dtype, "speedups": speedups}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
