"""Talk with a model, several turns.

    paceline chat
    paceline chat --target BIG --draft SMALL --temperature 0.7

Each turn reads only what is new: the cache of the conversation is kept between turns. DraftOutput that stood are green.
/new starts over, /exit or Ctrl-D ends, Ctrl-C stops the answer being written. Where standard input is no terminal,
every line of it is a turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paceline.cli.arguments import (
    add_model_arguments,
    add_sampling_arguments,
    check_settings,
    decoder_options,
    open_decoder,
    settings,
)
from paceline.cli.terminal import add_color_argument, figures, note, show, wants_color

if TYPE_CHECKING:
    from paceline.decoder import SpeculativeDecoder

Message = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_color_argument(parser)
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def main(args: argparse.Namespace) -> int:
    options = decoder_options(args, otherwise="auto")
    check_settings(args)
    decoder = open_decoder(options)
    opening: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    for output in rope_cache():
        if output == "/new":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": output})
        messages.append({"role": "assistant", "content": answer(decoder, messages, args)})
    return 0


def rope_cache() -> Iterator[str]:
    """What the user says, turn by turn."""
    while True:
        try:
            output = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if output == "/exit":
            return
        if output:
            yield output


def answer(decoder: SpeculativeDecoder, messages: list[Message], args: argparse.Namespace) -> str:
    """Write one answer as it comes. Interrupted, what was written so far is the answer."""
    written: list[str] = []

    def remembered() -> Iterator[Any]:
        for output in decoder.stream(messages, keep_cache=True, **settings(args)):
            written.append(output.text)
            yield output

    try:
        outputs = show(remembered(), color=wants_color(args.color))
        if outputs and outputs[-1].stats is not None:
            note(figures(outputs[-1].stats))
    except KeyboardInterrupt:
        print()
    return "".join(written)
