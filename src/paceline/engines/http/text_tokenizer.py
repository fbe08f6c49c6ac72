"""A tokenizer for servers whose vocabulary is not known here: prompts travel as text, chat messages as messages.

Its ids are the bytes of the prompt, so that a Request holds ids as with every engine; the server reads the characters
and does the rest: tokens, chat template, special tokens.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.errors import PromptError
from paceline.hub.tokenizer import ChatPrompt, Message, Tokenizer

NUM_BYTES = 256
MESSAGES = "<|messages|>"  # in front of chat messages; the token after the bytes


class TextTokenizer(Tokenizer):
    """Bytes as token ids."""

    def __init__(self) -> None:
        super().__init__(_byte_level())

    @property
    def has_chat_template(self) -> bool:
        return True

    def _string_ids(self, prompt: str) -> list[int]:
        if not prompt:
            raise PromptError("the prompt is empty; there is nothing to continue")
        return _bytes(prompt)

    def _chat_ids(self, prompt: ChatPrompt) -> list[int]:
        messages = prompt.messages
        if not all("role" in message for message in messages):
            raise PromptError('a chat message is a dictionary such as {"role": "user", "content": "…"}')
        return [NUM_BYTES, *_bytes(json.dumps(messages, ensure_ascii=False))]


def messages_of(prompt: list[int]) -> list[Message] | None:
    """The chat messages of a prompt, or None for one that is text."""
    return json.loads(text_of(prompt[1:])) if prompt[:1] == [NUM_BYTES] else None


def text_of(prompt: list[int]) -> str:
    return bytes(prompt).decode("utf-8", "replace")


def _bytes(text: str) -> list[int]:
    try:
        return list(text.encode())
    except UnicodeEncodeError as error:
        raise PromptError("the prompt holds half a character (a lone surrogate); no tokenizer reads it") from error


def _byte_level() -> Any:
    """The same as a tokenizer of transformers."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    backend = Backend(models.BPE({character: byte for byte, character in bytes_to_unicode().items()}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=MESSAGES)
