"""Ids <-> characters: prompts in, streamed text out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ModelError, PromptError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Chat messages with all that a chat template takes.

    tools, documents        in OpenAI's and in Hugging Face's form
    template                used instead of the model's own
    variables               what the template reads beside that, such as enable_thinking
    add_generation_prompt   end where the answer begins
    continue_final_message  end inside the last message, so that the answer continues it
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    template: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


Prompt = str | list[Message] | list[int] | ChatPrompt
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken", "tekken*")
UNFINISHED = "�"  # what a tokenizer returns for a character whose last byte is missing


def load_tokenizer(folder: Path, name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model directory, read by transformers. hub/resolved_tokenizer.py saves importing it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
            reason = f"{folder} has none of its files, tokenizer.json, tokenizer.model, vocab.json or vocab.txt"
        raise ModelError(f"{name} has no usable tokenizer: {reason}") from error


class Tokenizer:
    """A Hugging Face tokenizer with the checks and conversions that decoding needs."""

    def __init__(self, hf_tokenizer: Any, kept: Path | None = None) -> None:
        """kept: where a later start finds it, which its files decide (hub/resolved.py); None: it was not read here."""
        self.hf_tokenizer, self.kept = hf_tokenizer, kept

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.hf_tokenizer, "chat_template", None))

    @property
    def chat_template(self) -> str:
        """The text of the model's chat template, of all of them where it has several; empty: it has none."""
        template = getattr(self.hf_tokenizer, "chat_template", None) or ""
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a string as it is, or of chat messages through the model's template."""
        if isinstance(prompt, str):
            ids = self._string_ids(prompt)
        elif isinstance(prompt, list) and prompt and all(isinstance(part, dict) for part in prompt):
            ids = self._chat_ids(ChatPrompt(prompt))  # type: ignore[arg-type]
        elif isinstance(prompt, ChatPrompt) and prompt.messages:
            ids = self._chat_ids(prompt)
        elif isinstance(prompt, list) and prompt and all(isinstance(part, int) for part in prompt):
            ids = [int(token) for token in prompt]  # type: ignore[arg-type]
        else:
            raise PromptError("a prompt is a string, a list of chat messages or a list of token ids, and not empty")
        if not ids:
            raise PromptError("the prompt is empty; there is nothing to continue")
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Token ids of text in the middle of a sequence: no token that marks a beginning."""
        return [int(token) for token in self.hf_tokenizer(text, add_special_tokens=False).input_ids]

    def _string_ids(self, prompt: str) -> list[int]:
        if not prompt:
            raise PromptError("the prompt is empty; there is nothing to continue")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise PromptError("the prompt holds half a character (a lone surrogate); no tokenizer reads it") from error
        return [int(token) for token in self.hf_tokenizer(prompt).input_ids]

    def _chat_ids(self, prompt: ChatPrompt) -> list[int]:
        if not self.has_chat_template and prompt.template is None:
            raise PromptError("this model has no chat template; give the prompt as a string")
        if not all("role" in message for message in prompt.messages):
            raise PromptError('a chat message is a dictionary such as {"role": "user", "content": "…"}')
        try:
            encoding = self.hf_tokenizer.apply_chat_template(
                prompt.messages,
                tools=prompt.tools,
                documents=prompt.documents,
                chat_template=prompt.template,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                return_dict=True,
                **prompt.variables,
            )
        except Exception as error:  # a template is a program of its own and raises anything
            raise PromptError(f"the model's chat template does not take these messages: {error}") from error
        return [int(token) for token in encoding["input_ids"]]

    def decode(self, ids: list[int]) -> str:
        """Characters without the model's special tokens."""
        return str(self.hf_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def decode_with_special(self, ids: list[int]) -> str:
        """Characters, those of special tokens included."""
        return str(self.hf_tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def stream(
        self, stop_strings: tuple[str, ...] = (), *, skip_special_tokens: bool = True, include_stop: bool = False
    ) -> StreamDetokenizer:
        decode = self.decode if skip_special_tokens else self.decode_with_special
        return StreamDetokenizer(decode, stop_strings, include_stop=include_stop)


class StreamDetokenizer:
    """Turns tokens into characters as they come: no half characters, and nothing of a stop string.

    include_stop: the stop string itself is returned too
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop_strings: tuple[str, ...] = (), *, include_stop: bool = False
    ) -> None:
        self._decode, self._stop_strings, self._include_stop = decode, stop_strings, include_stop
        self._ids: list[int] = []
        self._context = self._emitted = 0  # decoding starts at _context; all before _emitted has been returned
        self._held = ""  # characters that may begin a stop string
        self.stopped = False

    def feed(self, ids: list[int]) -> str:
        """Take tokens; return the characters that can no longer change."""
        self._ids += ids
        before = self._decode(self._ids[self._context : self._emitted])
        after = self._decode(self._ids[self._context :])
        if after.endswith(UNFINISHED):
            return ""
        # Decoding starts a few tokens back: some tokenizers put spaces between tokens that depend on the one before.
        # Hidden tokens are no such beginning: what follows them would be decoded as the first of its text.
        if len(after) > len(before):
            self._context = self._emitted
        self._emitted = len(self._ids)
        return self._release(after[len(before) :])

    def flush(self) -> str:
        """Return what was held back, once the sequence is finished."""
        before = self._decode(self._ids[self._context : self._emitted])
        rest = self._decode(self._ids[self._context :])[len(before) :]
        self._context = self._emitted = len(self._ids)
        released = self._release(rest)
        held, self._held = self._held, ""
        return released + held

    def _release(self, characters: str) -> str:
        if self.stopped:
            return ""
        characters = self._held + characters
        first = min((stop for stop in self._stop_strings if stop in characters), key=characters.find, default=None)
        if first is not None:
            self.stopped, self._held = True, ""
            return characters[: characters.find(first) + (len(first) if self._include_stop else 0)]
        overlap = max((_overlap(characters, stop) for stop in self._stop_strings), default=0)
        self._held = characters[len(characters) - overlap :]
        return characters[: len(characters) - overlap]


def _overlap(characters: str, stop: str) -> int:
    """Length of the longest end of `characters` that begins `stop`."""
    for size in range(min(len(stop) - 1, len(characters)), 0, -1):
        if characters.endswith(stop[:size]):
            return size
    return 0
