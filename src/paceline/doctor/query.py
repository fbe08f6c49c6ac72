"""One request to a server, and how a user repeats it with curl."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

CHAT, COMPLETIONS = "chat/completions", "completions"


@dataclass(frozen=True, slots=True)
class Query:
    """A request body and the route it goes to."""

    path: str
    body: Mapping[str, Any]

    def changed(self, **fields: Any) -> Query:
        """The same request with other fields."""
        return replace(self, body={**self.body, **fields})

    @property
    def is_chat(self) -> bool:
        return self.path == CHAT

    def with_logprobs(self, number: int = 5) -> Query:
        """The same request, asking for log-probabilities and so many alternatives."""
        if self.is_chat:
            return self.changed(logprobs=True, top_logprobs=number)
        return self.changed(logprobs=number)


def chat(messages: list[dict[str, Any]], **fields: Any) -> Query:
    return Query(CHAT, {"messages": messages, "temperature": 0, **fields})


def completion(prompt: str, **fields: Any) -> Query:
    return Query(COMPLETIONS, {"prompt": prompt, "temperature": 0, **fields})


def curl(query: Query, base_url: str, model: str, key_variable: str | None = None) -> str:
    """A command line that sends the request again. The key itself is never written down."""
    parts = ["curl", "-sS", f"{base_url}/{query.path}", "-H", "Content-Type: application/json"]
    line = shlex.join(parts)
    if key_variable is not None:
        line += f' -H "Authorization: Bearer ${key_variable}"'
    body = json.dumps({"model": model, **query.body}, ensure_ascii=False)
    return f"{line} -d {shlex.quote(body)}"
