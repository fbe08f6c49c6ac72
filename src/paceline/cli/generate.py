"""Generate the continuation of a prompt.

    paceline generate --chat "Explain attention."                    the default model, without speculation
    paceline generate "The three laws of motion are" --method ngram  no chat message; drafts from the sequence itself
    paceline generate --file notes.txt -m BIG --draft-model SMALL    drafts from a smaller model
    cat prompt.txt | paceline generate -k 6 --method ngram --json    the figures too, as JSON

The prompt is an argument, --file PATH or standard input. It is continued as it is; with --chat it goes through the
model's chat template, which is what a chat model expects. Decoding is greedy unless a flag says otherwise;
--generation-config model follows the model's authors. The last line on stdout with --json is one JSON document with the
same fields for every method: text, token_ids, new_tokens, seconds, tokens_per_second, steps, drafted, accepted,
acceptance_rate, tokens_per_step, acceptance_by_position, method, num_draft_tokens, finish_reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.flags import (
    add_config_flags,
    add_sampling_flags,
    config_from_args,
    open_decoder,
    refuse_prediction,
    sampling_from_args,
)
from paceline.cli.generation_config import NONE as NO_DEFAULTS
from paceline.cli.generation_config import add_generation_config_flag, with_defaults
from paceline.cli.terminal import add_color_argument, figures, note, show, wants_color
from paceline.config import NONE
from paceline.errors import PromptError

if TYPE_CHECKING:
    from paceline.decoder import Result, SpeculativeDecoder


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="what to continue; - or nothing: standard input")
    parser.add_argument("--prompt", dest="prompt_option", metavar="PROMPT", help="the same by name")
    parser.add_argument("--file", type=Path, metavar="PATH", help="read the prompt from a file")
    parser.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, default=None,
        help="send the prompt through the model's chat template; default: no, and a chat model's user is told"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the text")
    add_color_argument(parser)
    add_config_flags(parser, positional_model=False)
    add_sampling_flags(parser)
    add_generation_config_flag(parser, default=NO_DEFAULTS)


def main(args: argparse.Namespace) -> int:
    config, settings = refuse_prediction(config_from_args(args)), sampling_from_args(args)
    text = read_prompt(args.prompt, args.prompt_option, args.file)
    prompt: Any = [{"role": "user", "content": text}] if args.chat else text
    with open_decoder(config) as decoder:
        if args.chat is None and decoder.tokenizer.has_chat_template:
            note("the prompt is continued as it is; --chat asks the model, --no-chat hides this note")
        settings = with_defaults(settings, args.generation_config, decoder.generation_defaults)
        if args.json:
            print(json.dumps(as_json(decoder.generate(prompt, **settings), decoder)))
            return 0
        outputs = show(decoder.stream(prompt, **settings), color=wants_color(args.color))
        if outputs[-1].stats is not None:
            note(figures(outputs[-1].stats))
    return 0


def read_prompt(argument: str | None, option: str | None = None, file: Path | None = None) -> str:
    """The prompt from its one source. Raises PromptError where there is none, more than one, or an empty one."""
    if sum(source is not None for source in (argument, option, file)) > 1:
        raise PromptError("give the prompt as an argument, with --prompt or with --file: one of them")
    prompt = argument if option is None else option
    if file is not None:
        text = _read_file(file)
    elif prompt is None or (prompt == "-" and option is None):
        text = _read_stdin()
    else:
        text = prompt
    if not text.strip():
        raise PromptError("the prompt is empty; there is nothing to continue")
    return text


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise PromptError("no prompt: give it as an argument, with --file, or on standard input")
    return sys.stdin.read()


def _read_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{file} is not UTF-8: {error}") from error
    except OSError as error:
        raise PromptError(f"{file} cannot be read: {error.strerror}") from error


def as_json(result: Result, decoder: SpeculativeDecoder) -> dict[str, Any]:
    """The fields of the JSON document."""
    speculative = decoder.config.speculative
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        **result.stats.as_dict(),
        "method": speculative.method,
        "num_draft_tokens": 0 if speculative.method == NONE else speculative.num_draft_tokens,
        "finish_reason": result.finish_reason,
    }
