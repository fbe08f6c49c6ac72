"""What a user gets: every row in a fresh process, through SpeculativeDecoder, on prompts it meets for the first time.

    python benchmarks/fresh.py --limit-prompts 2 --max-new-tokens 32 --rows plain,ngram:5,auto      the default model
    python benchmarks/fresh.py --model BIG --draft SMALL --dtype bf16 --device cuda --batch 1,8 \\
        --prompts code.jsonl chat.jsonl --rows plain,ngram:5,draft:5,draft:auto,auto --peers hf --json fresh.json

A row is METHOD or METHOD:K; `draft` is the draft model of --draft, `plain` decodes without speculation. A plain process
runs before every other one, and a row is compared with the plain process before it (--plain-once: with the first).
ENGINE/METHOD:K runs on another engine: it is compared with a plain process of that engine, and ENGINE/plain with ours.
    python benchmarks/fresh.py --rows plain,auto,vllm/plain,vllm/ngram:5,llama_cpp/plain,llama_cpp/ngram:5 --peers hf

first  tokens per second over all prompts, the first time; nothing was generated before, prefill is included
warm   the same prompts a second time in the same process, without a prefix cache
ready  seconds from the start of the process to a decoder that is ready
equal  prompts whose greedy output is plain decoding's of the same batch, token for token
A gain above τ, the tokens per step, is noise of the machine and is marked so.

Prompts: .jsonl with a `prompt` a line, or any file of `paceline bench --prompts`. They are sent as chat messages where
the model has a chat template (--raw: as they are). Prints one markdown table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program, it knows only its own folder
from benchmarks.fresh_process import (
    AUTO,
    DRAFT,
    HF,
    HF_DTYPES,
    LLAMA_CPP,
    LOCAL,
    PLAIN,
    FreshResult,
    Job,
    in_fresh_process,
)

PEER_PACKAGES = {HF: "transformers", LLAMA_CPP: "xllamacpp"}
DEFAULT_ROWS = "plain,ngram:5,auto"
COLUMNS = ("row", "batch", "first, tokens/s", "warm, tokens/s", "first / warm", "× plain, first", "× plain, warm", "τ",
           "equal", "ready, s")  # fmt: skip


# --- which rows -------------------------------------------------------------------------------------------------------


def jobs_of(args: argparse.Namespace, prompts: list[str], batch: int) -> list[Job]:
    """The rows without plain, then those of the peers."""
    base = base_options(args, prompts, batch)
    jobs = [engine_job(name, args, base) for name in args.rows.split(",") if name != PLAIN and can_run(name, args)]
    if batch > 1:
        return jobs
    for peer in installed_peers(args):
        jobs += peer_jobs(peer, args, base)
    return jobs


def base_options(args: argparse.Namespace, prompts: list[str], batch: int) -> dict[str, Any]:
    base = {"batch": batch, "prompts": prompts, "model": args.model, "max_new_tokens": args.max_new_tokens}
    base |= {"max_model_len": args.max_model_len, "row_seconds": args.row_seconds}
    return base | {"dtype": args.dtype, "device": args.device, "raw": args.raw}


def engine_job(name: str, args: argparse.Namespace, base: dict[str, Any]) -> Job:
    """A row of one engine. Where the engine opens the model itself, the model's file says its dtype."""
    from paceline.engines.registry import spec

    engine, method = split_engine(name)
    if engine == LOCAL:
        return Job(name, **base, **row_options(method, args.draft))
    own = {**base, "model": engine_model(engine, args), "engine": engine, "python": interpreters(args).get(engine)}
    own["engine_options"] = engine_options(engine, args)
    if not spec(engine).reads_files:
        own["dtype"] = None
    return Job(name, **own, **row_options(method, engine_draft(engine, args), spec(engine).methods))


def interpreters(args: argparse.Namespace) -> dict[str, str]:
    """--python ENGINE=PATH: engines whose packages are in an environment of their own."""
    return dict(part.split("=", 1) for part in args.python)


def engine_options(engine: str, args: argparse.Namespace) -> dict[str, Any]:
    """--engine-option ENGINE/NAME=VALUE: those of one engine."""
    from paceline.cli.flags import named_values

    parts = [part.partition("/") for part in args.engine_option]
    return named_values("--engine-option", [option for owner, _, option in parts if owner == engine])


def split_engine(name: str) -> tuple[str, str]:
    """`vllm/ngram:5` -> the engine, and the row on it."""
    engine, slash, method = name.partition("/")
    return (engine, method) if slash else (LOCAL, name)


def engine_model(engine: str, args: argparse.Namespace) -> str | None:
    """--gguf for an engine that keeps such files packed, or what it runs for --model; None: it cannot."""
    from paceline.engines.registry import spec

    chosen = spec(engine)
    return args.gguf if args.gguf and chosen.packs_gguf else chosen.model_for(args.model)


def engine_draft(engine: str, args: argparse.Namespace) -> str | None:
    """As engine_model, for the draft."""
    from paceline.engines.registry import spec

    chosen = spec(engine)
    if args.gguf_draft and chosen.packs_gguf:
        return str(args.gguf_draft)
    return chosen.model_for(args.draft) if args.draft else None


def can_run(name: str, args: argparse.Namespace) -> bool:
    """Whether the engine of a row is here and can run the model; if not, that is said."""
    from paceline.engines.registry import names, spec

    engine, _ = split_engine(name)
    if engine not in names():
        sys.exit(f"fresh.py: there is no engine {engine!r}; there are {', '.join(names())}")
    if not spec(engine).installed and engine not in interpreters(args):
        print(f"{name}: not measured, {', '.join(spec(engine).packages)} is not installed", file=sys.stderr)
    elif engine_model(engine, args) is None:
        print(f"{name}: not measured, {engine} cannot run {args.model}: --gguf FILE", file=sys.stderr)
    else:
        return True
    return False


def plain_job(args: argparse.Namespace, prompts: list[str], batch: int) -> Job:
    return Job(PLAIN, **base_options(args, prompts, batch))


def row_options(name: str, draft: str | None, known: tuple[str, ...] | None = None) -> dict[str, Any]:
    """`ngram:5` -> the method and its k; the draft goes to methods that need weights, and to auto."""
    from paceline.drafting.registry import WeightsNeeded, names, spec

    method, _, k = name.partition(":")
    method = {DRAFT: "draft_model", PLAIN: "none"}.get(method, method)
    known = tuple(names()) if known is None else known
    if method not in known:
        sys.exit(f"fresh.py: there is no method {method!r}; there are {PLAIN}, {DRAFT}, {', '.join(known)}")
    if method == "none":
        return {"method": method, "num_draft_tokens": 0}
    weights = spec(method).weights if method in names() else WeightsNeeded.NONE
    takes_draft = weights is not WeightsNeeded.NONE or method == AUTO
    if weights is WeightsNeeded.MODEL and draft is None:
        sys.exit(f"fresh.py: the row {name} needs a draft model; name it with --draft")
    if k and k != AUTO and not k.isdigit():
        sys.exit(f"fresh.py: {name}: k is a number or auto, not {k!r}")
    number = int(k) if k.isdigit() else AUTO
    return {"method": method, "num_draft_tokens": number, "draft": draft if takes_draft else None}


def installed_peers(args: argparse.Namespace) -> list[str]:
    """Peers that can run here; the others are named with what is missing."""
    peers: list[str] = []
    for name in filter(None, args.peers.split(",")):
        missing = missing_for(name, args)
        if missing:
            print(f"{name}: not measured, {missing}", file=sys.stderr)
        else:
            peers.append(name)
    return peers


def missing_for(name: str, args: argparse.Namespace) -> str | None:
    if name not in PEER_PACKAGES:
        return f"there is no such peer; there are {', '.join(PEER_PACKAGES)}"
    if importlib.util.find_spec(PEER_PACKAGES[name]) is None:
        return f"{PEER_PACKAGES[name]} is not installed"
    if name == HF and (args.dtype or "fp32") not in HF_DTYPES:
        return f"transformers does not run {args.dtype}"
    if name == LLAMA_CPP and args.gguf is None:
        return "it needs a GGUF file: --gguf FILE"
    return None


def peer_jobs(peer: str, args: argparse.Namespace, base: dict[str, Any]) -> list[Job]:
    if peer == LLAMA_CPP:
        return [Job("llama.cpp", kind=LLAMA_CPP, gguf=args.gguf, **base)]
    jobs = [Job("transformers", kind=HF, **base)]
    if args.draft is not None:
        return [*jobs, Job("transformers, assisted", kind=HF, method=DRAFT, draft=args.draft, **base)]
    return [*jobs, Job("transformers, prompt lookup", kind=HF, method="lookup", num_draft_tokens=5, **base)]


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A row beside the plain process that ran before it."""

    result: FreshResult
    plain: FreshResult

    def cells(self) -> list[str]:
        result = self.result
        head = [result.job.name, str(result.job.batch)]
        if result.error is not None:
            return [*head, f"failed: {result.error}", *[""] * (len(COLUMNS) - 3)]
        first, warm = result.first.rate, result.warm.rate
        tau = "-" if result.tau is None else f"{result.tau:.2f}"
        speeds = [f"{first:.1f}", f"{warm:.1f}", f"{first / warm:.2f}" if warm else "-"]
        return [*head, *speeds, self.gain("first"), self.gain("warm"), tau, self.equal(), f"{result.ready:.1f}"]

    def gain(self, which: str) -> str:
        own, plain = (getattr(side, which).rate for side in (self.result, self.plain))
        if not plain or self.result is self.plain:
            return "-"
        ratio, tau = own / plain, self.result.tau
        same_engine = self.result.job.kind == "paceline" and self.result.job.engine == self.plain.job.engine
        is_noise = same_engine and tau is not None and ratio > tau
        return f"noise ({ratio:.2f})" if is_noise else f"{ratio:.2f}"

    def equal(self) -> str:
        own, plain = self.result.first.outputs, self.plain.first.outputs
        if self.result.job.kind == LLAMA_CPP or not plain:
            return "-"
        return f"{sum(a == b for a, b in zip(own, plain))} of {len(own)}"


def table(rows: list[ComparedRow]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plain_note(plains: list[FreshResult]) -> str:
    """How much plain decoding itself varied from process to process."""
    rates = [result.first.rate for result in plains if result.error is None]
    if not rates:
        return "plain decoding failed"
    batch = plains[0].job.batch
    spread = f"{min(rates):.1f} to {max(rates):.1f}, median {statistics.median(rates):.1f} tokens/s"
    return f"plain, batch {batch}: {len(rates)} processes, first time {spread}"


def run_batch(args: argparse.Namespace, prompts: list[str], batch: int) -> tuple[list[ComparedRow], list[FreshResult]]:
    """Plain, row, plain, row, …: the rows, and every plain process of ours."""
    plains = [in_fresh_process(plain_job(args, prompts, batch))]
    rows = [ComparedRow(plains[0], plains[0])]
    engine_plains: dict[str, FreshResult] = {}
    for number, job in enumerate(jobs_of(args, prompts, batch)):
        if job.engine != LOCAL and job.method != "none":
            if job.engine not in engine_plains or not args.plain_once:
                plain = engine_job(f"{job.engine}/{PLAIN}", args, base_options(args, prompts, batch))
                engine_plains[job.engine] = in_fresh_process(plain)
            rows.append(ComparedRow(in_fresh_process(job), engine_plains[job.engine]))
            continue
        if number and not args.plain_once:
            plains.append(in_fresh_process(plain_job(args, prompts, batch)))
        rows.append(ComparedRow(in_fresh_process(job), plains[-1]))
        if job.engine != LOCAL:  # measured once, it also stands beside the engine's other rows
            engine_plains[job.engine] = rows[-1].result
    return rows, plains


def read_prompts(args: argparse.Namespace) -> list[str]:
    from paceline.bench.workloads import load_prompts

    texts = [[prompt.text for prompt in load_prompts(source)] for source in args.prompts]
    limit = args.limit_prompts or max(map(len, texts))
    return [text for source in texts for text in source[:limit]]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--draft", help="a draft model or a trained head")
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--prompts", nargs="+", default=["builtin:code,chat"], metavar="FILE")
    parser.add_argument("--limit-prompts", type=int, metavar="N", help="of each file")
    parser.add_argument("--rows", default=DEFAULT_ROWS, help=f"default: {DEFAULT_ROWS}")
    parser.add_argument("--batch", default="1", metavar="N", help="1,8: prompts generated at a time")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--peers", default="", help="hf, llama_cpp: other systems beside it, where installed")
    parser.add_argument("--gguf", metavar="FILE", help="the model for llama_cpp")
    parser.add_argument("--gguf-draft", metavar="FILE", help="its draft model")
    parser.add_argument(
        "--python", action="append", default=[], metavar="ENGINE=PATH", help="the Python that has an engine's packages"
    )
    parser.add_argument(
        "--engine-option", action="append", default=[], metavar="ENGINE/NAME=VALUE", help="as of paceline generate"
    )
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of the longest sequence")
    parser.add_argument("--row-seconds", type=float, metavar="S", help="a row that takes longer is given up")
    parser.add_argument("--raw", action="store_true", help="prompts as they are, without a chat template")
    parser.add_argument("--plain-once", action="store_true", help="one plain process a batch size")
    parser.add_argument("--json", metavar="OUT", help="write everything measured to this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    prompts = read_prompts(args)
    rows: list[ComparedRow] = []
    notes: list[str] = []
    for batch in map(int, args.batch.split(",")):
        batch_rows, plains = run_batch(args, prompts, batch)
        rows += batch_rows
        notes.append(plain_note(plains))
    print(f"{len(prompts)} prompts, up to {args.max_new_tokens} new tokens, greedy, {args.model}\n")
    print(table(rows))
    print("\n" + "\n".join(notes))
    if args.json:
        write_json(Path(args.json), rows)
    return 1 if any(row.result.error for row in rows) else 0


def write_json(path: Path, rows: list[ComparedRow]) -> None:
    from paceline.bench.environment import hardware, versions

    results = [{**asdict(row.result), "plain": asdict(row.plain), "tau": row.result.tau} for row in rows]
    document = {"hardware": hardware(), "versions": versions(), "columns": COLUMNS, "results": results}
    path.write_text(json.dumps({**document, "table": [row.cells() for row in rows]}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
