"""Write the continuation of a prompt.

    paceline generate "The three laws of motion are"              plain decoding of the default model
    paceline generate --chat "Explain attention." --method ngram  as a chat message; guesses from the text itself
    paceline generate --file notes.txt --target BIG --draft SMALL guesses from a smaller model
    cat prompt.txt | paceline generate -k 6 --method ngram --json

The prompt is an argument, --file PATH or standard input, and is continued as it stands; with --chat it goes through the
model's chat template. With --json the last line on stdout is one JSON document with the same fields for every method:
text, token_ids, new_tokens, seconds, tokens_per_second, steps, drafted, accepted, acceptance_rate, tokens_per_step,
acceptance_by_position, method, num_draft_tokens, finish_reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
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
from paceline.errors import PromptError

if TYPE_CHECKING:
    from paceline.decoder import Result, SpeculativeDecoder


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="what to continue; - or nothing: standard input")
    parser.add_argument("--file", type=Path, metavar="PATH", help="read the prompt from a file")
    parser.add_argument("--chat", action="store_true", help="send the prompt through the model's chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the text")
    add_color_argument(parser)
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def main(args: argparse.Namespace) -> int:
    options = decoder_options(args)
    check_settings(args)
    prompt = read_prompt(args.prompt, args.file)
    decoder = open_decoder(options)
    asked = [{"role": "user", "content": prompt}] if args.chat else prompt
    if args.json:
        print(json.dumps(as_json(decoder.generate(asked, **settings(args)), decoder)))
        return 0
    outputs = show(decoder.stream(asked, **settings(args)), color=wants_color(args.color))
    stats = outputs[-1].stats
    if stats is not None:
        note(figures(stats))
    return 0


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from wherever it was given. Raises PromptError if it was not given, or twice, or is empty."""
    if prompt is not None and file is not None:
        raise PromptError("give the prompt as an argument or with --file, not both")
    if file is not None:
        text = _read(file)
    elif prompt is None or prompt == "-":
        if sys.stdin.isatty():
            raise PromptError("no prompt: give it as an argument, with --file, or on standard input")
        text = sys.stdin.read()
    else:
        text = prompt
    if not text.strip():
        raise PromptError("the prompt is empty; there is nothing to continue")
    return text


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{file} is not a UTF-8 text: {error}") from error
    except OSError as error:
        raise PromptError(f"{file} cannot be read: {error.strerror}") from error


def as_json(result: Result, decoder: SpeculativeDecoder) -> dict[str, Any]:
    """The fields of the JSON document."""
    method = decoder.options.method
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        **result.stats.as_dict(),
        "method": method,
        "num_draft_tokens": 0 if method == "none" else decoder.options.num_draft_tokens,
        "finish_reason": result.finish_reason,
    }
