"""Prove that speculation has changed nothing, on your own models.

    paceline audit                                   every method that works with the default model
    paceline audit --target T --draft D --quick      a pair, within a minute
    paceline audit --acceptance lossy-typical        what a rule that is not exact looks like: exit status 1
    paceline audit --target table                    an exact toy model: the machinery itself, with high power
    paceline audit --endpoint http://a:8000 --against http://b:8000

Greedy texts are compared with plain decoding and with transformers; a difference is explained by the measured rounding
of a pass, or it is a bug. Sampled texts are drawn thousands of times and tested against the target's exact
distribution. All tests together raise a false alarm with probability --alpha, and each states how large a deviation it
would have found. Exit status 0: lossless; 1: not, and the message names what is wrong. The last line on stdout is one
JSON document with --json.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from paceline.cli.bench import add_subject_arguments, open_subject
from paceline.errors import OptionError, PacelineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.bench.audit import Audit, AuditPlan, Check
    from paceline.bench.candidates import Subject

NOT_LOSSLESS = 1
TABLE = "table"
TABLE_TOKENS = 5
TEXTS = (
    "The tide goes out and the tide comes in. The tide goes",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a",
    "One apple, two apples, three apples. One apple, two",
)
TABLE_CONTEXTS = ([0, 1, 2, 3, 0, 1, 2], [4, 4, 1, 4, 4], [2, 0, 3, 1, 2, 0])
QUICK_SECONDS = 25.0  # for the sampled checks; loading and greedy texts come on top


def configure(parser: argparse.ArgumentParser) -> None:
    add_subject_arguments(parser)
    parser.add_argument("--acceptance", default="token,block,coupled", metavar="R", help="rules, separated by commas")
    parser.add_argument("--temperatures", default="0.7,1", metavar="T", help="for sampled texts, separated by commas")
    parser.add_argument("-k", "--draft-tokens", type=int, default=2, metavar="N")
    parser.add_argument("--draws", type=int, default=2000, metavar="N", help="texts a check; fewer where time runs out")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="S", help="for all sampled checks together")
    parser.add_argument("--alpha", type=float, default=0.001, metavar="A", help="chance of a false alarm in all")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--quick", action="store_true", help="one context and temperature, each rule with one method: a minute"
    )
    parser.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible server to audit")
    parser.add_argument("--against", metavar="URL", help="the server that is taken to be right")
    parser.add_argument("--endpoint-model", metavar="NAME", help="the model's name on both servers")
    parser.add_argument("--json", action="store_true", help="end with one JSON document on one line")


def main(args: argparse.Namespace) -> int:
    from paceline.bench.audit import Audit

    _check(args)
    began = time.perf_counter()
    checks: list[Check] = []
    for check in _endpoint_checks(args) if args.endpoint else _model_checks(args):
        checks.append(check)
        if not args.json:
            print(f"{check.outcome.value:9}{check.name}: {check.detail}", flush=True)
    result = Audit(checks, args.alpha)
    seconds = time.perf_counter() - began
    print(_verdict(result, seconds))
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


def _verdict(result: Audit, seconds: float) -> str:
    shown = [check for check in result.checks if check.kind == "sampled" and check.visible is not None]
    if result.failed:
        names = "; ".join(check.name for check in result.failed)
        return f"NOT LOSSLESS: {names} ({len(result.failed)} of {len(result.checks)} checks, {seconds:.0f} s)"
    if not result.lossless:
        return "nothing was shown: no check could be made"
    power = ""
    if shown:
        furthest = max(check.visible or 0.0 for check in shown)
        power = f"; a total variation of {furthest:.2f} anywhere would have been found with 95% certainty"
    alarm = f"false alarm probability {result.alpha:g} in all"
    return f"lossless: {len(result.checks)} checks, {alarm}{power} ({seconds:.0f} s)"


# --- models -----------------------------------------------------------------------------------------------------------


def _model_checks(args: argparse.Namespace) -> Iterator[Check]:
    from paceline.bench.audit import audit

    subject = table_subject(args) if args.target == TABLE else open_subject(args)
    return audit(subject, _plan(args, subject))


def _plan(args: argparse.Namespace, subject: Subject) -> AuditPlan:
    from paceline.bench.audit import AuditPlan
    from paceline.bench.measure import Length
    from paceline.bench.sweep import parse_numbers
    from paceline.engines.local.verifier import Verifier

    rules = tuple(rule.strip() for rule in args.acceptance.split(","))
    for rule in rules:
        Verifier(rule)
    temperatures = parse_numbers(args.temperatures, "--temperatures")
    contexts = (
        [list(ids) for ids in TABLE_CONTEXTS] if subject.tokenizer is None else [subject.tokenizer.encode(t) for t in TEXTS]
    )
    return AuditPlan(
        contexts=contexts[:1] if args.quick else contexts,
        prompts=contexts[:2] if args.quick else contexts,
        methods=subject.guessing_methods,
        rules=rules,
        temperatures=tuple(temperatures[-1:] if args.quick else temperatures),
        num_draft_tokens=args.num_draft_tokens,
        length=Length(12 if args.quick else 48),
        alpha=args.alpha,
        draws=args.draws,
        seconds=min(args.seconds, QUICK_SECONDS) if args.quick else args.seconds,
        seed=args.seed,
        reference=_reference(subject),
        every_pair=not args.quick,
        describe=str if subject.tokenizer is None else lambda ids: repr(subject.tokenizer.decode(ids)),  # type: ignore[union-attr]
    )


def _reference(subject: Subject) -> Any:
    """transformers' greedy answer, where the target is one of its models."""
    from paceline.bench.baselines import Peer

    model = subject.peer_model("target")
    if model is None:
        return None
    peer = Peer("transformers", model, {})
    return lambda ids, length: peer.write([ids], length, 0.0).answers[0]


def table_subject(args: argparse.Namespace) -> Subject:
    """The toy model with every method that can guess for it; its draft is its blurred twin."""
    from paceline.bench.candidates import Subject
    from paceline.build import DRAFTERS
    from paceline.config import DecoderOptions
    from paceline.drafting.draft_model import DraftModel
    from paceline.engines.local.step import check_capabilities
    from paceline.runners.table import TableRunner

    target = TableRunner(vocab_size=TABLE_TOKENS, seed=3)
    twin = TableRunner(vocab_size=TABLE_TOKENS, seed=3, blur=0.5)
    drafters: dict[str, Any] = {"draft": DraftModel(twin, TABLE_TOKENS)}
    missing: dict[str, str] = {}
    wanted = list(DRAFTERS) if args.methods == "all" else ["none", *args.methods.split(",")]
    for method in wanted:
        try:
            if method != "draft":
                options = DecoderOptions(target=TABLE, method=method)
                drafters[method] = DRAFTERS[method](options, target, None, "cpu")  # type: ignore[arg-type]
            check_capabilities(target, drafters[method])
        except (PacelineError, KeyError, AttributeError) as error:
            drafters.pop(method, None)
            missing[method] = str(error)
    return Subject(target, None, {method: drafters[method] for method in wanted if method in drafters}, missing)


# --- endpoints --------------------------------------------------------------------------------------------------------


def _endpoint_checks(args: argparse.Namespace) -> Iterator[Check]:
    from paceline.bench.endpoints import Endpoint, EndpointPlan, compare_endpoints
    from paceline.bench.sweep import parse_numbers

    one, other = (Endpoint.reach(url, args.endpoint_model) for url in (args.endpoint, args.against))
    texts = TEXTS[:1] if args.quick else TEXTS
    temperatures = tuple(parse_numbers(args.temperatures, "--temperatures"))
    plan = EndpointPlan(
        list(texts),
        temperatures=temperatures[-1:] if args.quick else temperatures,
        draws=min(args.draws, 200) if args.quick else args.draws,
        alpha=args.alpha,
    )
    return compare_endpoints(one, other, plan)
