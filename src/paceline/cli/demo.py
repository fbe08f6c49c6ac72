"""See it work: one prompt with and without speculation, and the figures.

    paceline demo                                                         the default model
    paceline demo "Write a haiku, then repeat it." --method ngram -k 4    a prompt of your own
    paceline demo -m BIG --draft-model SMALL                              drafts from a smaller model
    paceline demo --dtype fp32                                            where speculation may not pay

Both runs use the same model and the same code; the second one drafts. On a CPU the default model runs in int8, where
speculation pays. Accepted draft tokens are green. Decoding is greedy, so both outputs must be the same, token for
token: the last row says whether they are. Exit status 1 if they are not.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.cli.flags import add_config_flags, config_from_args, open_decoder
from paceline.cli.terminal import add_color_argument, note, show, wants_color
from paceline.config import AUTO, DEFAULT_MODEL, EngineConfig

if TYPE_CHECKING:
    from paceline.core.stats import SpecStats
    from paceline.decoder import SpeculativeDecoder

PROMPT = "Write a Python class Stack with push, pop, peek and is_empty, each with a docstring."
NEW_TOKENS = 128
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One of the two outputs."""

    token_ids: list[int]
    stats: SpecStats


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", default=PROMPT, metavar="PROMPT", help="default: a small programming task")
    parser.add_argument("--max-new-tokens", type=int, default=NEW_TOKENS, metavar="N", help=f"default: {NEW_TOKENS}")
    parser.add_argument("--json", action="store_true", help="end with one JSON document on one line")
    add_color_argument(parser)
    add_config_flags(parser, positional_model=False, skip=("prefix_cache_tokens",))


def main(args: argparse.Namespace) -> int:
    config = demo_config(args)
    method, dtype = str(config.speculative.method), config.model.dtype
    note(f"loading {args.model}{f' in {dtype}' if dtype else ''} …")
    with open_decoder(config) as decoder:
        # Neither run pays for what a process does only once.
        decoder.generate(args.prompt, max_new_tokens=WARM_UP_TOKENS)
        print("\nplain\n-----")
        plain = _run(decoder, args, 0)
        print(f"\n{method}\n{'-' * len(method)}")
        speculative = _run(decoder, args, None)
    same = plain.token_ids == speculative.token_ids
    _print_table(plain, speculative, method, same)
    if args.json:
        print(json.dumps(_as_json(plain, speculative, method, same)))
    return 0 if same else 1


def demo_config(args: argparse.Namespace) -> EngineConfig:
    """In int8 for the default model on a CPU: there a pass over eight tokens costs little more than one over one."""
    from paceline.device.properties import chosen_device

    # Without a prefix cache, or the second run would find the prompt of the first one already read.
    config = config_from_args(args, default_method=AUTO, advised=False, prefix_cache_tokens=0)
    model = config.model
    if model.dtype is None and model.model == DEFAULT_MODEL and chosen_device(model.device) == "cpu":
        return config.with_options(dtype="int8")
    return config


def _run(decoder: SpeculativeDecoder, args: argparse.Namespace, num_draft_tokens: int | None) -> DemoRun:
    """Generate and print; num_draft_tokens None: what the flags say."""
    messages = [{"role": "user", "content": args.prompt}]
    stream = decoder.stream(messages, max_new_tokens=args.max_new_tokens, num_draft_tokens=num_draft_tokens)
    outputs = show(stream, color=wants_color(args.color))
    stats = outputs[-1].stats
    assert stats is not None, "the last output carries the stats"
    return DemoRun([token for output in outputs for token in output.token_ids], stats)


def _print_table(plain: DemoRun, speculative: DemoRun, method: str, same: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for heading in ("", "tokens", "tokens/s", "speed-up", "accepted", "τ (tokens a step)"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row("plain", *_cells(plain.stats, 1.0))
    table.add_row(method, *_cells(speculative.stats, _speed_up(plain, speculative)))
    console = Console()
    console.print()
    console.print(table)
    console.print(f"identical: {'yes' if same else 'no'}")


def _cells(stats: SpecStats, speed_up: float) -> list[str]:
    accepted = f"{stats.accepted} of {stats.drafted} ({stats.acceptance_rate:.0%})" if stats.drafted else "-"
    rate = f"{stats.tokens_per_second:.1f}"
    return [str(stats.new_tokens), rate, f"{speed_up:.2f}x", accepted, f"{stats.tokens_per_step:.2f}"]


def _speed_up(plain: DemoRun, speculative: DemoRun) -> float:
    before = plain.stats.tokens_per_second
    return speculative.stats.tokens_per_second / before if before else 0.0


def _as_json(plain: DemoRun, speculative: DemoRun, method: str, same: bool) -> dict[str, Any]:
    return {
        "method": method,
        "identical": same,
        "speed_up": _speed_up(plain, speculative) if same else None,  # two different outputs have none
        "plain": plain.stats.as_dict(),
        "speculative": speculative.stats.as_dict(),
    }
