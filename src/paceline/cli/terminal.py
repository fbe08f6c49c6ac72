"""What a person sees: pieces as they come, guesses that stood in colour, one line of figures."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from paceline.core.stats import SpecStats
    from paceline.core.types import RequestOutput

GUESSED, DIM, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
WHEN = ("auto", "always", "never")


def add_color_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--color", nargs="?", choices=WHEN, const="always", default="auto", help="show guesses that stood in green"
    )


def wants_color(when: str, stream: TextIO | None = None) -> bool:
    """auto: on a terminal, unless NO_COLOR says otherwise."""
    if when != "auto":
        return when == "always"
    return (stream or sys.stdout).isatty() and not os.environ.get("NO_COLOR")


def show(outputs: Iterable[RequestOutput], *, color: bool) -> list[RequestOutput]:
    """Print pieces as they are written; returns them all, the last one with the tally."""
    shown: list[RequestOutput] = []
    for output in outputs:
        shown.append(output)
        text = f"{GUESSED}{output.text}{PLAIN}" if color and output.from_draft and output.text else output.text
        print(text, end="", flush=True)
    print()
    return shown


def figures(stats: SpecStats) -> str:
    """The one line under a text."""
    line = f"{stats.new_tokens} tokens in {stats.seconds:.2f} s, {stats.tokens_per_second:.1f} tokens/s"
    if stats.drafted:
        line += f"; {stats.tokens_per_step:.2f} tokens a pass, {stats.acceptance_rate:.0%} of guesses accepted"
    return line


def note(text: str) -> None:
    """A remark beside the output: on stderr, so that pipes carry the text alone."""
    print(f"{DIM}{text}{PLAIN}" if wants_color("auto", sys.stderr) else text, file=sys.stderr)
