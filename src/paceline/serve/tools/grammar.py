"""Grammars of outputs that are one call, or several, with arguments that match their schemas; or an answer in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.types import StructuredOutput
from paceline.serve.tools.offer import ToolFunction, ToolOffer

# As in response_format: free whitespace would let a small model write blanks until its length ends.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class CallLayout:
    """The text around the arguments of calls.

    prefix, suffix  before and after the arguments of one call; the prefix carries the name
    begin, end      before the first and after the last call
    between         between two calls; None: there is only ever one
    """

    prefix: Callable[[str], str]
    suffix: str
    begin: str = ""
    end: str = ""
    between: str | None = "\n"


def json_prefix(key: str = "arguments", before: str = "") -> Callable[[str], str]:
    """The text of an object with a name, up to its arguments."""
    return lambda name: f'{before}{{"name": {json.dumps(name)}, "{key}": '


def forced_calls(offer: ToolOffer, layout: CallLayout, token_ids: Mapping[str, int]) -> StructuredOutput:
    """The grammar of an output that must be calls. token_ids: of markers that are tokens of their own."""
    return StructuredOutput("grammar", "\n".join(["start: calls", *_call_rules(offer, layout, token_ids)]))


def answer_or_calls(
    schema: dict[str, Any], offer: ToolOffer, layout: CallLayout, token_ids: Mapping[str, int]
) -> StructuredOutput:
    """The grammar of an output that is JSON of this schema, or calls."""
    answer = f"answer: %json {json.dumps({'x-guidance': SPACING, **schema})}"
    return StructuredOutput(
        "grammar", "\n".join(["start: answer | calls", answer, *_call_rules(offer, layout, token_ids)])
    )


def answer_schema(answer: StructuredOutput | None) -> dict[str, Any] | None:
    """The schema of an output that must be JSON; None: it may be something else."""
    if answer is None or answer.kind not in ("json_schema", "json_object"):
        return None
    try:
        schema = json.loads(answer.value) if answer.value else {"type": "object"}
    except (ValueError, RecursionError):  # the engine says what is wrong with it
        return None
    return schema if isinstance(schema, dict) else None


def _call_rules(offer: ToolOffer, layout: CallLayout, token_ids: Mapping[str, int]) -> list[str]:
    numbers = range(len(offer.functions))
    calls = "call"
    if offer.is_parallel and layout.between is not None:
        calls = f"call ({_literal(layout.between, token_ids)} call)*"
    parts = [_literal(layout.begin, token_ids), calls, _literal(layout.end, token_ids)]
    rules = [f"calls: {' '.join(part for part in parts if part)}", "call: " + " | ".join(f"call_{n}" for n in numbers)]
    for number, function in enumerate(offer.functions):
        prefix, suffix = _literal(layout.prefix(function.name), token_ids), _literal(layout.suffix, token_ids)
        rules.append(f"call_{number}: {prefix} arguments_{number} {suffix}")
        rules.append(f"arguments_{number}: %json {json.dumps(argument_schema(function))}")
    return rules


def argument_schema(function: ToolFunction) -> dict[str, Any]:
    """The schema of a function's arguments. A schema that names properties means those and no others."""
    schema: dict[str, Any] = {"type": "object", **function.parameters, "x-guidance": SPACING}
    if "properties" in schema and "additionalProperties" not in schema:
        schema["additionalProperties"] = False
    return schema


def _literal(text: str, token_ids: Mapping[str, int]) -> str:
    """Text in a Lark grammar. A marker that is a token of its own must be that token, and no other spelling."""
    if not text:
        return ""
    marker = min((name for name in token_ids if name in text), key=text.index, default="")
    if not marker:
        return json.dumps(text, ensure_ascii=False)
    before, _, after = text.partition(marker)
    parts = [_literal(before, token_ids), f"<[{token_ids[marker]}]>", _literal(after, token_ids)]
    return " ".join(part for part in parts if part)
