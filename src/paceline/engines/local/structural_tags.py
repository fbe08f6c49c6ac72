"""Structural tags: text that is free until a tag begins, and then follows the content of the tag.

Two spellings are understood, as other servers take them:

    {"structures": [{"begin": "<f>", "schema": {...}, "end": "</f>"}], "triggers": ["<f"]}
    {"format": {"type": "triggered_tags", "triggers": [...], "tags": [{"begin", "content", "end"}], ...}}

The result is a Lark grammar for llguidance. A format is a tree; each of its nodes becomes a rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

Node = dict[str, Any]
UNESCAPED_SLASH = re.compile(r"\\.|/", re.DOTALL)  # steps over what is escaped, a slash among it
SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def structural_tag_grammar(text: str) -> str:
    """A Lark grammar. Raises ValueError, in words, for what cannot be read."""
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("structural tags are a JSON object")
    if "structures" in document:
        tags = [_tag_of_structure(structure) for structure in document["structures"]]
        document = {"format": {"type": "triggered_tags", "triggers": document.get("triggers"), "tags": tags}}
    if not isinstance(document.get("format"), dict):
        raise ValueError('structural tags have "structures" and "triggers", or a "format"')
    grammar = _Grammar()
    start = grammar.rule_of(document["format"])
    return grammar.text(start)


def _tag_of_structure(structure: Node) -> Node:
    return {**structure, "content": {"type": "json_schema", "json_schema": structure.get("schema", {})}}


class _Grammar:
    """The rules of one grammar."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._kinds: dict[str, Callable[[Node], str]] = {
            "const_string": lambda node: _literal(_field(node, "value", str)),
            "json_schema": lambda node: _json(_field(node, "json_schema", dict)),
            "regex": lambda node: self._lexeme(f"/{UNESCAPED_SLASH.sub(_escaped, _field(node, 'pattern', str))}/"),
            "any_text": lambda node: "TEXT",
            "sequence": lambda node: " ".join(self._rules(node, "elements")),
            "or": lambda node: " | ".join(self._rules(node, "elements")),
            "tag": lambda node: f"{_literal(_field(node, 'begin', str))} {self._content_and_end(node)}",
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def text(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", r"TEXT: /(.|\n)*/", *self._lines]) + "\n"

    def rule_of(self, node: Any) -> str:
        """The name of the rule of a node."""
        if not isinstance(node, dict) or node.get("type", "tag") not in self._kinds:
            kind = node.get("type") if isinstance(node, dict) else node
            raise ValueError(f"a structural tag is one of {', '.join(self._kinds)}; not {kind!r}")
        return self._rule(self._kinds[node.get("type", "tag")](node))

    def _rule(self, body: str, attribute: str = "") -> str:
        name = f"rule_{len(self._lines)}"
        self._lines.append(f"{name}{attribute}: {body}")
        return name

    def _lexeme(self, body: str) -> str:
        name = f"LEXEME_{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _rules(self, node: Node, name: str) -> list[str]:
        return [self.rule_of(part) for part in _field(node, name, list)]

    def _content_and_end(self, tag: Node) -> str:
        """Free text is read up to the first end of the tag; other content knows itself where it ends."""
        content, end = _field(tag, "content", dict), _literal(_field(tag, "end", str))
        if content.get("type") == "any_text" and tag["end"]:
            return self._rule(f"TEXT {end}", "[lazy]")
        return f"{self.rule_of(content)} {end}"

    def _triggered(self, node: Node) -> str:
        """Free text, in which a trigger must go on as one of the tags that begin with it."""
        triggers = [trigger for trigger in _field(node, "triggers", list) if isinstance(trigger, str) and trigger]
        tags = [self._rule(self._triggered_tag(tag, triggers)) for tag in _field(node, "tags", list)]
        any_tag = self._rule(" | ".join(tags))
        if node.get("stop_after_first"):
            return any_tag if node.get("at_least_one") else f"{any_tag} | TEXT"
        return f"{any_tag}{'+' if node.get('at_least_one') else '*'} TEXT"

    def _triggered_tag(self, tag: Node, triggers: list[str]) -> str:
        begin = _field(tag, "begin", str)
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"no trigger begins the tag {begin!r}")
        opening = self._rule(f"TEXT {_literal(trigger)}", "[lazy]")
        return f"{opening} {_literal(begin[len(trigger) :])} {self._content_and_end(tag)}"

    def _separated(self, node: Node) -> str:
        tags, separator = " | ".join(self._rules(node, "tags")), _literal(_field(node, "separator", str))
        any_tag = self._rule(tags)
        more = "" if node.get("stop_after_first") else f" ({separator} {any_tag})*"
        return f"{any_tag}{more}" if node.get("at_least_one") else f"({any_tag}{more})?"


def _escaped(match: re.Match[str]) -> str:
    return match[0] if match[0] != "/" else r"\/"


def _literal(text: str) -> str:
    return json.dumps(text) if text else '""'


def _json(schema: Node) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": SPACING})


def _field(node: Node, name: str, kind: type) -> Any:
    value = node.get(name) if isinstance(node, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"a structural tag lacks {name!r}, or it is no {kind.__name__}")
    return value
