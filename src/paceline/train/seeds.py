"""Prompts of the sequences that the target generates.

A seed is a question, or only its opening: then the target invents the rest. Openings come from prompt_openings.py;
functions and prose come from the docstrings of the running Python's own library, which is on every machine and part
of no benchmark. Nothing is downloaded.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from paceline.train import prompt_openings

SKIPPED_FOLDERS = frozenset({"test", "tests", "site-packages", "dist-packages", "idlelib", "turtledemo", "encodings"})
COMPLETE = "Complete this Python function:\n"
LARGEST_FILE = 400_000
SHORTEST_DOCSTRING, LONGEST_DOCSTRING = 40, 900
SHORTEST_PROSE, LONGEST_PROSE = 500, 2600


@dataclass(frozen=True, slots=True)
class Seed:
    """The first part of a sequence.

    open        the target continues the question; otherwise the question is complete and is answered at once
    chat        formatted as a user's turn; otherwise raw text, which the target simply continues
    min_tokens  an open question does not end before this many tokens
    """

    domain: str
    text: str
    open: bool
    chat: bool = True
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of the domains, and the share of sequences that are raw text rather than chat."""

    shares: dict[str, float]
    raw_share: float = 0.3


SHORT = Mix({"chat": 0.34, "code": 0.34, "math": 0.22, "text": 0.10})
LONG = Mix({"summarize": 0.72, "code": 0.14, "text": 0.14})


class SeedStream:
    """An endless, reproducible stream of seeds."""

    def __init__(self, mix: Mix, number: int) -> None:
        self._rng = random.Random(number)
        self._mix = mix

    def __iter__(self) -> SeedStream:
        return self

    def __next__(self) -> Seed:
        domain = self._rng.choices(list(self._mix.shares), list(self._mix.shares.values()))[0]
        seed = MAKERS[domain](self._rng)
        if domain == "text":
            return seed
        raw = self._rng.random() < self._mix.raw_share and bool(seed.text)
        return Seed(seed.domain, seed.text, seed.open, not raw, seed.min_tokens)


def chat(rng: random.Random) -> Seed:
    """An empty user's turn, in most cases with its first prompt_openings."""
    opening = rng.choice(prompt_openings.CHAT_OPENINGS) if rng.random() < 0.75 else ""
    return Seed("chat", opening, open=True)


def mathematics(rng: random.Random) -> Seed:
    if rng.random() < 0.35:
        return Seed("math", rng.choice(prompt_openings.MATH_OPENINGS), open=True)
    first, second = rng.sample(prompt_openings.PEOPLE, 2)
    story = rng.choice(prompt_openings.STORIES)
    numbers = {"x": rng.randint(12, 240), "y": rng.randint(2, 20), "z": rng.randint(3, 40)}
    question = story.format(
        a=first, b=second, t=rng.choice(prompt_openings.THINGS), p=rng.choice(prompt_openings.PLACES), **numbers
    )
    return Seed("math", question[0].upper() + question[1:], open=False)


def code(rng: random.Random) -> Seed:
    chance = rng.random()
    if chance < 0.25:
        return Seed("code", rng.choice(prompt_openings.CODE_OPENINGS), open=True)
    lead = rng.choice((COMPLETE, COMPLETE, "", "Finish this code:\n"))
    functions = library().functions
    if chance < 0.6 and functions:
        return Seed("code", lead + rng.choice(functions), open=False)
    return Seed("code", lead + _invented_function(rng), open=False)


def _invented_function(rng: random.Random) -> str:
    """A signature with a docstring and an example or two, of a function that does not exist."""
    verb, noun = rng.choice(prompt_openings.CODE_VERBS), rng.choice(prompt_openings.CODE_NOUNS)
    rule = rng.choice(prompt_openings.CODE_RULES)
    arguments, result = rng.choice(prompt_openings.CODE_SHAPES)
    name = f"{verb}_{noun}"
    lines = [f"def {name}({arguments})" + (f" -> {result}:" if result else ":")]
    quotes = rng.choice(('"""', '"""', "'''"))
    lines.append(f"    {quotes} {verb.capitalize()} the {noun} {rule}.")
    for _ in range(rng.randint(0, 3)):
        values = ", ".join(rng.choice(prompt_openings.SAMPLES[_annotation(part)]) for part in arguments.split(", "))
        lines += [f"    >>> {name}({values})", f"    {rng.choice(prompt_openings.SAMPLES[result])}"]
    lines.append(f"    {quotes}\n")
    needs_typing = "List" in arguments + result
    return ("from typing import List\n\n\n" if needs_typing else "") + "\n".join(lines)


def _annotation(argument: str) -> str:
    return argument.split(": ")[1] if ": " in argument else ""


def summary(rng: random.Random) -> Seed:
    """A passage to summarize: half of them prose from the library, half invented by the target."""
    request, prose = rng.choice(prompt_openings.SUMMARY_REQUESTS), library().prose
    if prose and rng.random() < 0.55:
        return Seed("summarize", request + rng.choice(prose), open=False)
    return Seed(
        "summarize", request + rng.choice(prompt_openings.PASSAGE_OPENINGS), open=True, min_tokens=rng.randint(120, 420)
    )


def raw_text(rng: random.Random) -> Seed:
    return Seed("text", rng.choice(prompt_openings.RAW_OPENINGS), open=True, chat=False, min_tokens=rng.randint(4, 60))


MAKERS: dict[str, Callable[[random.Random], Seed]] = {
    "chat": chat,
    "math": mathematics,
    "code": code,
    "summarize": summary,
    "text": raw_text,
}


@dataclass(frozen=True, slots=True)
class LibraryTexts:
    """Texts from the standard library: signatures with docstrings, and longer docstrings of modules and classes."""

    functions: tuple[str, ...]
    prose: tuple[str, ...]


@lru_cache(maxsize=1)
def library() -> LibraryTexts:
    """Read the sources of the running Python once. A frozen interpreter has none; invented seeds remain."""
    functions: dict[str, None] = {}
    prose: dict[str, None] = {}
    for path in _library_files():
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        functions.update(dict.fromkeys(_functions(nodes, source.splitlines())))
        prose.update(dict.fromkeys(_prose(nodes)))
    return LibraryTexts(tuple(functions), tuple(prose))


def _library_files() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in sorted(root.rglob("*.py")) if path.stat().st_size < LARGEST_FILE)
    return (path for path in files if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts))


def _functions(nodes: list[ast.AST], lines: list[str]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and SHORTEST_DOCSTRING <= len(docstring) <= LONGEST_DOCSTRING:
                source = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])
                yield textwrap.dedent(source) + "\n"


def _prose(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef):
            docstring = ast.get_docstring(node) or ""
            if len(docstring) >= SHORTEST_PROSE:
                yield docstring[:LONGEST_PROSE]
