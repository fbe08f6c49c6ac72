"""Prove that speculation has changed nothing, on your own models.

    paceline audit                                         every method that works with the default model
    paceline audit MODEL --draft-model SMALL --quick       a pair, within a minute
    paceline audit --acceptance lossy-typical              how a rule that is not exact is found: exit status 1
    paceline audit table                                   an exact toy model: the engine itself, with high power
    paceline audit MODEL --engine vllm --methods ngram     another engine: its outputs with speculation and without
    paceline audit --endpoint http://a:8000 --against http://b:8000

Greedy outputs are compared with plain decoding and with transformers; a difference is explained by the measured
rounding of a pass, or it is a bug. Sampled outputs are drawn thousands of times and tested against the target's exact
distribution; those of another engine against its own without speculation. All tests together raise a false alarm with
probability --alpha, and each states how large a difference it would have found. Outcomes, and exit status: lossless
(0): nothing differs, and a difference of --distance would have been found with 95% certainty; different (1), with what
differs; not shown (3): too little evidence for either.
With --json the last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import TYPE_CHECKING

from paceline.bench.outcome import DISTANCE, MIN_DRAWS
from paceline.cli.candidates import (
    add_candidate_flags,
    base_config,
    builder,
    check_measured,
    check_named,
    chosen_methods,
    method_configs,
    open_candidates,
    open_pool,
)
from paceline.cli.terminal import note
from paceline.config import DEFAULT_MODEL, DRAFT_MODEL, NONE
from paceline.errors import OptionError
from paceline.tuned import LOCAL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.bench.audit import AuditCheck, AuditPlan, AuditResult, ReferenceGenerate
    from paceline.bench.candidates import Candidates
    from paceline.bench.engine_audit import EngineAuditPlan

DIFFERENT, NOT_SHOWN = 1, 3
TABLE = "table"
TABLE_VOCABULARY = 5
PROMPTS = (
    "The tide goes out and the tide comes in. The tide goes",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a",
    "One apple, two apples, three apples. One apple, two",
)
TABLE_PROMPTS = ([0, 1, 2, 3, 0, 1, 2], [4, 4, 1, 4, 4], [2, 0, 3, 1, 2, 0])
RULES, OWN_RULE = "token,block,coupled", "token"
SECONDS, QUICK_SECONDS = 600.0, 40.0  # for the sampled checks; loading and greedy outputs take more time
DRAWS, QUICK_DRAWS = 2000, 800


def configure(parser: argparse.ArgumentParser) -> None:
    add_candidate_flags(parser)
    checks = parser.add_argument_group("checks")
    checks.add_argument(
        "--acceptance", metavar="R",
        help=f"rules, separated by commas; default: {RULES}, or that of another --engine",
    )  # fmt: skip
    checks.add_argument("--temperatures", default="0.7,1", metavar="T", help="of sampled checks, separated by commas")
    checks.add_argument("-k", "--num-draft-tokens", type=int, default=2, metavar="N", help="default: 2")
    checks.add_argument(
        "--draws", type=int, metavar="N",
        help=f"per check, fewer where time runs out; default: {DRAWS}, quick {QUICK_DRAWS}",
    )  # fmt: skip
    checks.add_argument(
        "--seconds", type=float, metavar="S",
        help=f"of drawing, over all sampled checks; default: {SECONDS:.0f}, quick {QUICK_SECONDS:.0f}",
    )  # fmt: skip
    checks.add_argument(
        "--distance", type=float, default=DISTANCE, metavar="D",
        help=f"the largest difference (total variation) that lossless may leave unseen; default: {DISTANCE:g}",
    )  # fmt: skip
    checks.add_argument("--alpha", type=float, default=0.001, metavar="A", help="probability of a false alarm in all")
    checks.add_argument("--seed", type=int, default=0, metavar="N")
    checks.add_argument(
        "--quick", action="store_true", help="one context and temperature, each rule with one method: a minute"
    )
    servers = parser.add_argument_group("servers")
    servers.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible server to audit")
    servers.add_argument("--against", metavar="URL", help="the server that is taken to be right")
    servers.add_argument("--endpoint-model", metavar="NAME", help="the model's name on both servers")
    servers.add_argument("--api-key", metavar="KEY", help="for both servers; default: $OPENAI_API_KEY")
    parser.add_argument("--json", action="store_true", help="end with one JSON document on one line")


def main(args: argparse.Namespace) -> int:
    from paceline.bench.audit import AuditResult

    _check(args)
    started = time.perf_counter()
    checks: list[AuditCheck] = []
    for check in _checks(args):
        checks.append(check)
        if not args.json:
            print(f"{check.outcome.value:10}{check.name}: {check.detail}", flush=True)
    result, seconds = AuditResult(checks, args.alpha), time.perf_counter() - started
    print(_summary(result, seconds, two_samples=bool(args.endpoint) or args.engine != LOCAL))
    if args.json:
        print(json.dumps({**result.as_dict(), "seconds": seconds}))
    return _exit_status(result)


def _checks(args: argparse.Namespace) -> Iterator[AuditCheck]:
    if args.endpoint:
        return _endpoint_checks(args)
    return _model_checks(args) if args.engine == LOCAL else _engine_checks(args)


def _exit_status(result: AuditResult) -> int:
    if result.lossless:
        return 0
    return DIFFERENT if result.different else NOT_SHOWN


def _check(args: argparse.Namespace) -> None:
    """Fill in what --quick decides, and raise OptionError for what cannot be."""
    from paceline.bench.sweep import parse_numbers

    if (args.endpoint is None) != (args.against is None):
        raise OptionError("--endpoint and --against go together: a server to audit, and one that is taken to be right")
    if args.endpoint is not None and args.model != DEFAULT_MODEL:
        raise OptionError(
            f"an audit of --endpoint opens no model, and {args.model} is one; --endpoint-model names a server's model"
        )
    if args.draws is None:
        args.draws = QUICK_DRAWS if args.quick else DRAWS
    if args.acceptance is None:
        args.acceptance = RULES if args.engine == LOCAL else OWN_RULE
    if args.seconds is None:
        args.seconds = QUICK_SECONDS if args.quick else SECONDS
    for name, value in (("alpha", args.alpha), ("distance", args.distance)):
        if not 0 < value < 1:
            raise OptionError(f"--{name} is a number between 0 and 1, not {value:g}")
    if args.draws < MIN_DRAWS:
        raise OptionError(f"--draws must be {MIN_DRAWS} or more to show anything, not {args.draws}")
    if not args.seconds > 0:
        raise OptionError(f"--seconds must be above 0, not {args.seconds:g}")
    if args.num_draft_tokens < 1:
        raise OptionError("an audit needs at least one draft token")
    parse_numbers(args.temperatures, "--temperatures")


def _summary(result: AuditResult, seconds: float, *, two_samples: bool) -> str:
    took = f"({len(result.checks)} checks, {seconds:.0f} s)"
    if result.different:
        return f"different: {'; '.join(check.name for check in result.different)} {took}"
    if not result.lossless:
        subjects = "; ".join(result.not_shown) or "no check could be made"
        return f"not shown: {subjects} {took}. More --draws and --seconds show more"
    alarm = f"false alarm probability {result.alpha:g} in all"
    return f"lossless: {len(result.checks)} checks, {alarm}{_power(result, two_samples)} ({seconds:.0f} s)"


def _power(result: AuditResult, two_samples: bool) -> str:
    """The smallest difference that would have been found; without sampled checks, what was compared at all."""
    if result.distance is None:
        return "; greedy outputs only"
    kind = "of the commonest output, more or less," if two_samples else "of total variation"
    return f"; {result.distance:.2f} {kind} in any setting would have been found with 95% certainty"


# --- models -----------------------------------------------------------------------------------------------------------


def _model_checks(args: argparse.Namespace) -> Iterator[AuditCheck]:
    from paceline.bench.audit import audit

    rules = tuple(rule.strip() for rule in args.acceptance.split(","))
    for rule in rules:
        base_config(args, acceptance=rule)  # refuses an unknown rule before a model is loaded
    yield from _lossy_cache(args)
    candidates = table_candidates(args) if args.model == TABLE else open_candidates(args)
    yield from audit(candidates, _plan(args, candidates, rules))


def _lossy_cache(args: argparse.Namespace) -> Iterator[AuditCheck]:
    """Methods agree with plain decoding over a rounded cache too, but that is then not the model's own output."""
    from paceline.bench.audit import AuditCheck
    from paceline.bench.outcome import Outcome

    cache = base_config(args).cache
    if cache.rounded_kv:
        detail = "keys and values are rounded to eight bits: with every method the output is not the model's"
        yield AuditCheck(f"KV cache in {cache.kv_cache_dtype}", "cache", Outcome.DIFFERENT, detail, 0.0)


def _plan(args: argparse.Namespace, candidates: Candidates, rules: tuple[str, ...]) -> AuditPlan:
    from paceline.bench.audit import AuditPlan
    from paceline.bench.measure import OutputLength
    from paceline.bench.outcome import Evidence
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
        seconds=args.seconds,
        seed=args.seed,
        reference=_reference(candidates),
        every_pair=not args.quick,
        evidence=Evidence(args.distance),
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


# --- engines ----------------------------------------------------------------------------------------------------------


def _engine_checks(args: argparse.Namespace) -> Iterator[AuditCheck]:
    """Another engine as a whole, by its outputs; what it cannot do is named at the end."""
    from paceline.bench.candidates import DecodeSetting
    from paceline.bench.engine_audit import audit_engine

    if "," in args.acceptance:
        raise OptionError(f"the engine {args.engine} is audited with one rule at a time, not {args.acceptance}")
    with open_pool(args) as pool:
        tokenizer = pool.decoder(DecodeSetting(NONE)).tokenizer
        if pool.fixed_method is not None:
            raise OptionError(
                "this server drafts as it was started, so there is nothing of its own to compare with: start one "
                "without speculation too, and use --endpoint URL --against URL"
            )
        prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
        yield from audit_engine(pool, _engine_plan(args, prompts, pool.drafting_methods))
        check_measured(args.methods, pool)
        for method, why in pool.unavailable.items():
            note(f"not audited: {method} ({why})")


def _engine_plan(args: argparse.Namespace, prompts: list[list[int]], methods: list[str]) -> EngineAuditPlan:
    from paceline.bench.engine_audit import EngineAuditPlan
    from paceline.bench.measure import OutputLength
    from paceline.bench.outcome import Evidence
    from paceline.bench.sweep import parse_numbers

    temperatures = parse_numbers(args.temperatures, "--temperatures")
    return EngineAuditPlan(
        prompts[:1] if args.quick else prompts,
        methods,
        tuple(temperatures[-1:] if args.quick else temperatures),
        args.num_draft_tokens,
        OutputLength(12 if args.quick else 48),
        args.alpha,
        args.draws,
        args.seconds,
        args.seed,
        args.acceptance,
        Evidence(args.distance),
    )


# --- endpoints --------------------------------------------------------------------------------------------------------


def _endpoint_checks(args: argparse.Namespace) -> Iterator[AuditCheck]:
    from paceline.bench.endpoints import Endpoint, EndpointPair, EndpointPlan, compare_endpoints
    from paceline.bench.outcome import Evidence
    from paceline.bench.sweep import parse_numbers

    api_key = args.api_key or os.environ.get("OPENAI_API_KEY")
    servers = [Endpoint.connect(url, args.endpoint_model, api_key) for url in (args.endpoint, args.against)]
    temperatures = tuple(parse_numbers(args.temperatures, "--temperatures"))
    plan = EndpointPlan(
        list(PROMPTS[:1] if args.quick else PROMPTS),
        temperatures=temperatures[-1:] if args.quick else temperatures,
        draws=args.draws,
        alpha=args.alpha,
        seconds=args.seconds,
        evidence=Evidence(args.distance),
    )
    return compare_endpoints(EndpointPair(*servers), plan)
