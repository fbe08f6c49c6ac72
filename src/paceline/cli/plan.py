"""Will it fit, and will it pay? Answered from sizes alone, before anything is downloaded or loaded.

    paceline plan llama-3.1-70b --draft llama-3.2-1b --card h100 --gpus 2
    paceline plan qwen2.5-coder-32b --draft qwen2.5-coder-0.5b --card rtx-4090 --dtype Q4_K_M
    paceline plan ./my-model --method eagle --card "RTX 3090" --context 16384
    paceline plan model.gguf --memory 12             any card, by its memory in GiB
    paceline plan --advise                           questions, then a recommendation with its command
    paceline plan --advise apple                     the recommendation for one situation
    paceline plan --list models                      the catalogue; also cards, precisions

A model is a name of the catalogue, a directory, a config.json, a .gguf file or a Hub id. Weights and caches are exact
arithmetic. The speed-up is an ESTIMATE from data sheets and published acceptance: `paceline tune` measures it.
With --json the last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import OptionError
from paceline.plan.advise import Advice, Question, Situation, advise, first_question, situation_of
from paceline.plan.catalogue import catalogue
from paceline.plan.fit import Outcome, VerifyResult, verifier
from paceline.plan.hardware import GIB, Card, cards, find_card, nameless_card
from paceline.plan.locate import find_shape
from paceline.plan.memory import MemoryPlan, Method, Setting, plan_memory
from paceline.plan.model_sizes import ModelShape
from paceline.plan.pairs import expectation_for, expectation_from_rate, listed_pair, pairing_note
from paceline.plan.precision import PRECISIONS, Precision, find_precision
from paceline.plan.predict import SpeedEstimate, estimate_speed

if TYPE_CHECKING:
    from rich.console import Console

_DEFAULT_CONTEXT = 4096
_BAR_WIDTH = 60
_COLOURS = ("cyan", "blue", "magenta", "bright_magenta", "yellow", "green")
_LISTS = ("models", "cards", "precisions")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="TARGET", help="the large model (or --target)")
    parser.add_argument("--target", metavar="MODEL", help="the large model")
    parser.add_argument("--draft", metavar="MODEL", help="the small model that guesses")
    parser.add_argument("--method", choices=[method.value for method in Method], help="how guesses are made")
    parser.add_argument("--dtype", metavar="P", help="weights of the target: fp32, bf16, fp8, int8, int4, Q4_K_M, …")
    parser.add_argument("--draft-dtype", metavar="P", help="weights of the draft or heads")
    parser.add_argument("--kv-dtype", metavar="P", help="both caches: fp32, bf16, fp8, int8, …")
    parser.add_argument("--context", type=int, metavar="N", help="longest text, prompt and answer together")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="texts at once")
    parser.add_argument("-k", "--draft-tokens", type=int, default=5, metavar="N", help="guesses per round")
    parser.add_argument("--tree-nodes", type=int, metavar="N", help="guesses verified per round, when a tree")
    parser.add_argument("--card", metavar="NAME", help="the GPU, Apple chip or kind of CPU")
    parser.add_argument("--memory", type=float, metavar="GIB", help="the card's memory, where it is another")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="how many of these cards")
    parser.add_argument(
        "--acceptance-rate", type=float, metavar="RATE", help="predict with this acceptance rate, 0 to 1"
    )
    situations = [situation.value for situation in Situation]
    parser.add_argument("--advise", nargs="?", const="ask", choices=["ask", *situations], help="what to do, and how")
    parser.add_argument("--list", choices=_LISTS, help="show a catalogue and stop")
    parser.add_argument("--json", action="store_true", help="end with one JSON document on one line")


def main(args: argparse.Namespace) -> int:
    if args.list:
        return _print_list(args.list, args.json)
    if args.advise:
        return _print_advice(args)
    report = _work_out(args)
    if args.json:
        print(json.dumps(_as_json(report)))
    else:
        _print_report(report)
    return 0


@dataclass(frozen=True, slots=True)
class _Report:
    """All that one run found out. Without a card there is no verdict; without its data sheet no speed."""

    plan: MemoryPlan
    card: Card | None
    verified: VerifyResult | None
    speed: SpeedEstimate | None
    notes: tuple[str, ...]


def _work_out(args: argparse.Namespace) -> _Report:
    setting, card = _setting(args), _card(args)
    plan = plan_memory(setting)
    verified = verifier(plan, card) if card else None
    return _Report(plan, card, verified, _speed(args, setting, card), _notes(setting))


def _setting(args: argparse.Namespace) -> Setting:
    target = find_shape(_target_name(args))
    draft = find_shape(args.draft) if args.draft else None
    chosen = args.method or (Method.DRAFT.value if draft else Method.NONE.value)
    return Setting(
        target=target,
        precision=_precision(args.dtype, target),
        method=Method(chosen),
        draft=draft,
        draft_precision=_draft_precision(args, draft),
        kv_precision=find_precision(args.kv_dtype) if args.kv_dtype else None,
        context=min(_DEFAULT_CONTEXT, target.context) if args.context is None else args.context,
        batch=args.batch,
        num_draft_tokens=args.num_draft_tokens,
        tree_nodes=args.tree_nodes,
        gpus=args.gpus,
    )


def _target_name(args: argparse.Namespace) -> str:
    if args.model and args.target:
        raise OptionError(f"two targets were named, {args.model} and {args.target}: give one")
    name = args.model or args.target
    if not name:
        raise OptionError("which model? For example: paceline plan llama-3.1-8b --card rtx-4090")
    return str(name)


def _precision(asked: str | None, shape: ModelShape) -> Precision:
    """What was asked for, else what the files hold, else bf16."""
    if asked:
        return find_precision(asked)
    stored = (shape.stored_precision or "bf16").lower()
    return PRECISIONS.get(stored, PRECISIONS["bf16"])


def _draft_precision(args: argparse.Namespace, draft: ModelShape | None) -> Precision | None:
    if args.draft_dtype:
        return find_precision(args.draft_dtype)
    # A draft that lies on disk in its own precision is taken as it is; a name alone follows the target.
    return _precision(None, draft) if draft is not None and draft.stored_precision and not args.dtype else None


def _card(args: argparse.Namespace) -> Card | None:
    if args.card:
        return find_card(args.card, args.memory)
    return None if args.memory is None else nameless_card(args.memory)


def _speed(args: argparse.Namespace, setting: Setting, card: Card | None) -> SpeedEstimate | None:
    given = args.acceptance_rate
    expectation = expectation_for(setting) if given is None else expectation_from_rate(given, setting.num_draft_tokens)
    return estimate_speed(setting, card, expectation) if card else None


def _notes(setting: Setting) -> tuple[str, ...]:
    target, draft = setting.target, setting.draft
    notes = [*target.notes, *(draft.notes if draft else ())]
    if draft and (warning := pairing_note(target, draft)):
        notes.append(warning)
    if setting.context > target.context:
        notes.append(f"{target.name} was made for texts of {target.context:,} tokens, not {setting.context:,}")
    if target.window:
        notes.append("sliding-window layers are counted at full length; a runner that truncates them needs less")
    if setting.precision.gguf:
        notes.append("GGUF weights stay packed only under llama.cpp; the torch runners unpack them: plan --dtype bf16")
    if setting.gpus > 1:
        notes.append("the target is divided by layers; draft, buffers and activations are counted on the fullest GPU")
    return tuple(notes)


def _as_json(report: _Report) -> dict[str, Any]:
    setting = report.plan.setting
    return {
        "target": _shape_json(setting.target, setting.precision),
        "draft": _shape_json(setting.guesser, setting.guesser_precision) if setting.guesser else None,
        "method": setting.method.value,
        "num_draft_tokens": setting.num_draft_tokens,
        "context": setting.context,
        "batch": setting.batch,
        "gpus": setting.gpus,
        "parts": [{"name": p.name, "bytes": p.bytes, "fullest_bytes": p.fullest} for p in report.plan.parts],
        "total_bytes": report.plan.total_bytes,
        "fullest_bytes": report.plan.fullest_bytes,
        "card": _card_json(report.card) if report.card else None,
        "verdict": _verdict_json(report.verified) if report.verified else None,
        "speed": _speed_json(report.speed) if report.speed else None,
        "published_speedup": pair.published.speedup if (pair := listed_pair(setting)) else None,
        "notes": list(report.notes),
    }


def _shape_json(shape: ModelShape, precision: Precision) -> dict[str, Any]:
    return {"name": shape.name, "parameters": shape.parameters, "precision": precision.name}


def _card_json(card: Card) -> dict[str, Any]:
    sizes = {"memory_bytes": card.memory_bytes, "usable_bytes": card.usable_bytes}
    return {"name": card.name, "kind": card.kind.value, **sizes, "bandwidth_gbs": card.bandwidth_gbs}


def _verdict_json(verified: VerifyResult) -> dict[str, Any]:
    changes = [{"words": c.words, "options": c.options, "left_bytes": c.left_bytes} for c in verified.changes]
    return {
        "outcome": verified.outcome.value,
        "left_bytes": verified.left_bytes,
        "longest_context": verified.longest_context,
        "changes": changes,
    }


def _speed_json(speed: SpeedEstimate) -> dict[str, Any]:
    return {
        "is_estimate": True,
        "plain_tokens_per_second": round(speed.plain_tokens_per_second, 2),
        "tokens_per_step": [round(speed.tokens_per_step_low, 3), round(speed.tokens_per_step_high, 3)],
        "speedup": [round(speed.speedup_low, 3), round(speed.speedup_high, 3)],
        "basis": speed.basis,
    }


def _print_report(report: _Report) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    _print_heading(console, report.plan.setting)
    _print_parts(console, report)
    if report.verified and report.card:
        _print_verdict(console, report.verified, report.card)
    else:
        console.print("\nName a card (--card rtx-4090, or --memory 24) to hear whether that fits.", style="dim")
    if report.speed and report.plan.setting.nodes:
        _print_speed(console, report.speed)
    if (pair := listed_pair(report.plan.setting)) and pair.published.speedup is not None:
        console.print(
            f"Published for this pair: {pair.published.speedup:.2f}x, {pair.published.hardware} ({pair.source})"
        )
    for note in report.notes:
        console.print(f"note: {note}", style="dim")


def _print_heading(console: Console, setting: Setting) -> None:
    target = setting.target
    words = f"[bold]{target.name}[/bold] ({_count(target.parameters)}, {setting.precision.name})"
    if guesser := setting.guesser:
        words += f" + [bold]{guesser.name}[/bold] ({_count(guesser.parameters)}, {setting.guesser_precision.name})"
    elif setting.method is not Method.NONE:
        words += f" + [bold]{setting.method.value}[/bold]"
    texts = "one text" if setting.batch == 1 else f"{setting.batch} texts"
    console.print(f"{words}, {texts} of up to {setting.context:,} tokens, k = {setting.num_draft_tokens}\n")


def _print_parts(console: Console, report: _Report) -> None:
    """One bar over the card's memory, then a line for each part."""
    shown = report.plan.parts
    room = max(report.card.usable_bytes if report.card else 0, report.plan.fullest_bytes)
    ends = [round(sum(p.fullest for p in shown[: i + 1]) / room * _BAR_WIDTH) for i in range(len(shown))]
    starts = [0, *ends[:-1]]
    blocks = "".join(f"[{_COLOURS[i % 6]}]{'█' * (ends[i] - starts[i])}[/]" for i in range(len(shown)))
    console.print(f"  {blocks}[dim]{'░' * (_BAR_WIDTH - ends[-1])}[/dim]")
    several = report.plan.setting.gpus > 1
    for index, part in enumerate(shown):
        on_one = f"   {_gib(part.fullest):>10} on the fullest" if several else ""
        console.print(f"  [{_COLOURS[index % 6]}]■[/] {part.name:<20} {_gib(part.bytes):>10}{on_one}")
    on_one = f"   {_gib(report.plan.fullest_bytes):>10} on the fullest" if several else ""
    console.print(f"    {'in all':<20} [bold]{_gib(report.plan.total_bytes):>10}[/bold]{on_one}")


def _print_verdict(console: Console, verified: VerifyResult, card: Card) -> None:
    usable = f"{_gib(card.usable_bytes)} usable of {card.memory_gib:g} GiB on {card.name}"
    if verified.outcome is Outcome.FITS:
        console.print(f"\n[bold green]Fits.[/] {_gib(verified.left_bytes)} left ({usable}).")
        console.print(f"Longest text that fits: {verified.longest_context:,} tokens.")
        return
    with_change = verified.outcome is Outcome.FITS_IF_CHANGED
    word = "[bold yellow]Fits with a change.[/]" if with_change else "[bold red]Does not fit.[/]"
    console.print(f"\n{word} {_gib(-verified.left_bytes)} are missing ({usable}).")
    for change in verified.changes:
        console.print(f"  with {change.words}: [bold]{change.options}[/bold] leaves {_gib(change.left_bytes)}")
    if not verified.changes:
        console.print("  not even with the fewest bits, a short text or 16 such cards")


def _print_speed(console: Console, speed: SpeedEstimate) -> None:
    gain = _range(speed.speedup_low, speed.speedup_high, "x")
    console.print(f"\nExpected speed-up, [bold]an estimate[/bold]: [bold]{gain}[/bold] over plain decoding", end="")
    console.print(f" at about {speed.plain_tokens_per_second:,.0f} tokens/s")
    tokens = _range(speed.tokens_per_step_low, speed.tokens_per_step_high, "")
    console.print(f"  {tokens} tokens a step ({speed.basis})", style="dim")
    if speed.speedup_high < 1.0:
        console.print("  [bold red]Do not speculate here[/]: even a good workload would lose.")
    elif speed.speedup_low < 1.0:
        console.print("  It may lose on a bad workload: leave k on auto, or measure with `paceline tune`.")


def _range(low: float, high: float, unit: str) -> str:
    return f"{low:.2f}{unit}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}{unit} to {high:.2f}{unit}"


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):,.1f} MiB"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def _print_list(which: str, as_json: bool) -> int:
    rows = {"models": _model_rows, "cards": _card_rows, "precisions": _precision_rows}[which]()
    if as_json:
        print(json.dumps({which: rows}))
        return 0
    for row in rows:
        print("  ".join(f"{value:<22}" if isinstance(value, str) else f"{value:>10g}" for value in row.values()))
    return 0


def _model_rows() -> list[dict[str, Any]]:
    return [
        {"name": entry.name, "billions": round(entry.shape.parameters / 1e9, 3), "tokenizer": entry.shape.tokenizer}
        for entry in catalogue()
    ]


def _card_rows() -> list[dict[str, Any]]:
    return [
        {"name": card.name, "memory_gib": card.memory_gib, "bandwidth_gbs": card.bandwidth_gbs, "kind": card.kind.value}
        for card in cards()
    ]


def _precision_rows() -> list[dict[str, Any]]:
    return [{"name": scheme.name, "bits": scheme.body.bits} for scheme in PRECISIONS.values()]


def _print_advice(args: argparse.Namespace) -> int:
    named = args.target or args.model
    chosen = [advise(situation, named) for situation in _situations(args, named)]
    if args.json:
        print(json.dumps({"advice": [_advice_json(advice) for advice in chosen]}))
        return 0
    for advice in chosen:
        _print_one_advice(advice)
    return 0


def _situations(args: argparse.Namespace, target: str | None) -> list[Situation]:
    """The one named; else the one the other options imply; else the one the user's answers lead to; else all."""
    if args.advise != "ask":
        return [Situation(args.advise)]
    if target is not None or args.card or args.gpus > 1:
        return [situation_of(_card(args), args.gpus, target)]
    if sys.stdin.isatty() and not args.json:
        return [_walk(first_question())]
    return list(Situation)


def _walk(question: Question | Situation) -> Situation:
    while isinstance(question, Question):
        answers = list(question.answers)
        print(question.text)
        for number, answer in enumerate(answers, 1):
            print(f"  {number}  {answer}")
        reply = input("> ").strip()
        if reply.isdecimal() and 1 <= int(reply) <= len(answers):
            question = question.answers[answers[int(reply) - 1]]
        else:
            print(f"Please type a number from 1 to {len(answers)}.")
    return question


def _advice_json(advice: Advice) -> dict[str, Any]:
    commands = list(advice.commands)
    return {"situation": advice.situation.value, "title": advice.title, "why": advice.why, "commands": commands}


def _print_one_advice(advice: Advice) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"[bold]{advice.situation.value}[/bold]: {advice.title}")
    console.print(f"{advice.why}", style="dim")
    for command in advice.commands:
        console.print(f"  {command}", soft_wrap=True, markup=False, style="bold")
    console.print()
