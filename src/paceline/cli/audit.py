"""Prove that speculation has changed nothing, on your own models.

    paceline audit                                         every method that works with the default model
    paceline audit MODEL --draft-model SMALL --quick       a pair, within a minute
    paceline audit --acceptance lossy-typical              how a rule that is not exact is found: exit status 1
    paceline audit table                                   an exact toy model: the engine itself, with high power
    paceline audit --endpoint http://a:8000 --against http://b:8000

Greedy outputs are compared with plain decoding and with transformers; a difference is explained by the measured
rounding of a pass, or it is a bug. Sampled outputs are drawn thousands of times and tested against the target's exact
distribution. All tests together raise a false alarm with probability --alpha, and each states how large a deviation it
would have found. Exit status 0: lossless; 1: not, and the message names what is wrong. With --json the last line on
stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from paceline.cli.bench import (
    add_candidate_flags,
    base_config,
    builder,
    check_named,
    chosen_methods,
    method_configs,
    open_candidates,
)
from paceline.config import DRAFT_MODEL
from paceline.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.bench.audit import AuditCheck, AuditPlan, AuditResult, ReferenceGenerate
    from paceline.bench.candidates import Candidates

NOT_LOSSLESS = 1
TABLE = "table"
TABLE_VOCABULARY = 5
PROMPTS = (
    "The tide goes out and the tide comes in. The tide goes",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a",
    "One apple, two apples, three apples. One apple, two",
)
TABLE_PROMPTS = ([0, 1, 2, 3, 0, 1, 2], [4, 4, 1, 4, 4], [2, 0, 3, 1, 2, 0])
QUICK_SECONDS = 25.0  # for the sampled checks; loading and greedy outputs take more time


def configure(parser: argparse.ArgumentParser) -> None:
    add_candidate_flags(parser)
    checks = parser.add_argument_group("checks")
    checks.add_argument("--acceptance", default="token,block,coupled", metavar="R", help="rules, separated by commas")
    checks.add_argument("--temperatures", default="0.7,1", metavar="T", help="of sampled checks, separated by commas")
    checks.add_argument("-k", "--num-draft-tokens", type=int, default=2, metavar="N", help="default: 2")
    checks.add_argument("--draws", type=int, default=2000, metavar="N", help="per check; fewer where time runs out")
    checks.add_argument("--seconds", type=float, default=600.0, metavar="S", help="for all sampled checks together")
    checks.add_argument("--alpha", type=float, default=0.001, metavar="A", help="probability of a false alarm in all")
    checks.add_argument("--seed", type=int, default=0, metavar="N")
    checks.add_argument(
        "--quick", action="store_true", help="one context and temperature, each rule with one method: a minute"
    )
    servers = parser.add_argument_group("servers")
    servers.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible server to audit")
    servers.add_argument("--against", metavar="URL", help="the server that is taken to be right")
    servers.add_argument("--endpoint-model", metavar="NAME", help="the model's name on both servers")
    parser.add_argument("--json", action="store_true", help="end with one JSON document on one line")


def main(args: argparse.Namespace) -> int:
    from paceline.bench.audit import AuditResult

    _check(args)
    started = time.perf_counter()
    checks: list[AuditCheck] = []
    for check in _endpoint_checks(args) if args.endpoint else _model_checks(args):
        checks.append(check)
        if not args.json:
            print(f"{check.status.value:9}{check.name}: {check.detail}", flush=True)
    result, seconds = AuditResult(checks, args.alpha), time.perf_counter() - started
    print(_summary(result, seconds))
    if args.json:
        print(json.dumps({**result.as_dict(), "seconds": seconds}))
    return 0 if result.lossless else NOT_LOSSLESS


def _check(args: argparse.Namespace) -> None:
    if (args.endpoint is None) != (args.against is None):
        raise OptionError("--endpoint and --against go together: a server to audit, and one that is taken to be right")
    if not 0 < args.alpha < 1:
        raise OptionError(f"--alpha is a probability between 0 and 1, not {args.alpha:g}")
    if args.draws < 50:
        raise OptionError(f"--draws must be 50 or more to show anything, not {args.draws}")
    if args.num_draft_tokens < 1:
        raise OptionError("an audit needs at least one draft token")


def _summary(result: AuditResult, seconds: float) -> str:
    if result.failed:
        names = "; ".join(check.name for check in result.failed)
        return f"NOT LOSSLESS: {names} ({len(result.failed)} of {len(result.checks)} checks, {seconds:.0f} s)"
    if not result.lossless:
        return "nothing was shown: no check could be made"
    distances = [check.distance for check in result.checks if check.distance is not None]
    power = ""
    if distances:
        power = f"; a total variation of {max(distances):.2f} anywhere would have been found with 95% certainty"
    alarm = f"false alarm probability {result.alpha:g} in all"
    return f"lossless: {len(result.checks)} checks, {alarm}{power} ({seconds:.0f} s)"


# --- models -----------------------------------------------------------------------------------------------------------


def _model_checks(args: argparse.Namespace) -> Iterator[AuditCheck]:
    from paceline.bench.audit import audit

    rules = tuple(rule.strip() for rule in args.acceptance.split(","))
    for rule in rules:
        base_config(args, acceptance=rule)  # refuses an unknown rule before a model is loaded
    candidates = table_candidates(args) if args.model == TABLE else open_candidates(args)
    return audit(candidates, _plan(args, candidates, rules))


def _plan(args: argparse.Namespace, candidates: Candidates, rules: tuple[str, ...]) -> AuditPlan:
    from paceline.bench.audit import AuditPlan
    from paceline.bench.measure import OutputLength
    from paceline.bench.sweep import parse_numbers

    temperatures = parse_numbers(args.temperatures, "--temperatures")
    tokenizer = candidates.tokenizer
    contexts = [list(ids) for ids in TABLE_PROMPTS]
    if args.model != TABLE:
        contexts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    return AuditPlan(
        contexts=contexts[:1] if args.quick else contexts,
        prompts=contexts[:2] if args.quick else contexts,
        methods=candidates.drafting_methods,
        rules=rules,
        temperatures=tuple(temperatures[-1:] if args.quick else temperatures),
        num_draft_tokens=args.num_draft_tokens,
        length=OutputLength(12 if args.quick else 48),
        alpha=args.alpha,
        draws=args.draws,
        seconds=min(args.seconds, QUICK_SECONDS) if args.quick else args.seconds,
        seed=args.seed,
        reference=_reference(candidates),
        every_pair=not args.quick,
        describe=str if args.model == TABLE else lambda ids: repr(tokenizer.decode(ids)),
    )


def _reference(candidates: Candidates) -> ReferenceGenerate | None:
    """transformers' greedy output, where the target is one of its models."""
    from paceline.bench.baselines import Baseline

    model = candidates.hf_model("target")
    if model is None:
        return None
    baseline = Baseline("transformers", model, {})
    return lambda prompt, length: baseline.run([prompt], length, 0.0).outputs[0]


def table_candidates(args: argparse.Namespace) -> Candidates:
    """The toy model with every method that can draft for it; its draft model is its blurred twin."""
    from paceline.bench import candidates
    from paceline.build import OpenModel
    from paceline.drafting.draft_model import DraftModel
    from paceline.hub.tokenizer import Tokenizer
    from paceline.runners.table import TableRunner

    methods = chosen_methods(args.methods)
    target = TableRunner(vocab_size=TABLE_VOCABULARY, seed=3)
    twin = DraftModel(TableRunner(vocab_size=TABLE_VOCABULARY, seed=3, blur=0.5), TABLE_VOCABULARY)
    configs = method_configs(base_config(args), methods, None)
    if DRAFT_MODEL in configs:
        configs[DRAFT_MODEL] = configs[DRAFT_MODEL].with_options(drafter=twin)
    opened = OpenModel(target, Tokenizer(None), "cpu")
    built = candidates.open_candidates(target, opened.tokenizer, configs, builder(opened))
    check_named(args.methods, built)
    return built


# --- endpoints --------------------------------------------------------------------------------------------------------


def _endpoint_checks(args: argparse.Namespace) -> Iterator[AuditCheck]:
    from paceline.bench.endpoints import Endpoint, EndpointPair, EndpointPlan, compare_endpoints
    from paceline.bench.sweep import parse_numbers

    pair = EndpointPair(*(Endpoint.connect(url, args.endpoint_model) for url in (args.endpoint, args.against)))
    temperatures = tuple(parse_numbers(args.temperatures, "--temperatures"))
    plan = EndpointPlan(
        list(PROMPTS[:1] if args.quick else PROMPTS),
        temperatures=temperatures[-1:] if args.quick else temperatures,
        draws=min(args.draws, 200) if args.quick else args.draws,
        alpha=args.alpha,
    )
    return compare_endpoints(pair, plan)
