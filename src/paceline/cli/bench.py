"""Measure methods against each other, and against plain decoding, on your model and your prompts.

    paceline bench                                             the default model, methods that need no draft model
    paceline bench MODEL --draft-model SMALL -k 2..8           a pair, seven values of k
    paceline bench --methods ngram,suffix --temperatures 0,0.7 --prompts builtin:code,chat
    paceline bench --prompts humaneval.jsonl --baselines hf    beside transformers' own generate

Settings take turns on every prompt, so that a machine that slows down slows all of them. Results are appended to
results.json, and a report with plots is written beside it. The output of every setting is lossless, different or not
shown, by the tests of paceline audit; only a lossless setting gets a speed-up. Ctrl-C keeps what has been measured.
The last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import loading
from paceline.cli.flags import add_config_flags, config_from_args
from paceline.cli.terminal import quiet_transformers
from paceline.config import NONE, EngineConfig
from paceline.errors import MissingExtra, OptionError

if TYPE_CHECKING:
    from paceline.bench.candidates import Candidates, EngineBuilder
    from paceline.bench.results import Measurements
    from paceline.bench.sweep import SweepPlan
    from paceline.bench.workloads import WorkloadPrompt
    from paceline.build import OpenModel
    from paceline.core.protocols import Runner

ALL = "all"
INTERRUPTED = 130
# Fields of the configuration for which these commands have flags of their own, or no use.
OWN_FLAGS = ("method", "num_draft_tokens", "acceptance", "max_num_seqs", "engine", "prefix_cache_tokens")


def configure(parser: argparse.ArgumentParser) -> None:
    add_candidate_flags(parser)
    settings = parser.add_argument_group("settings to measure")
    settings.add_argument("-k", "--num-draft-tokens", default="2,4,auto", metavar="K", help="4, 2,4,8, 2..8, auto")
    settings.add_argument("--temperatures", default="0", metavar="T", help="0,0.7: separated by commas")
    settings.add_argument("--acceptance", default="token", metavar="R", help="token, block, coupled or lossy-typical")
    settings.add_argument("--baselines", default="", metavar="B", help="hf: transformers' generate in the same run")
    add_workload_flags(parser, limit=12, repeats=3)
    parser.add_argument("--ignore-eos", action="store_true", help="outputs of exactly --max-new-tokens")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--out", default="results.json", metavar="FILE", help="results are appended to it")
    parser.add_argument("--report", metavar="FILE", help="default: report.html beside the results; none: no report")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line on stdout")


def add_candidate_flags(parser: argparse.ArgumentParser) -> None:
    """Which model and which methods; shared by bench, audit and tune."""
    add_config_flags(parser, positional_model=True, skip=OWN_FLAGS)
    parser.add_argument(
        "--methods", default=ALL, metavar="M", help="separated by commas; all: those that work here. {methods}"
    )


def add_workload_flags(parser: argparse.ArgumentParser, *, limit: int, repeats: int) -> None:
    """Which prompts, and how long and how often; shared by bench and tune."""
    workload = parser.add_argument_group("workload")
    workload.add_argument("--prompts", default="builtin", metavar="FILE", help="builtin, builtin:code,chat, or a file")
    workload.add_argument("--limit", type=int, default=limit, metavar="N", help="prompts, spread over the domains")
    workload.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: 64")
    workload.add_argument("--max-num-seqs", type=int, default=1, metavar="N", help="prompts run together; default: 1")
    workload.add_argument("--repeats", type=int, default=repeats, metavar="N", help=f"default: {repeats}")


def main(args: argparse.Namespace) -> int:
    from paceline.bench.environment import check_results_file
    from paceline.bench.workloads import load_prompts

    prompts = load_prompts(args.prompts, args.limit)
    check_counts(args)
    check_results_file(results_file(args))
    candidates = open_candidates(args, acceptance=args.acceptance)
    plan = _plan(args, candidates, prompts)
    run = _measure(args, candidates, plan)
    run["workload"] = _workload(args, prompts)
    _save(args, run)
    if not args.json:
        _print(run, candidates)
    print(json.dumps(_summary(run)))
    return 0 if run["complete"] else INTERRUPTED


def results_file(args: argparse.Namespace) -> Path:
    return Path(args.out).expanduser()


def check_counts(args: argparse.Namespace) -> None:
    """Raise OptionError for numbers below 1."""
    for name, value in (("max-new-tokens", args.max_new_tokens), ("repeats", args.repeats)):
        if value < 1:
            raise OptionError(f"--{name} must be 1 or more, not {value}")


# --- candidates -------------------------------------------------------------------------------------------------------


def open_candidates(args: argparse.Namespace, **overrides: Any) -> Candidates:
    """Load the model once and build the drafter of every method that works with it."""
    from paceline.bench import candidates
    from paceline.build import open_model

    methods = chosen_methods(args.methods)
    config = base_config(args, **overrides)
    quiet_transformers()
    loading.begin(str(config.model.model))
    opened = open_model(config)
    configs = method_configs(config, methods, args.draft_model)
    models = _HfModels(config, opened, args.draft_model)
    built = candidates.open_candidates(opened.target, opened.tokenizer, configs, builder(opened), cache(models.open))
    models.draft_runner = built.draft_runner
    loading.done()
    check_named(args.methods, built)
    return built


def base_config(args: argparse.Namespace, **overrides: Any) -> EngineConfig:
    """What the flags say, without a method. No profile: what is measured must not depend on an earlier measurement."""
    decided = {"method": NONE, "draft_model": None, "num_draft_tokens": 0, "acceptance": "token", "max_num_seqs": 1}
    return config_from_args(args, with_profile=False, **{**decided, **overrides})


def builder(opened: OpenModel) -> EngineBuilder:
    """build_engine for targets that take the place of the opened one."""
    from paceline.build import build_engine

    return lambda config, target: build_engine(config, replace(opened, target=target))


def chosen_methods(names: str) -> list[str]:
    """Methods of --methods. Raises OptionError for an unknown one."""
    from paceline.drafting import registry
    from paceline.drafting.router import PREDICTION

    known = list(registry.names())
    if names == ALL:
        return [name for name in known if name != PREDICTION]  # its drafts come with the requests of a client
    methods = [name.strip() for name in names.split(",") if name.strip()]
    for name in methods:
        if name not in known:
            raise OptionError(f"there is no method {name!r}; there are {', '.join(known)}")
    return methods


def method_configs(config: EngineConfig, methods: list[str], draft_model: Any) -> dict[str, EngineConfig]:
    """A configuration for each method, plain decoding first.

    What --draft-model names goes to the methods that need a model; where none of them is chosen, it is a head.
    """
    from paceline.drafting.registry import WeightsNeeded, spec

    takers = [name for name in methods if spec(name).weights is WeightsNeeded.MODEL] or methods
    configs = {NONE: config.with_options(method=NONE, draft_options={})}
    for name in methods:
        own = draft_model if name in takers else None
        configs.setdefault(name, config.with_options(method=name, draft_model=own))
    return configs


def check_named(names: str, candidates: Candidates) -> None:
    """Raise OptionError where a method that the user named cannot be used."""
    if names != ALL and candidates.unavailable:
        raise OptionError("; ".join(f"method {name}: {why}" for name, why in candidates.unavailable.items()))


@dataclass(slots=True, eq=False)
class _HfModels:
    """The models under test as transformers runs them."""

    config: EngineConfig
    opened: OpenModel
    draft_model: Any
    draft_runner: Runner | None = None

    def open(self, role: str) -> Any | None:
        """The "target" or the "draft". None where there is none, or in a dtype that transformers does not have."""
        if role == "target":
            return self._load(self.opened.target, str(self.config.model.model))
        return None if self.draft_runner is None else self._load(self.draft_runner, str(self.draft_model))

    def _load(self, runner: Runner, name: str) -> Any | None:
        """The model that a runner runs, or else one loaded from the same files."""
        from paceline.hub import locate
        from paceline.runners.huggingface_model import TransformersRunner
        from paceline.runners.loading import DTYPES, load_model

        if isinstance(runner, TransformersRunner):
            return runner.model
        if runner.info.dtype not in DTYPES:
            return None
        files, trust = locate(name), self.config.model.trust_remote_code
        dtype = DTYPES[runner.info.dtype]
        return load_model(files.folder, files.name, dtype, self.opened.device, trust_remote_code=trust)


# --- measuring --------------------------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace, candidates: Candidates, prompts: list[WorkloadPrompt]) -> SweepPlan:
    from paceline.bench.baselines import open_baselines
    from paceline.bench.measure import OutputLength
    from paceline.bench.sweep import SweepPlan, grid, parse_num_draft_tokens, parse_numbers, prompt_batches

    ks = parse_num_draft_tokens(args.num_draft_tokens)
    temperatures = parse_numbers(args.temperatures, "--temperatures")
    ids = [prompt.encode(candidates.tokenizer) for prompt in prompts]
    longest = max((k for k in ks if isinstance(k, int)), default=5)
    return SweepPlan(
        grid(candidates.drafting_methods, ks, temperatures, args.acceptance),
        prompt_batches([prompt.domain for prompt in prompts], ids, args.max_num_seqs),
        OutputLength(args.max_new_tokens, args.ignore_eos),
        args.repeats,
        open_baselines(candidates, [name for name in args.baselines.split(",") if name], longest),
        args.seed,
    )


def _measure(args: argparse.Namespace, candidates: Candidates, plan: SweepPlan) -> dict[str, Any]:
    """Run the sweep; Ctrl-C ends it early and loses nothing."""
    from paceline.bench.environment import new_run
    from paceline.bench.results import LosslessCheck, Measurements, setting_record
    from paceline.engines.local.warmup import measure_pass

    draft = candidates.draft_runner
    run = new_run(["paceline", *sys.argv[1:]], candidates.target.info, None if draft is None else draft.info)
    verify = measure_pass(candidates.target, num_seqs=args.max_num_seqs)
    measurements = Measurements(plan)
    run["complete"] = _fill(measurements, candidates)
    if not measurements.by_name:
        raise KeyboardInterrupt
    check = LosslessCheck(candidates)
    run["pass_seconds"] = {str(width): seconds for width, seconds in verify.as_dict().items()}
    run["settings"] = [setting_record(measurements, name, check, verify) for name in measurements.by_name]
    return run


def _fill(measurements: Measurements, candidates: Candidates) -> bool:
    """Whether the sweep came to its end."""
    from paceline.bench.sweep import sweep
    from paceline.hub.progress import track

    plan = measurements.plan
    try:
        for setting_run in track(sweep(candidates, plan), f"measuring {len(plan.settings)} settings", plan.total):
            measurements.add(setting_run)
    except KeyboardInterrupt:
        print("paceline: interrupted; keeping what has been measured", file=sys.stderr)
        return False
    return True


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

    out = results_file(args)
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


# --- output -----------------------------------------------------------------------------------------------------------


def _print(run: dict[str, Any], candidates: Candidates) -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.bench.report import COLUMNS, cells, headline

    console = Console()
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("setting", "lossless") else "right")
    for setting in run["settings"]:
        table.add_row(*cells(setting), _lossless_cell(setting["lossless"]))
    console.print(table)
    for method, why in candidates.unavailable.items():
        console.print(f"not measured: {method} ({why})", markup=False, highlight=False, style="dim")
    console.print(headline(run), markup=False, highlight=False)


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
