"""What every engine checks of a request: a field that it cannot obey is refused, never dropped without a word."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import Any

from paceline.config import as_int
from paceline.core.types import ModelInfo, Request
from paceline.errors import ContextLengthExceeded, OptionError, PromptError

PERMISSIONS = ("whole",)  # an engine may make use of these; the output is the same where it does not


def refuse_fields(request: Request, taken: Collection[str], engine: str) -> None:
    """Raise OptionError for a field that asks for something and is not among the names of those that are taken."""
    for field in fields(Request):
        if field.default is MISSING or field.name in taken or field.name in PERMISSIONS:
            continue
        value = getattr(request, field.name)
        if value != field.default and value not in ([], ()):
            raise OptionError(f"{engine} takes no {field.name}; leave it out, or use the engine local")
    span = request.reasoning
    if span is not None and span.max_tokens is not None:
        raise OptionError(f"{engine} has no thinking budget; leave it out, or use the engine local")
    if span is not None and span.is_open and request.structured_output is not None:
        raise OptionError(f"{engine} keeps no grammar after reasoning; switch reasoning off, or use the engine local")


def check_prompt(prompt: list[int], info: ModelInfo, max_seq_len: int) -> None:
    """Raise PromptError or ContextLengthExceeded for a prompt that the model cannot continue."""
    length = len(prompt)
    if not length:
        raise PromptError("the prompt is empty; there is nothing to continue")
    outside = next((token for token in prompt if not 0 <= token < info.vocab_size), None)
    if outside is not None:
        raise PromptError(f"token {outside} of the prompt is out of vocabulary: ids are below {info.vocab_size}")
    if length >= max_seq_len:
        raise ContextLengthExceeded(f"the prompt has {length} tokens; {info.name} reads at most {max_seq_len - 1}")


def token_ids(name: str, value: Any, vocab_size: int) -> frozenset[int]:
    """Token ids of the vocabulary. Raises OptionError."""
    numbers = map(as_int, value) if isinstance(value, list | tuple | set | frozenset) else [None]
    tokens = [-1 if number is None else number for number in numbers]
    if any(not 0 <= token < vocab_size for token in tokens):
        raise OptionError(f"{name} is a list of token ids from 0 to {vocab_size - 1}, not {value!r}")
    return frozenset(tokens)


def text_list(name: str, value: Any) -> tuple[str, ...]:
    """One string or several, as a tuple."""
    strings = (value,) if isinstance(value, str) else value or ()
    if not isinstance(strings, list | tuple) or any(not isinstance(string, str) or not string for string in strings):
        raise OptionError(f"{name} is a string or a list of strings, none of them empty; not {value!r}")
    return tuple(strings)
