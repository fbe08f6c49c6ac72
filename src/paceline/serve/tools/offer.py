"""What a chat request offers: the functions a model may call, and whether it must call one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """One function. parameters: the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the arguments by name."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The functions of one request.

    documents    the functions as the chat template gets them
    is_forced    the output must be calls, and a grammar makes it so
    is_parallel  it may be several calls
    """

    functions: tuple[ToolFunction, ...]
    documents: tuple[dict[str, Any], ...] = ()
    is_forced: bool = False
    is_parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    def function(self, name: str) -> ToolFunction:
        """The function of this name; one without parameters where the request offers none."""
        offered = (function for function in self.functions if function.name == name)
        return next(offered, ToolFunction(name, ANY_ARGUMENTS))
