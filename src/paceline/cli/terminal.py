"""What a person sees: output as it is generated, accepted draft tokens in green, one line of figures."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from paceline.core.stats import SpecStats
    from paceline.core.types import RequestOutput

GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
COLOR_CHOICES = ("auto", "always", "never")


def prepare_streams() -> None:
    """A stream that is closed reads as empty and drops what is written; what stdout cannot encode becomes `?`."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  # for the rest of the process
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def drop_unwritable_output() -> None:
    """Forget what stdout cannot take any more: Python would complain once more when it flushes at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def add_color_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--color", nargs="?", choices=COLOR_CHOICES, const="always", default="auto",
        help="show accepted draft tokens in green; default: auto, on a terminal"
    )


def wants_color(choice: str, stream: TextIO | None = None) -> bool:
    """auto: on a terminal, unless NO_COLOR is set."""
    if choice != "auto":
        return choice == "always"
    return (stream or sys.stdout).isatty() and not os.environ.get("NO_COLOR")


def show(outputs: Iterable[RequestOutput], *, color: bool) -> list[RequestOutput]:
    """Print outputs as they come and return them all; the last one carries the stats."""
    return list(shown(outputs, color=color))


def shown(outputs: Iterable[RequestOutput], *, color: bool) -> Iterator[RequestOutput]:
    """Print each output, then yield it; ends the line after the last one."""
    for output in outputs:
        green = color and output.from_draft and output.text
        print(f"{GREEN}{output.text}{RESET}" if green else output.text, end="", flush=True)
        yield output
    print()


def figures(stats: SpecStats) -> str:
    """The line of figures under an output."""
    line = f"{stats.new_tokens} tokens in {stats.seconds:.2f} s, {stats.tokens_per_second:.1f} tokens/s"
    if stats.drafted:
        line += f"; {stats.tokens_per_step:.2f} tokens a step, {stats.acceptance_rate:.0%} of draft tokens accepted"
    return line


def note(text: str) -> None:
    """A remark beside the output: on stderr, so that a pipe carries the output alone."""
    print(f"{DIM}{text}{RESET}" if wants_color("auto", sys.stderr) else text, file=sys.stderr)


def enable_line_editing() -> None:
    """Arrow keys edit a line and recall earlier ones; lines are kept for this process only. Windows does it itself."""
    try:
        import readline  # noqa: F401  # input() uses it once it is imported
    except ImportError:
        return


def quiet_transformers() -> None:
    """No progress bars and no warnings from transformers: what goes wrong reaches the user as a PacelineError.

    It is not imported for that: where it never is, a command starts seconds earlier.
    """
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        return
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # transformers reads it through huggingface_hub
    if "huggingface_hub" in sys.modules:  # which has read it already
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
