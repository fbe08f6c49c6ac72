"""Chat templates without transformers: the Jinja environment that they are written for.

`agrees` says whether a template renders here as it does in transformers; only such templates are rendered here. What
fails here, or holds something else than JSON, is left to transformers, which says what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2 import Template

REASONING = ("reasoning_content", "thinking", "reasoning")  # what templates and clients call it, the usual name first
SCALARS = (str, int, float, bool, type(None))
USER, ANSWER = {"role": "user", "content": "What is 2 < 3?\n"}, {"role": "assistant", "content": " Äs \U0001f642 "}
SYSTEM, RESULT = {"role": "system", "content": "Be brief."}, {"role": "tool", "content": '{"sum": 5}', "name": "add"}
FUNCTION = {"name": "add", "description": "a & b", "parameters": {"type": "object", "properties": {"a": {}}}}
CALL = {"type": "function", "id": "call12345", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
NOTHING_GIVEN = {"tools": None, "documents": None, "add_generation_prompt": False}
# Chats that between them reach the usual branches of a template.
PROBES: tuple[dict[str, Any], ...] = (
    {"messages": [USER]},
    {"messages": [USER], "add_generation_prompt": True},
    {"messages": [SYSTEM, USER, ANSWER, USER], "add_generation_prompt": True},
    {"messages": [USER, {**ANSWER, "reasoning_content": "less\n"}, USER], "add_generation_prompt": True},
    {"messages": [USER, {**ANSWER, "reasoning": "less\n"}]},
    {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}], "add_generation_prompt": True},
    {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "add_generation_prompt": True},
    {"messages": [USER], "documents": [{"title": "T", "text": "x"}], "add_generation_prompt": True},
    {"messages": [USER], "add_generation_prompt": True, "enable_thinking": False},
)


def agrees(template: str, special_tokens: Mapping[str, str], theirs: Callable[..., str | None]) -> bool:
    """Whether `theirs` renders every probe as it is rendered here. None of either: it cannot be rendered there."""
    ours = [rendered(template, {**special_tokens, **NOTHING_GIVEN, **probe}) for probe in PROBES]
    return any(ours) and all(text is None or text == theirs(**probe) for text, probe in zip(ours, PROBES))


def rendered(template: str, variables: Mapping[str, Any]) -> str | None:
    """The text of a chat; None: it holds more than plain data, or the template cannot be rendered here.

    variables: what the template reads, `messages` and the names of NOTHING_GIVEN among it
    """
    if not _is_plain(dict(variables)):
        return None
    chat = [_with_reasoning(message) for message in variables["messages"]]
    try:
        return str(compiled(template).render({**variables, "messages": chat}))
    except Exception:  # a template is a program of its own and raises anything; transformers says it to the user
        return None


def _is_plain(value: Any) -> bool:
    """Whether a value is JSON: no subclass that a template could call methods of."""
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    return all(map(_is_plain, value)) if type(value) is list else type(value) in SCALARS


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The reasoning of a message under the names that templates read, whichever name it came under."""
    given = [message[name] for name in REASONING if message.get(name) is not None]
    return {"thinking": given[0], **message, "reasoning_content": given[0]} if given else message


@cache
def compiled(template: str) -> Template:
    """The template as a program. Importing what compiles it and compiling take a few hundredths of a second."""
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class PublicNamespace(Namespace):
        """A namespace that a template cannot put names of Python's own workings into."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"{name} in a namespace")
            super().__setitem__(name, value)

    def namespace(*parts: Any, **names: Any) -> PublicNamespace:
        made = PublicNamespace()
        for name, value in dict(*parts, **names).items():
            made[name] = value
        return made

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        "dict": lambda *parts, **names: dict(*parts, **names),
        "namespace": namespace,
    }
    return environment.from_string(template)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is; Jinja's own filter escapes the characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
