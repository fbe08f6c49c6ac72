"""Fields of a request that its schema does not have.

Clients send what other servers know: most of it changes nothing, such as the null fields of an earlier answer that is
sent back. It is ignored, and named in the log and in a response header. A field that would change the output is
refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from paceline.serve.errors import ApiError

LOG = logging.getLogger("paceline.serve")
HEADER = "x-paceline-ignored"
MAX_NAMES, MAX_NAME_LENGTH = 16, 64  # in the header
MAX_LOGGED = 64  # names of a process: clients choose them

NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
# Fields that would change the output, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "tools", "functions", "function_call", "tool_calls", "tool_call_id", "audio", "web_search_options",
            "reasoning_effort", "reasoning", "thinking", "thinking_budget",
            "chat_template", "chat_template_kwargs", "documents", "continue_final_message",
            "guided_whitespace_pattern", "logits_processors", "use_beam_search", "echo", "early_stopping",
            "no_repeat_ngram_size", "mirostat", "xtc_probability", "dry_multiplier",
            "dynatemp_range", "top_n_sigma", "samplers", "lora", "add_special_tokens", "prompt_embeds",
        ),
        NOTHING,
    ),
    "tool_choice": (*NOTHING, "none", "auto"),
    "modalities": (*NOTHING, ["text"]),
    "verbosity": (*NOTHING, "medium"),
    "add_generation_prompt": (None, True),
    "detokenize": (None, True),
    "length_penalty": (*NOTHING, 1),
    "best_of": (*NOTHING, 1),
    "num_beams": (*NOTHING, 1),
    "repeat_penalty": (*NOTHING, 1),
    "typical_p": (*NOTHING, 1),
    "tfs_z": (*NOTHING, 1),
}  # fmt: skip

UNDERSTOOD = ("tools", "tool_choice", "modalities", "verbosity")  # asking for nothing, they are not even mentioned


class ExtraFields:
    """Decides over the extra fields of requests. strict: every one of them is refused."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def ignored(self, body: BaseModel) -> list[str]:
        """Names of the extra fields, as `messages.audio`. Raises ApiError 400 for one that cannot be ignored."""
        names: dict[str, None] = {}
        for path, value in extra_fields(body):
            if path in UNDERSTOOD and value in UNSUPPORTED[path]:
                continue
            self._check(path, value)
            names[path] = None
        self._log(names)
        return list(names)

    def _check(self, path: str, value: Any) -> None:
        name = path.rpartition(".")[2]
        if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
            message = f"{path} would change the output, and this server does not support it; leave it out"
            raise ApiError(400, message, param=path, code="unsupported_parameter")
        if self._strict:
            message = f"there is no field {path[:MAX_NAME_LENGTH]}; the server is strict about unknown fields"
            raise ApiError(400, message, param=path, code="unknown_parameter")

    def _log(self, names: Iterable[str]) -> None:
        """One line for each name and process."""
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                LOG.warning("ignored a field of a request", extra={"fields": {"field": printable(name)}})


def extra_fields(body: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and values of the fields that the schema does not have, at every level that allows them."""
    for name, value in (body.model_extra or {}).items():
        yield f"{prefix}{name}", value
    for name in body.model_fields_set & set(type(body).model_fields):
        value = getattr(body, name)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, BaseModel):
                yield from extra_fields(part, f"{prefix}{name}.")


def printable(name: str) -> str:
    """A name that a client chose, as it may stand in a header or in a log."""
    return re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:MAX_NAME_LENGTH] or "?"


def add_header(response: Response, ignored: list[str]) -> Response:
    """The response with the names of the ignored fields."""
    if ignored:
        names = [printable(name) for name in ignored[:MAX_NAMES]] + ["..."] * (len(ignored) > MAX_NAMES)
        response.headers[HEADER] = ", ".join(names)
    return response
