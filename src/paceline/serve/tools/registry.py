"""How model families write tool calls. A family is one file of serve/tools/families that ends in its `FORMAT`.

names          all formats
tool_format    the format of this name
detect         the format that a chat template asks for
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from paceline.errors import OptionError
from paceline.serve.output_pieces import Parse
from paceline.serve.tools import families
from paceline.serve.tools.grammar import CallLayout
from paceline.serve.tools.offer import ToolOffer

DEFAULT = "hermes"  # what models without a format of their own are asked to write


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family writes calls, and what its chat templates expect of earlier ones.

    matches          whether a chat template is of this family; at most one family matches
    parse            makes the parse function of one request
    layout           how a call is written where a grammar forces it
    markers          what begins or ends a call; some tokenizers hide those that are special tokens
    text_arguments   templates take arguments as JSON text, not as an object
    null_content     templates take a call for a call only if there is no content
    id_length        characters of a call's id; None: any
    aliases          what vLLM calls parsers of this format: a command line written for it works here
    """

    name: str
    matches: Callable[[str], bool]
    parse: Callable[[ToolOffer], Parse]
    layout: CallLayout
    markers: tuple[str, ...] = ()
    text_arguments: bool = False
    null_content: bool = False
    id_length: int | None = None
    aliases: tuple[str, ...] = ()


@cache
def formats() -> dict[str, ToolFormat]:
    """All formats by name."""
    modules = sorted(module.name for module in pkgutil.iter_modules(families.__path__))
    found = [import_module(f"{families.__name__}.{module}").FORMAT for module in modules]
    return {tool_format.name: tool_format for tool_format in found}


def names() -> list[str]:
    return sorted(formats())


def tool_format(name: str) -> ToolFormat:
    """The format of this name or alias. Raises OptionError."""
    match = next((known for known in formats().values() if name in (known.name, *known.aliases)), None)
    if match is None:
        raise OptionError(f"--tool-parser is auto, none or one of {', '.join(names())}; not {name!r}")
    return match


def detect(chat_template: str) -> ToolFormat:
    """The format that a chat template asks for; the default where it asks for none."""
    matching = [candidate for candidate in formats().values() if candidate.matches(chat_template)]
    return matching[0] if matching else formats()[DEFAULT]
