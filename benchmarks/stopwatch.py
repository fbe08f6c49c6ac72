"""Do the figures of `paceline bench` hold outside of it?

    python benchmarks/stopwatch.py [--dtype int8] [--methods none,ngram,eagle] [--tokens 1024] [--repeats 3]

Two runs of `paceline bench` on one prompt, and between them `paceline generate` as a process of its own, timed from
outside. Starting and loading are not decoding: runs of one token show how long they take, and that is subtracted. The
time of a start varies by some tenths of a second, so medians of several are taken, and outputs are long.
Prints tokens per second of both runs and of the stopwatch; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

PROMPT = "def add(a, b):\n    return a + b\ndef sub(a, b):\n    return a - b\ndef mul(a, b):"


def paceline(*arguments: str) -> dict[str, Any]:
    """The JSON document that a command ends with."""
    result = subprocess.run([sys.executable, "-m", "paceline", *arguments], capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return document


def benched(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Tokens per second by method."""
    prompt = folder / "prompt.jsonl"  # as plain text, every line would be a prompt of its own
    prompt.write_text(json.dumps({"prompt": PROMPT}))
    drafting = ",".join(method for method in args.methods.split(",") if method != "none")
    document = paceline(
        "bench", "--prompts", str(prompt), "--methods", drafting, "-k", str(args.k), "--dtype", args.dtype,
        "--max-new-tokens", str(args.tokens), "--repeats", str(args.repeats), "--out", str(folder / "results.json"),
        "--report", "none", "--json",
    )  # fmt: skip
    rates = {row["name"].split()[0]: row["tokens_per_second"] for row in document["settings"]}
    return {"none" if name == "plain" else name: rate for name, rate in rates.items()}


def watched(args: argparse.Namespace, method: str) -> float:
    """Tokens per second of `paceline generate`, by a clock outside of it."""
    command = ["generate", PROMPT, "--method", method, "-k", str(args.k), "--dtype", args.dtype, "--json"]
    starts, totals, tokens = [], [], 0
    for _ in range(args.repeats):
        for length in (1, args.tokens):
            started = time.perf_counter()
            document = paceline(*command, "--max-new-tokens", str(length))
            seconds = time.perf_counter() - started
            if length == 1:
                starts.append(seconds - document["seconds"])
            else:
                totals.append(seconds)
                tokens = document["new_tokens"]
    return tokens / (median(totals) - median(starts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--methods", default="none,ngram,eagle")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-k", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first = benched(args, Path(folder))
        outside = {method: watched(args, method) for method in args.methods.split(",")}
        second = benched(args, Path(folder))
    print(f"{'method':<10}{'bench':>8}{'again':>8}{'stopwatch':>11}{'apart':>8}{'runs apart':>12}")
    rows = []
    for method, rate in outside.items():
        mean = (first[method] + second[method]) / 2
        row = {"method": method, "bench": first[method], "again": second[method], "stopwatch": rate}
        row |= {"apart": rate / mean - 1, "runs_apart": second[method] / first[method] - 1}
        rows.append(row)
        print(
            f"{method:<10}{first[method]:>8.2f}{second[method]:>8.2f}{rate:>11.2f}"
            f"{row['apart']:>+8.1%}{row['runs_apart']:>+12.1%}",
            flush=True,
        )
    print(json.dumps({"dtype": args.dtype, "tokens": args.tokens, "k": args.k, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
