"""Find the method and the k that pay on this machine, or learn that none does.

    paceline tune                                    the default model, methods that need no draft
    paceline tune --target T --draft D               a pair
    paceline tune --prompts my-prompts.txt           on the texts you really have
    paceline tune --batch 8                          for eight texts at a time

Measures what a pass costs by its width, what guessing costs and which guesses stand; predicts every method and k;
runs the best of them against plain decoding; writes paceline.toml, which generate, chat and serve pick up; and says in
one sentence what to do. Takes a few minutes. With --json the last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.bench import add_subject_arguments, checked_counts, open_subject

if TYPE_CHECKING:
    from paceline.bench.candidates import Subject
    from paceline.bench.tune import Tuning
    from paceline.tuned import Profile

SHOWN = 8  # predictions in the table


def configure(parser: argparse.ArgumentParser) -> None:
    add_subject_arguments(parser)
    parser.add_argument("--prompts", default="builtin", metavar="FILE", help="builtin, builtin:code,chat, or a file")
    parser.add_argument("--limit", type=int, default=6, metavar="N", help="prompts, spread over the domains")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="texts written together")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="of the runs that confirm the prediction")
    parser.add_argument("--out", default="paceline.toml", metavar="FILE", help="the profile; none: write nothing")
    parser.add_argument("--json", action="store_true", help="end with one JSON document on one line")


def main(args: argparse.Namespace) -> int:
    from paceline.bench.measure import Length
    from paceline.bench.tune import TunePlan, tune
    from paceline.bench.workloads import load_prompts
    from paceline.core.sampling import SamplingParams
    from paceline.hub.progress import stage
    from paceline.tuned import write_profile

    prompts = load_prompts(args.prompts, args.limit)
    checked_counts(args)
    SamplingParams(temperature=args.temperature)
    subject = open_subject(args)
    assert subject.tokenizer is not None
    ids = [prompt.encode(subject.tokenizer) for prompt in prompts]
    plan = TunePlan(ids, Length(args.max_new_tokens), args.temperature, args.batch, args.repeats)
    with stage("measuring passes, guesses and the best settings; a few minutes"):
        tuning = tune(subject, plan)
    profile = _profile(args, subject, tuning)
    if not args.json:
        _print(tuning, subject)
    if args.out != "none":
        write_profile(profile, Path(args.out).expanduser())
        print(f"paceline: wrote {args.out}", file=sys.stderr)
    print(json.dumps(_document(tuning)) if args.json else tuning.advice.sentence)
    return 0


def _profile(args: argparse.Namespace, subject: Subject, tuning: Tuning) -> Profile:
    from paceline.tuned import Profile

    advice, info = tuning.advice, subject.target.info
    return Profile(
        target=args.target,
        device=info.device,
        method=advice.method,
        num_draft_tokens=advice.num_draft_tokens,
        draft=args.draft if advice.method in ("draft", "foreign") else None,
        dtype=args.dtype,
        draft_dtype=args.draft_dtype,
        advice=advice.sentence,
        predicted=advice.predicted,
        measured=advice.measured,
        shortest_answer=advice.shortest_answer,
        pass_seconds=tuning.verify.as_dict(),
        draft_seconds=tuning.draft.as_dict(),
    )


def _print(tuning: Tuning, subject: Subject) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    plain = next(iter(tuning.verify.as_dict().values()))
    widths = "  ".join(f"{size}: {seconds / plain:.2f}" for size, seconds in tuning.verify.as_dict().items())
    console.print(
        f"a pass of the target takes {1000 * plain:.1f} ms; by tokens in it, relative: {widths}", highlight=False
    )
    table = Table(box=None, pad_edge=False)
    for name in ("method", "k", "tokens a step", "predicted", "measured"):
        table.add_column(name, justify="left" if name == "method" else "right")
    measured = {(one.method, one.num_draft_tokens): one.measured for one in tuning.confirmed}
    shown = [one for one in tuning.predictions if (one.method, one.k) in measured]
    shown += [one for one in tuning.predictions if one not in shown][: SHOWN - len(shown)]
    for one in shown:
        ran = measured.get((one.method, one.k))
        table.add_row(
            one.method, str(one.k), f"{one.tokens_per_step:.2f}", f"{one.speedup:.2f}x", f"{ran:.2f}x" if ran else ""
        )
    for found in tuning.confirmed:
        if found.predicted is None:
            table.add_row(found.method, str(found.num_draft_tokens), "", "", f"{found.measured:.2f}x")
    console.print(table)
    for method, why in subject.missing.items():
        console.print(f"not tried: {method} ({why})", markup=False, highlight=False, style="dim")


def _document(tuning: Tuning) -> dict[str, Any]:
    return {
        **asdict(tuning.advice),
        "predictions": [asdict(one) for one in tuning.predictions],
        "confirmed": [asdict(one) for one in tuning.confirmed],
        "pass_seconds": tuning.verify.as_dict(),
        "draft_seconds": tuning.draft.as_dict(),
    }
