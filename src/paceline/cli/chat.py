"""Chat with a model over several turns.

    paceline chat                                          the default model
    paceline chat BIG --draft-model SMALL                  drafts from a smaller model
    paceline chat --system "Answer in one line."           with a system message
    paceline chat --temperature 0.7 --seed 1 --color       sampled; accepted draft tokens in green

A turn reads only what is new: the prefix cache holds the conversation. /new starts over, /exit or Ctrl-D ends, Ctrl-C
stops an answer. Where standard input is not a terminal, each line of it is a turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paceline.cli.flags import (
    add_config_flags,
    add_sampling_flags,
    config_from_args,
    open_decoder,
    sampling_from_args,
)
from paceline.cli.terminal import add_color_argument, figures, note, shown, wants_color
from paceline.config import AUTO

if TYPE_CHECKING:
    from paceline.core.types import RequestOutput
    from paceline.decoder import SpeculativeDecoder

Message = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    add_color_argument(parser)
    add_config_flags(parser, positional_model=True)
    add_sampling_flags(parser)


def main(args: argparse.Namespace) -> int:
    config, sampling = config_from_args(args, default_method=AUTO), sampling_from_args(args)
    start: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(start)
    color = wants_color(args.color)
    with open_decoder(config) as decoder:
        for line in read_turns():
            if line == "/new":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": line})
            text = answer(decoder, messages, sampling, color=color)
            messages.append({"role": "assistant", "content": text})
    return 0


def read_turns() -> Iterator[str]:
    """Lines of the user, until /exit or the end of standard input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line:
            yield line


def answer(decoder: SpeculativeDecoder, messages: list[Message], sampling: dict[str, Any], *, color: bool) -> str:
    """Print one answer as it is generated and return it. After Ctrl-C it is what was generated until then."""
    outputs: list[RequestOutput] = []
    try:
        for output in shown(decoder.stream(messages, **sampling), color=color):
            outputs.append(output)
        if outputs and outputs[-1].stats is not None:
            note(figures(outputs[-1].stats))
    except KeyboardInterrupt:
        print()
    return "".join(output.text for output in outputs)
