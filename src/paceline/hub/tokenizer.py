"""Ids <-> characters: prompts in, streamed text out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import ModelError, PromptError

Message = dict[str, Any]
Prompt = str | list[Message] | list[int]
UNFINISHED = "�"  # what a tokenizer shows for a character whose last byte is still to come


def load_tokenizer(folder: Path, name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model directory."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{name} has no usable tokenizer: {str(error).splitlines()[0]}") from error


class Tokenizer:
    """A tokenizer, with what decoding needs around it."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self.hf_tokenizer = hf_tokenizer

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text as it is, or of chat messages through the model's template."""
        if isinstance(prompt, str):
            ids = self._text_ids(prompt)
        elif isinstance(prompt, list) and prompt and all(isinstance(part, dict) for part in prompt):
            ids = self._chat_ids(prompt)  # type: ignore[arg-type]
        elif isinstance(prompt, list) and prompt and all(isinstance(part, int) for part in prompt):
            ids = [int(token) for token in prompt]  # type: ignore[arg-type]
        else:
            raise PromptError("a prompt is a text, a list of chat messages or a list of token ids, and not empty")
        if not ids:
            raise PromptError("the prompt is empty; there is nothing to continue")
        return ids

    def _text_ids(self, prompt: str) -> list[int]:
        if not prompt:
            raise PromptError("the prompt is empty; there is nothing to continue")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise PromptError("the prompt holds half a character (a lone surrogate); no tokenizer reads it") from error
        return [int(token) for token in self.hf_tokenizer(prompt).input_ids]

    def _chat_ids(self, messages: list[Message]) -> list[int]:
        if not getattr(self.hf_tokenizer, "chat_template", None):
            raise PromptError("this model has no chat template; give the prompt as a text")
        if not all("role" in message for message in messages):
            raise PromptError('a chat message is a dictionary such as {"role": "user", "content": "…"}')
        try:
            output = self.hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except Exception as error:  # templates are programs of their own and raise what they like
            raise PromptError(f"the model's chat template does not take these messages: {error}") from error
        return [int(token) for token in output["input_ids"]]

    def decode(self, ids: list[int]) -> str:
        """Characters without the model's special tokens."""
        return str(self.hf_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def stream(self, stops: tuple[str, ...] = ()) -> StreamDetokenizer:
        return StreamDetokenizer(self, stops)


class StreamDetokenizer:
    """Turns tokens into characters as they come: no half characters, and nothing of a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._context = self._read = 0  # decode from _context on; all before _read has been shown
        self._held = ""  # might be the beginning of a stop string
        self.stopped = False

    def feed(self, ids: list[int]) -> str:
        """Take tokens; return the characters that are now certain."""
        self._ids += ids
        before = self._tokenizer.decode(self._ids[self._context : self._read])
        after = self._tokenizer.decode(self._ids[self._context :])
        if after.endswith(UNFINISHED):
            return ""
        # Decoding starts a few tokens back: some tokenizers put spaces between tokens that depend on the one before.
        self._context, self._read = self._read, len(self._ids)
        return self._release(after[len(before) :])

    def flush(self) -> str:
        """The text is over: show what was held back."""
        before = self._tokenizer.decode(self._ids[self._context : self._read])
        rest = self._tokenizer.decode(self._ids[self._context :])[len(before) :]
        self._context = self._read = len(self._ids)
        shown = self._release(rest)
        held, self._held = self._held, ""
        return shown + held

    def _release(self, fresh: str) -> str:
        if self.stopped:
            return ""
        text = self._held + fresh
        found = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
