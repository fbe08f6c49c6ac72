"""Every engine in one run: paceline's own, vLLM, llama.cpp and transformers, on the default model and on a pair.

    python benchmarks/engines.py --target BIG --draft SMALL --gguf BIG.gguf --gguf-draft SMALL.gguf \\
        --python vllm=.venv-engines/bin/python --python llama_cpp=.venv-engines/bin/python --out engines.md

Three tables, each row in a fresh process as in benchmarks/fresh.py: the default model; the pair in float32; the pair in
four bits, ours in int4 and llama.cpp's in its own files. An engine that is not installed is left out, and that is said.
A row that takes longer than --row-seconds is given up and says so. The file is written again after every table.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program, it knows only its own folder
from benchmarks import fresh

DEFAULT_ROWS = "plain,ngram:5,auto,vllm/plain,vllm/ngram:5,llama_cpp/plain,llama_cpp/ngram:5"
PAIR_ROWS = "plain,draft:3,vllm/plain,vllm/draft:3"
FOUR_BIT_ROWS = "plain,draft:3,ngram:5,llama_cpp/plain,llama_cpp/draft:3"
# Compiling takes vLLM minutes in each of its processes; 1,024 tokens are more than any prompt and output here.
ALWAYS = ["--plain-once", "--engine-option", "vllm/enforce_eager=true", "--engine-option", "vllm/kv_cache_gib=0.5",
          "--max-model-len", "1024"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Section:
    """One table: what it shows, and the flags of benchmarks/fresh.py."""

    title: str
    flags: list[str]


def sections(args: argparse.Namespace) -> list[Section]:
    """The default model, then the pair twice where one is named."""
    shared = [*ALWAYS, "--row-seconds", str(args.row_seconds)]
    for part in args.python:
        shared += ["--python", part]
    default = ["--rows", DEFAULT_ROWS, "--peers", "hf", "--dtype", "fp32", "--prompts", "builtin:code", "builtin:chat",
               "--limit-prompts", "1", "--max-new-tokens", str(args.max_new_tokens)]  # fmt: skip
    tables = [Section("The default model in float32; llama.cpp: its Q4_1 file", [*shared, *default])]
    if args.target is None:
        return tables
    pair = [*shared, "--model", args.target, "--draft", args.draft, "--prompts", "builtin:code", "--limit-prompts", "1",
            "--max-new-tokens", str(args.pair_tokens)]  # fmt: skip
    tables.append(Section("The pair in float32", [*pair, "--dtype", "fp32", "--rows", PAIR_ROWS, "--peers", "hf"]))
    files = ["--gguf", args.gguf, "--gguf-draft", args.gguf_draft] if args.gguf else []
    four_bits = ["--dtype", "int4", "--rows", FOUR_BIT_ROWS]
    tables.append(Section("The pair in four bits; llama.cpp: its own files", [*pair, *four_bits, *files]))
    return tables


def measured(section: Section) -> str:
    """A title, and the table below it."""
    flags = fresh.parse(section.flags)
    prompts = fresh.read_prompts(flags)
    rows, _ = fresh.run_batch(flags, prompts, 1)
    number = "1 prompt" if len(prompts) == 1 else f"{len(prompts)} prompts"
    return f"{section.title}; {number}, {flags.max_new_tokens} tokens, greedy:\n\n{fresh.table(rows)}\n"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", metavar="MODEL", help="the larger model of the pair; without it the default alone")
    parser.add_argument("--draft", metavar="MODEL", help="its draft model")
    parser.add_argument("--gguf", metavar="FILE", help="the larger model for llama.cpp")
    parser.add_argument("--gguf-draft", metavar="FILE", help="its draft model")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help="as of fresh.py")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="of the default model")
    parser.add_argument("--pair-tokens", type=int, default=24, metavar="N", help="of the pair")
    parser.add_argument("--row-seconds", type=float, default=120.0, metavar="S", help="default: 120")
    parser.add_argument("--out", metavar="FILE", help="write the tables to this file")
    args = parser.parse_args(argv)
    if (args.target is None) != (args.draft is None) or (args.gguf is None) != (args.gguf_draft is None):
        parser.error("--target and --draft go together, and so do --gguf and --gguf-draft")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    started, texts = time.perf_counter(), list[str]()
    for section in sections(args):
        print(section.title, file=sys.stderr, flush=True)
        texts.append(measured(section))
        if args.out:
            Path(args.out).write_text("\n".join(texts))
    print("\n".join(texts))
    print(f"{time.perf_counter() - started:.0f} s in all", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
