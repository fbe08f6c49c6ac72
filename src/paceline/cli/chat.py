"""Chat with a model over several turns.

    paceline chat                                          the default model
    paceline chat BIG --draft-model SMALL                  drafts from a smaller model
    paceline chat --system "Answer in one line."           with a system message
    paceline chat --temperature 0.7 --seed 1 --color       sampled; accepted draft tokens in green

A turn reads only what is new: the prefix cache holds the conversation. When the context is full, the oldest turns are
forgotten; the system message is not. /help lists the commands; the arrow keys edit a line and recall earlier ones.
Ctrl-C stops an answer, Ctrl-D ends. Where standard input is not a terminal, each line of it is a turn.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.cli import interrupt
from paceline.cli.flags import (
    add_config_flags,
    add_sampling_flags,
    config_from_args,
    open_decoder,
    refuse_prediction,
    sampling_from_args,
)
from paceline.cli.generation_config import MODEL, add_generation_config_flag, with_defaults
from paceline.cli.terminal import add_color_argument, enable_line_editing, figures, note, shown, wants_color
from paceline.config import AUTO
from paceline.errors import ContextLengthExceeded, OutOfMemory, PromptError, StepFailed

if TYPE_CHECKING:
    from paceline.core.types import RequestOutput
    from paceline.decoder import SpeculativeDecoder

Message = dict[str, Any]
COMMANDS = {
    "/help": "list the commands",
    "/clear": "start over; the system message stays",
    "/exit": "end, as Ctrl-D does",
}
ALIASES = {"/new": "/clear", "/quit": "/exit", "/?": "/help"}
FAILED = 2  # exit status where a line of standard input got no answer


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    add_color_argument(parser)
    add_config_flags(parser, positional_model=True, default_method=AUTO)
    add_sampling_flags(parser)
    add_generation_config_flag(parser, default=MODEL)


def main(args: argparse.Namespace) -> int:
    config = refuse_prediction(config_from_args(args, default_method=AUTO))
    settings = sampling_from_args(args)
    with open_decoder(config) as decoder:
        if not decoder.tokenizer.has_chat_template:
            raise PromptError(f"{decoder.info.name} has no chat template; `paceline generate` continues a prompt")
        settings = with_defaults(settings, args.generation_config, decoder.generation_defaults)
        session = ChatSession(decoder, settings, Conversation(args.system), wants_color(args.color))
        complete = session.run()
    return 0 if complete or sys.stdin.isatty() else FAILED


@dataclass(slots=True)
class Conversation:
    """The messages that the model reads: the system message, if any, then turns, the oldest first."""

    system: str | None
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        start: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return start + self.turns

    def add(self, role: str, content: str) -> None:
        self.turns.append({"role": role, "content": content})

    def drop_oldest(self) -> bool:
        """Forget the oldest question and its answer. False: there is only the last question."""
        if len(self.turns) < 3:
            return False
        del self.turns[:2]
        return True


@dataclass(slots=True)
class ChatSession:
    """A conversation with a decoder, line by line."""

    decoder: SpeculativeDecoder
    settings: dict[str, Any]
    conversation: Conversation
    color: bool = False

    def run(self) -> bool:
        """Answer every line until /exit or the end of the input. False: some line got no answer."""
        complete = True
        for line in read_lines():
            command = ALIASES.get(line, line)
            if command == "/exit":
                break
            if command == "/clear":
                self.conversation.turns.clear()
            elif re.fullmatch(r"/\w*", command):
                show_help(command)
            else:
                complete &= self.turn(line)
        return complete

    def turn(self, question: str) -> bool:
        """Ask and show the answer. False: there is none, and the question is not part of the conversation."""
        text = ""
        self.conversation.add("user", question)
        try:
            text = self._answer_in_context()
        except KeyboardInterrupt:
            print()
        except (PromptError, OutOfMemory, StepFailed) as error:
            note(f"paceline: error: {error}")
        if text:
            self.conversation.add("assistant", text)
        else:
            self.conversation.turns.pop()
        return bool(text)

    def _answer_in_context(self) -> str:
        """The answer after as many of the last turns as leave space for it."""
        num_dropped = self._drop_until_it_fits()
        while True:
            try:
                if num_dropped:
                    note(f"the context is full: forgot the oldest {num_dropped} of the turns")
                return answer(self.decoder, self.conversation.messages, self.settings, color=self.color)
            except ContextLengthExceeded:  # a KV cache that is smaller than the context
                if not self.conversation.drop_oldest():
                    raise
                num_dropped = 1

    def _drop_until_it_fits(self) -> int:
        """Forget turns until question and answer fit the context; a long answer may take half of it."""
        limit = self.context_length
        space = min(self.settings["max_new_tokens"], limit // 2)
        num_dropped = 0
        while self._num_tokens() + space > limit and self.conversation.drop_oldest():
            num_dropped += 1
        return num_dropped

    @property
    def context_length(self) -> int:
        longest = self.decoder.info.max_seq_len
        return min(longest, self.decoder.config.model.max_model_len or longest)

    def _num_tokens(self) -> int:
        return len(self.decoder.tokenizer.encode(self.conversation.messages))


def read_lines() -> Iterator[str]:
    """Lines of the user that are not empty, until the end of standard input."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        enable_line_editing()
        note("/help lists the commands")
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            print(end="\n" if is_terminal else "")
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            interrupt.answered()
            note("\n/exit or Ctrl-D ends")
            continue
        if line:
            yield line


def show_help(command: str) -> None:
    """List the commands, and say first if this one does not exist."""
    if command not in COMMANDS:
        note(f"there is no command {command}")
    for name, meaning in COMMANDS.items():
        note(f"{name:<8}{meaning}")


def answer(decoder: SpeculativeDecoder, messages: list[Message], settings: dict[str, Any], *, color: bool) -> str:
    """Print one answer as it is generated and return it. After Ctrl-C it is what was generated until then."""
    outputs: list[RequestOutput] = []
    interrupt.answered()
    try:
        for output in shown(decoder.stream(messages, **settings), color=color):
            outputs.append(output)
            interrupt.check()  # one that came inside a callback was swallowed there
        if outputs and outputs[-1].stats is not None:
            note(figures(outputs[-1].stats) + cut_note(outputs, settings["max_new_tokens"]))
    except KeyboardInterrupt:
        interrupt.answered()
        print()
    return "".join(output.text for output in outputs)


def cut_note(outputs: list[RequestOutput], max_new_tokens: int) -> str:
    """What ended the answer, where the model did not."""
    if outputs[-1].finish_reason != "length":
        return ""
    num_tokens = sum(len(output.token_ids) for output in outputs)
    return "; cut by --max-new-tokens" if num_tokens >= max_new_tokens else "; cut: the context is full"
