"""See it work: one prompt decoded plainly and speculatively, and the figures.

    paceline demo
    paceline demo "Write a haiku, then repeat it." --method ngram -k 4
    paceline demo --target BIG --draft SMALL

Both runs use the same model and the same code; the second one guesses. On a CPU the default model runs in int8, where
guessing pays; --dtype fp32 shows what happens where it does not. DraftOutput that stood are green. Decoding is
greedy, so the two texts must be the same, token for token: the last row says whether they are. Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.cli.arguments import add_model_arguments, decoder_options, open_decoder
from paceline.cli.terminal import add_color_argument, note, show, wants_color
from paceline.hub import DEFAULT

if TYPE_CHECKING:
    from paceline.config import DecoderOptions
    from paceline.core.stats import SpecStats
    from paceline.decoder import SpeculativeDecoder

PROMPT = "Write a Python class Stack with push, pop, peek and is_empty, each with a docstring."
NEW_TOKENS = 128
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Run:
    """One of the two texts."""

    token_ids: list[int]
    stats: SpecStats


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", default=PROMPT, metavar="PROMPT", help="default: a small programming task")
    parser.add_argument("--max-new-tokens", type=int, default=NEW_TOKENS, metavar="N")
    parser.add_argument("--json", action="store_true", help="end with one JSON document on one line")
    add_color_argument(parser)
    add_model_arguments(parser)


def main(args: argparse.Namespace) -> int:
    options = demo_options(args)
    note(f"loading {args.target}{f' in {options.dtype}' if options.dtype else ''} …")
    decoder = open_decoder(options)
    # Neither run shall pay for what a process does only once.
    decoder.generate(args.prompt, max_new_tokens=WARM_UP_TOKENS)
    print("\nplain\n-----")
    plain = _run(decoder, args, 0)
    print(f"\n{options.method}\n{'-' * len(str(options.method))}")
    guessed = _run(decoder, args, None)
    same = plain.token_ids == guessed.token_ids
    _print_table(plain, guessed, str(options.method), same)
    if args.json:
        print(json.dumps(_as_json(plain, guessed, str(options.method), same)))
    return 0 if same else 1


def demo_options(args: argparse.Namespace) -> DecoderOptions:
    """On a CPU in int8 unless told: there a pass over eight tokens costs little more than one over a single token."""
    from paceline.build import chosen_device

    options = decoder_options(args, otherwise="auto", advised=False)
    if options.dtype is None and chosen_device(options.device) == "cpu" and options.target == DEFAULT:
        return replace(options, dtype="int8")
    return options


def _run(decoder: SpeculativeDecoder, args: argparse.Namespace, num_draft_tokens: int | None) -> Run:
    messages = [{"role": "user", "content": args.prompt}]
    asked = decoder.stream(messages, max_new_tokens=args.max_new_tokens, num_draft_tokens=num_draft_tokens)
    outputs = show(asked, color=wants_color(args.color))
    stats = outputs[-1].stats
    assert stats is not None, "the last piece carries the tally"
    return Run([token for output in outputs for token in output.token_ids], stats)


def _print_table(plain: Run, guessed: Run, method: str, same: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for heading in ("", "tokens", "tokens/s", "speed-up", "accepted", "τ (tokens a pass)"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row("plain", *_cells(plain.stats, 1.0))
    table.add_row(method, *_cells(guessed.stats, _speed_up(plain, guessed)))
    console = Console()
    console.print()
    console.print(table)
    console.print(f"identical: {'yes' if same else 'no'}")


def _cells(stats: SpecStats, speed_up: float) -> list[str]:
    accepted = f"{stats.accepted} of {stats.drafted} ({stats.acceptance_rate:.0%})" if stats.drafted else "-"
    rate = f"{stats.tokens_per_second:.1f}"
    return [str(stats.new_tokens), rate, f"{speed_up:.2f}x", accepted, f"{stats.tokens_per_step:.2f}"]


def _speed_up(plain: Run, guessed: Run) -> float:
    before = plain.stats.tokens_per_second
    return guessed.stats.tokens_per_second / before if before else 0.0


def _as_json(plain: Run, guessed: Run, method: str, same: bool) -> dict[str, Any]:
    return {
        "method": method,
        "identical": same,
        "speed_up": _speed_up(plain, guessed) if same else None,  # of two different texts there is none
        "plain": plain.stats.as_dict(),
        "speculative": guessed.stats.as_dict(),
    }
