"""Which fields of a request an engine takes: one that it cannot obey is refused, never dropped without a word."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields

from paceline.core.types import Request
from paceline.errors import OptionError


def refuse_fields(request: Request, taken: Collection[str], engine: str) -> None:
    """Raise OptionError for a field that asks for something and is not among the names of those that are taken."""
    for field in fields(Request):
        if field.default is MISSING or field.name in taken:
            continue
        value = getattr(request, field.name)
        if value != field.default and value not in ([], ()):
            raise OptionError(f"{engine} takes no {field.name}; leave it out, or use the engine local")
    span = request.reasoning
    if span is not None and span.max_tokens is not None:
        raise OptionError(f"{engine} has no thinking budget; leave it out, or use the engine local")
    if span is not None and span.is_open and request.structured_output is not None:
        raise OptionError(f"{engine} keeps no grammar after reasoning; switch reasoning off, or use the engine local")
