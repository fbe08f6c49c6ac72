"""Measure methods against each other, and against plain decoding, on your models and your prompts.

    paceline bench                                           the default model, methods that need no draft
    paceline bench --target T --draft D --draft-tokens 2..8  a pair, seven values of k
    paceline bench --methods ngram,suffix --temperatures 0,0.7 --prompts builtin:code,chat
    paceline bench --prompts humaneval.jsonl --peers hf      beside transformers' own generate

Settings take turns on every prompt, so that a machine that slows down slows all of them. Results are appended to
results.json, and a report with plots is written beside it. A setting whose output is not the target's gets no
speed-up. Ctrl-C keeps what has been measured. The last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.arguments import add_running_arguments, quiet_transformers, running_options
from paceline.config import DecoderOptions
from paceline.errors import MissingExtra, OptionError, PacelineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.bench.candidates import Subject
    from paceline.bench.results import Collected
    from paceline.bench.sweep import SweepPlan
    from paceline.bench.workloads import Prompt
    from paceline.core.cost_model import CostCurve
    from paceline.core.draft_length import DraftLengthPolicy
    from paceline.core.protocols import Runner

INTERRUPTED = 130


def configure(parser: argparse.ArgumentParser) -> None:
    add_subject_arguments(parser)
    parser.add_argument("--draft-tokens", "-k", default="2,4,auto", metavar="K", help="4, 2,4,8, 2..8, auto")
    parser.add_argument("--temperatures", default="0", metavar="T", help="0,0.7: separated by commas")
    parser.add_argument("--acceptance", default="token", metavar="R", help="token, block, coupled or lossy-typical")
    parser.add_argument("--prompts", default="builtin", metavar="FILE", help="builtin, builtin:code,chat, or a file")
    parser.add_argument("--limit", type=int, default=12, metavar="N", help="prompts, spread over the domains")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--ignore-end", action="store_true", help="answers of exactly --max-new-tokens")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="prompts answered together")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--peers", default="", metavar="P", help="hf: transformers' generate in the same run")
    parser.add_argument("--out", default="results.json", metavar="FILE", help="results are appended to it")
    parser.add_argument("--report", metavar="FILE", help="default: report.html beside the results; none: no report")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line on stdout")


def add_subject_arguments(parser: argparse.ArgumentParser) -> None:
    """Which models and methods; shared by bench, audit and tune."""
    models = parser.add_argument_group("models")
    add_running_arguments(models)
    models.add_argument("--draft", metavar="MODEL", help="a smaller model that guesses, or the head of a method named")
    models.add_argument("--methods", default="all", metavar="M", help="all that work here, or words with commas")


def main(args: argparse.Namespace) -> int:
    from paceline.bench.workloads import load_prompts

    prompts = load_prompts(args.prompts, args.limit)
    checked_counts(args)
    subject = open_subject(args)
    plan = _plan(args, subject, prompts)
    status, run = _measured(args, subject, plan)
    run["workload"] = _workload(args, prompts)
    _save(args, run)
    if not args.json:
        _print(run, subject)
    print(json.dumps(_summary(run)))
    return status


def checked_counts(args: argparse.Namespace) -> None:
    """Numbers that must be at least 1."""
    for name in ("max_new_tokens", "repeats", "batch"):
        if getattr(args, name, 1) < 1:
            raise OptionError(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(args, name)}")


# --- the subject ------------------------------------------------------------------------------------------------------


def open_subject(args: argparse.Namespace) -> Subject:
    """EngineStats the target once and make every method that works with it. The command's only way to assembly."""
    from paceline.bench.candidates import PLAIN, Subject
    from paceline.build import DRAFTERS, chosen_device, open_runner, open_tokenizer
    from paceline.engines.local.step import check_capabilities
    from paceline.hub.tokenizer import Tokenizer

    wanted = _wanted(args, list(DRAFTERS))
    quiet_transformers()
    options = DecoderOptions(**running_options(args))
    device = chosen_device(options.device)
    target = open_runner(options.target, options, device)
    tokenizer = Tokenizer(open_tokenizer(options.target, None, options))
    drafters: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for method in dict.fromkeys([PLAIN, *wanted]):
        try:
            mine = options_for(options, method, args.draft, wanted)
            drafters[method] = DRAFTERS[method](mine, target, tokenizer, device)
            check_capabilities(target, drafters[method])
        except PacelineError as error:
            drafters.pop(method, None)
            missing[method] = str(error)
    if args.methods != "all" and missing:
        raise OptionError("; ".join(f"method {method}: {why}" for method, why in missing.items()))

    peers = {"target": target, "draft": getattr(drafters.get("draft"), "runner", None)}
    names = {"target": args.target, "draft": args.draft}
    peer = cache(lambda role: peer_model(peers[role], names[role], options, device))
    return Subject(target, tokenizer, drafters, missing, _budgets(target, drafters), peer_model=peer)


def peer_model(runner: Any, name: str, options: DecoderOptions, device: str) -> Any:
    """The model behind a runner in transformers' own code: the one it runs, or else loaded from the same files.

    None where there is no runner, or where it computes in a type that transformers does not have.
    """
    from paceline.hub import locate
    from paceline.runners.loading import DTYPES, load_model

    if runner is None or runner.info.dtype not in DTYPES:
        return None
    if hasattr(getattr(runner, "model", None), "generate"):
        return runner.model
    files, dtype = locate(str(name)), DTYPES[runner.info.dtype]
    return load_model(files.folder, files.name, dtype, device, trust_remote_code=options.trust_remote_code)


def _budgets(target: Runner, drafters: dict[str, Any]) -> Callable[[str, int | str], DraftLengthPolicy]:
    """Makes budgets; the target's passes are measured when the first `auto` asks for their cost, and only then."""
    from paceline.core.draft_length import AdaptiveDraftLength, FixedDraftLength
    from paceline.engines.local.warmup import measure_costs, measure_pass

    known: list[CostCurve] = []

    def make(method: str, num_draft_tokens: int | str) -> DraftLengthPolicy:
        if isinstance(num_draft_tokens, int):
            return FixedDraftLength(num_draft_tokens)
        if not known:
            known.append(measure_pass(target))
        return AdaptiveDraftLength(measure_costs(target, getattr(drafters[method], "runner", None), known[0]))

    return make


def _wanted(args: argparse.Namespace, known: list[str]) -> list[str]:
    if args.methods == "all":
        return known
    found = [word.strip() for word in args.methods.split(",") if word.strip()]
    for word in found:
        if word not in known:
            raise OptionError(f"there is no method {word!r}; there are {', '.join(known)}")
    return found


def options_for(options: DecoderOptions, method: str, draft: str | None, wanted: list[str]) -> DecoderOptions:
    """Who gets what --draft names: methods that take a model; where none of them is wanted, those that take a head."""
    takers = ("draft", "foreign") if {"draft", "foreign"} & set(wanted) else ("eagle", "medusa", "layerskip")
    return replace(options, method=method, draft=draft if method in takers else None)


# --- measuring --------------------------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace, subject: Subject, prompts: list[Prompt]) -> SweepPlan:
    from paceline.bench.baselines import peers_of
    from paceline.bench.measure import Length
    from paceline.bench.sweep import SweepPlan, grid, parse_draft_tokens, parse_numbers, tasks_of
    from paceline.engines.local.verifier import Verifier

    assert subject.tokenizer is not None
    Verifier(args.acceptance)
    ks = parse_draft_tokens(args.num_draft_tokens)
    settings = grid(subject.guessing_methods, ks, parse_numbers(args.temperatures, "--temperatures"), args.acceptance)
    ids = [prompt.encode(subject.tokenizer) for prompt in prompts]
    fixed = [k for k in ks if isinstance(k, int)]
    return SweepPlan(
        settings,
        tasks_of([prompt.domain for prompt in prompts], ids, args.batch),
        Length(args.max_new_tokens, args.ignore_eos),
        args.repeats,
        peers_of(subject, [word for word in args.peers.split(",") if word], max(fixed, default=5)),
        args.seed,
    )


def _measured(args: argparse.Namespace, subject: Subject, plan: SweepPlan) -> tuple[int, dict[str, Any]]:
    """Run the sweep; Ctrl-C ends it early and loses nothing."""
    from paceline.bench.environment import new_run
    from paceline.bench.results import Collected, LosslessCheck, setting_record
    from paceline.engines.local.warmup import measure_pass

    draft = getattr(subject.drafters.get("draft"), "runner", None)
    run = new_run(["paceline", *sys.argv[1:]], subject.target.info, None if draft is None else draft.info)
    verify = measure_pass(subject.target, num_seqs=args.batch)
    collected = Collected(plan)
    status = _collect(subject, plan, collected)
    if not collected.by_name:
        raise KeyboardInterrupt
    check = LosslessCheck(subject)
    run["complete"] = status == 0
    run["pass_seconds"] = {str(nodes): seconds for nodes, seconds in verify.as_dict().items()}
    run["settings"] = [setting_record(collected, name, check, verify) for name in collected.by_name]
    return status, run


def _collect(subject: Subject, plan: SweepPlan, collected: Collected) -> int:
    from paceline.bench.sweep import sweep
    from paceline.hub.progress import track

    try:
        for measured in track(sweep(subject, plan), f"measuring {len(plan.settings)} settings", plan.total):
            collected.add(measured)
    except KeyboardInterrupt:
        print("paceline: interrupted; keeping what has been measured", file=sys.stderr)
        return INTERRUPTED
    return 0


def _workload(args: argparse.Namespace, prompts: list[Prompt]) -> dict[str, Any]:
    return {
        "source": args.prompts,
        "prompts": len(prompts),
        "domains": list(dict.fromkeys(prompt.domain for prompt in prompts)),
        "max_new_tokens": args.max_new_tokens,
        "ignore_eos": args.ignore_eos,
        "batch": args.batch,
        "repeats": args.repeats,
        "seed": args.seed,
    }


def _save(args: argparse.Namespace, run: dict[str, Any]) -> None:
    from paceline.bench.environment import save_run
    from paceline.bench.report import build_report

    out = Path(args.out).expanduser()
    save_run(out, run)
    if args.report == "none":
        return
    report = Path(args.report).expanduser() if args.report else out.with_name("report.html")
    try:
        report.write_text(build_report(run), encoding="utf-8")
        print(f"paceline: wrote {out} and {report}", file=sys.stderr)
    except MissingExtra as error:
        if args.report:
            raise
        print(f"paceline: wrote {out}; no report: {error}", file=sys.stderr)


# --- showing ----------------------------------------------------------------------------------------------------------


def _print(run: dict[str, Any], subject: Subject) -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.bench.report import headline

    console = Console()
    table = Table(box=None, pad_edge=False)
    for name in ("setting", "tokens/s", "spread", "speed-up", "predicted", "τ", "accepted", "lossless"):
        table.add_column(name, justify="left" if name in ("setting", "lossless") else "right")
    for one in run["settings"]:
        speed, gain, stats = one["tokens_per_second"], one["speedup"], one["tally"]
        table.add_row(
            one["name"],
            f"{speed['median']:.1f}",
            f"{speed['low']:.1f}-{speed['high']:.1f}",
            f"{gain['median']:.2f}x" if gain else "-",
            f"{one['predicted_speedup']:.2f}x" if one["predicted_speedup"] else "-",
            f"{stats['tokens_per_step']:.2f}" if stats["steps"] else "-",
            f"{stats['acceptance_rate']:.0%}" if stats["drafted"] else "-",
            _lossless_word(one["lossless"]),
        )
    console.print(table)
    for method, why in subject.missing.items():
        console.print(f"not measured: {method} ({why})", markup=False, highlight=False, style="dim")
    console.print(headline(run), markup=False, highlight=False)


def _lossless_word(found: dict[str, Any]) -> str:
    """Short where all is well; the details stand in the report."""
    if not found["passed"]:
        return f"NO: {found['detail']}"
    return "near-tie" if "near-tie" in found["detail"] else "yes"


def _summary(run: dict[str, Any]) -> dict[str, Any]:
    """The JSON line: what a script wants to know without opening results.json."""
    from paceline.bench.report import best_setting, headline

    best = best_setting(run)
    return {
        "id": run["id"],
        "complete": run["complete"],
        "headline": headline(run),
        "best": best["name"] if best else None,
        "speedup": best["speedup"]["median"] if best else None,
        "settings": [
            {
                "name": one["name"],
                "tokens_per_second": one["tokens_per_second"]["median"],
                "speedup": one["speedup"]["median"] if one["speedup"] else None,
                "acceptance_rate": one["tally"]["acceptance_rate"],
                "tokens_per_step": one["tally"]["tokens_per_step"],
                "lossless": one["lossless"]["passed"],
            }
            for one in run["settings"]
        ],
    }
