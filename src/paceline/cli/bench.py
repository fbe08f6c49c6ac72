"""Measure methods against each other, and against plain decoding, on your model and your prompts.

    paceline bench                                             the default model, methods that need no draft model
    paceline bench MODEL --draft-model SMALL -k 2..8           a pair, seven values of k
    paceline bench --methods ngram,suffix --temperatures 0,0.7 --prompts builtin:code,chat
    paceline bench --prompts humaneval.jsonl --baselines hf    beside transformers' own generate
    paceline bench MODEL.gguf --against MODEL                  speed, memory and distance from the original
    paceline bench MODEL --engine vllm --methods ngram         another engine, with speculation and without

Settings take turns on every prompt, so that a machine that slows down slows all of them. Results are appended to
results.json, and a report with plots is written beside it. The output of every setting is lossless, different or not
shown, by the tests of paceline audit; only a lossless setting gets a speed-up. Ctrl-C keeps what has been measured.
The last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.candidates import (
    add_candidate_flags,
    add_workload_flags,
    check_counts,
    check_measured,
    open_candidates,
    open_pool,
)
from paceline.cli.interrupt import INTERRUPTED
from paceline.cli.weights_comparison import add_against_flags, check_against, compare_weights
from paceline.config import NONE
from paceline.errors import MissingExtra, OptionError
from paceline.tuned import LOCAL

if TYPE_CHECKING:
    from paceline.bench.baselines import Baseline
    from paceline.bench.candidates import Candidates
    from paceline.bench.results import Measurements
    from paceline.bench.sweep import SettingRun, SweepPlan
    from paceline.bench.workloads import WorkloadPrompt
    from paceline.core.protocols import Tokenizer


def configure(parser: argparse.ArgumentParser) -> None:
    add_candidate_flags(parser)
    settings = parser.add_argument_group("settings to measure")
    settings.add_argument("-k", "--num-draft-tokens", default="2,4,auto", metavar="K", help="4, 2,4,8, 2..8, auto")
    settings.add_argument("--temperatures", default="0", metavar="T", help="0,0.7: separated by commas")
    settings.add_argument("--acceptance", default="token", metavar="R", help="token, block, coupled or lossy-typical")
    settings.add_argument("--baselines", default="", metavar="B", help="hf: transformers' generate in the same run")
    add_workload_flags(parser, limit=12, repeats=3)
    add_against_flags(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="outputs of exactly --max-new-tokens")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--out", default="results.json", metavar="FILE", help="results are appended to it")
    parser.add_argument("--report", metavar="FILE", help="default: report.html beside the results; none: no report")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line on stdout")


def main(args: argparse.Namespace) -> int:
    from paceline.bench.environment import check_results_file, check_writable
    from paceline.bench.workloads import load_prompts

    prompts = load_prompts(args.prompts, args.limit)
    check_counts(args)
    check_settings(args)
    check_against(args)
    check_results_file(results_file(args))
    if (page := report_file(args)) is not None:
        check_writable(page, "--report")
    report = _report(args, prompts)
    report.run["workload"] = _workload(args, prompts)
    _save(args, report.run)
    if not args.json:
        _print(report)
    print(json.dumps(_summary(report.run)))
    return 0 if report.run["complete"] else INTERRUPTED


def check_settings(args: argparse.Namespace) -> None:
    """Raise OptionError for a list that cannot be read, before a model is loaded."""
    from paceline.bench.sweep import parse_num_draft_tokens, parse_numbers

    parse_num_draft_tokens(args.num_draft_tokens)
    parse_numbers(args.temperatures, "--temperatures")


def _report(args: argparse.Namespace, prompts: list[WorkloadPrompt]) -> BenchRun:
    if args.against:
        return BenchRun(compare_weights(args, lambda tokenizer: _sweep_plan(args, [], tokenizer, prompts, [])), {})
    return _local_run(args, prompts) if args.engine == LOCAL else _engine_run(args, prompts)


@dataclass(frozen=True, slots=True)
class BenchRun:
    """The record of a run, and what could not be measured and why."""

    run: dict[str, Any]
    unavailable: Mapping[str, str]


def _local_run(args: argparse.Namespace, prompts: list[WorkloadPrompt]) -> BenchRun:
    """Engines over one loaded target, in turns."""
    candidates = open_candidates(args, acceptance=args.acceptance)
    return BenchRun(_measure(args, candidates, _plan(args, candidates, prompts)), candidates.unavailable)


def _engine_run(args: argparse.Namespace, prompts: list[WorkloadPrompt]) -> BenchRun:
    """An engine as a whole, through its requests and outputs alone."""
    from paceline.bench.candidates import DecodeSetting
    from paceline.bench.engine_pool import engine_sweep, possible_settings
    from paceline.bench.engine_results import EngineLosslessCheck
    from paceline.bench.environment import new_run, versions
    from paceline.bench.results import Measurements, setting_record
    from paceline.engines.registry import spec

    if args.baselines:
        raise OptionError("--baselines goes with --engine local, which loads the model where transformers can run it")
    with open_pool(args) as pool:
        plain = pool.decoder(DecodeSetting(NONE))
        run = new_run(["paceline", *sys.argv[1:]], plain.info, None)
        run |= {"engine": args.engine, "versions": versions(spec(args.engine).packages), "pass_seconds": {}}
        plan = _sweep_plan(args, pool.drafting_methods, plain.tokenizer, prompts, [])
        measurements = Measurements(replace(plan, settings=possible_settings(pool, plan.settings)))
        run["complete"] = _fill(measurements, engine_sweep(pool, measurements.plan))
        if pool.drafting_methods and list(measurements.by_name) == [str(DecodeSetting(NONE))]:
            check_measured(args.methods, pool)
        check = EngineLosslessCheck(pool)
        run["settings"] = [setting_record(measurements, name, check, None) for name in measurements.by_name]
        return BenchRun(run, pool.unavailable)


def results_file(args: argparse.Namespace) -> Path:
    return Path(args.out).expanduser()


def report_file(args: argparse.Namespace) -> Path | None:
    """None: no report."""
    if args.report == "none":
        return None
    return Path(args.report).expanduser() if args.report else results_file(args).with_name("report.html")


# --- measuring --------------------------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace, candidates: Candidates, prompts: list[WorkloadPrompt]) -> SweepPlan:
    from paceline.bench.baselines import open_baselines
    from paceline.bench.sweep import parse_num_draft_tokens

    longest = max((k for k in parse_num_draft_tokens(args.num_draft_tokens) if isinstance(k, int)), default=5)
    baselines = open_baselines(candidates, [name for name in args.baselines.split(",") if name], longest)
    return _sweep_plan(args, candidates.drafting_methods, candidates.tokenizer, prompts, baselines)


def _sweep_plan(
    args: argparse.Namespace,
    methods: list[str],
    tokenizer: Tokenizer,
    prompts: list[WorkloadPrompt],
    baselines: list[Baseline],
) -> SweepPlan:
    from paceline.bench.measure import OutputLength
    from paceline.bench.sweep import SweepPlan, grid, parse_num_draft_tokens, parse_numbers, prompt_batches

    ks = parse_num_draft_tokens(args.num_draft_tokens)
    temperatures = parse_numbers(args.temperatures, "--temperatures")
    ids = [prompt.encode(tokenizer) for prompt in prompts]
    return SweepPlan(
        grid(methods, ks, temperatures, args.acceptance),
        prompt_batches([prompt.domain for prompt in prompts], ids, args.max_num_seqs),
        OutputLength(args.max_new_tokens, args.ignore_eos),
        args.repeats,
        baselines,
        args.seed,
    )


def _measure(args: argparse.Namespace, candidates: Candidates, plan: SweepPlan) -> dict[str, Any]:
    """Run the sweep; Ctrl-C ends it early and loses nothing."""
    from paceline.bench.environment import new_run
    from paceline.bench.results import LosslessCheck, Measurements, setting_record
    from paceline.bench.sweep import sweep
    from paceline.engines.local.warmup import measure_pass

    draft = candidates.draft_runner
    run = new_run(["paceline", *sys.argv[1:]], candidates.target.info, None if draft is None else draft.info)
    verify = measure_pass(candidates.target, num_seqs=args.max_num_seqs)
    measurements = Measurements(plan)
    run["complete"] = _fill(measurements, sweep(candidates, plan))
    check = LosslessCheck(candidates)
    run["pass_seconds"] = {str(width): seconds for width, seconds in verify.as_dict().items()}
    run["settings"] = [setting_record(measurements, name, check, verify) for name in measurements.by_name]
    return run


def _fill(measurements: Measurements, runs: Iterator[SettingRun]) -> bool:
    """Whether the sweep came to its end."""
    from paceline.hub.progress import track

    plan = measurements.plan
    complete = True
    try:
        for setting_run in track(runs, f"measuring {len(plan.settings)} settings", plan.total):
            measurements.add(setting_run)
    except KeyboardInterrupt:
        print("paceline: interrupted; keeping what has been measured", file=sys.stderr)
        complete = False
    if not measurements.by_name:
        raise KeyboardInterrupt
    return complete


def _workload(args: argparse.Namespace, prompts: list[WorkloadPrompt]) -> dict[str, Any]:
    return {
        "source": args.prompts,
        "prompts": len(prompts),
        "domains": list(dict.fromkeys(prompt.domain for prompt in prompts)),
        "max_new_tokens": args.max_new_tokens,
        "ignore_eos": args.ignore_eos,
        "max_num_seqs": args.max_num_seqs,
        "repeats": args.repeats,
        "seed": args.seed,
    }


def _save(args: argparse.Namespace, run: dict[str, Any]) -> None:
    from paceline.bench.environment import save_run
    from paceline.bench.report import build_report

    out, report = results_file(args), report_file(args)
    save_run(out, run)
    if report is None:
        return
    try:
        page = build_report(run)
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(page, encoding="utf-8")
        print(f"paceline: wrote {out} and {report}", file=sys.stderr)
    except MissingExtra as error:
        if args.report:
            raise
        print(f"paceline: wrote {out}; no report: {error}", file=sys.stderr)


# --- output -----------------------------------------------------------------------------------------------------------


def _print(report: BenchRun) -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.bench.report import COLUMNS, cells, headline

    console = Console()
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("setting", "lossless") else "right")
    for setting in report.run["settings"]:
        table.add_row(*cells(setting), _lossless_cell(setting["lossless"]))
    console.print(table)
    for method, why in report.unavailable.items():
        console.print(f"not measured: {method} ({why})", markup=False, highlight=False, style="dim")
    console.print(headline(report.run), markup=False, highlight=False)


def _lossless_cell(lossless: dict[str, Any]) -> str:
    """lossless, different or not shown; with the reason unless it is lossless without a remark."""
    outcome, detail = str(lossless["outcome"]), str(lossless["detail"])
    if not lossless["passed"]:
        return f"{outcome}: {detail}"
    return f"{outcome}, near-tie" if "near-tie" in detail else outcome


def _summary(run: dict[str, Any]) -> dict[str, Any]:
    """The JSON line: what a script needs without opening results.json."""
    from paceline.bench.report import best_setting, headline

    best = best_setting(run)
    return {
        "id": run["id"],
        "complete": run["complete"],
        "headline": headline(run),
        "best": best["name"] if best else None,
        "speedup": best["speedup"]["median"] if best else None,
        "settings": [_setting_summary(setting) for setting in run["settings"]],
        **({"against": run["against"]} if "against" in run else {}),
    }


def _setting_summary(setting: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": setting["name"],
        "tokens_per_second": setting["tokens_per_second"]["median"],
        "speedup": setting["speedup"]["median"] if setting["speedup"] else None,
        "acceptance_rate": setting["stats"]["acceptance_rate"],
        "tokens_per_step": setting["stats"]["tokens_per_step"],
        "lossless": setting["lossless"]["passed"],
        "outcome": setting["lossless"]["outcome"],
    }
