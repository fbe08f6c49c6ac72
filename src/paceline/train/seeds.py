"""How a text that the target is to write begins.

A seed is a question, or only its opening: then the target invents the rest. Openings are put together from words.py;
functions and prose come from the docstrings of the running Python's own library, which is on every machine and which
no benchmark is made of. NoDraft is downloaded.
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

from paceline.train import prompt_openings as words

SKIPPED_FOLDERS = frozenset({"test", "tests", "site-packages", "dist-packages", "idlelib", "turtledemo", "encodings"})
COMPLETE = "Complete this Python function:\n"
LARGEST_FILE = 400_000
SHORTEST_DOCSTRING, LONGEST_DOCSTRING = 40, 900
SHORTEST_PROSE, LONGEST_PROSE = 500, 2600


@dataclass(frozen=True, slots=True)
class Seed:
    """The beginning of a text.

    open   the target goes on with the question; otherwise the question is complete and is answered at once
    floor  an open question does not end before this many tokens
    chat   said as a user's turn; otherwise plain text, which the target simply continues
    """

    domain: str
    text: str
    open: bool
    chat: bool = True
    floor: int = 0


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of the domains, and how many texts are plain rather than chat."""

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
        return Seed(seed.domain, seed.text, seed.open, not raw, seed.floor)


def chat(rng: random.Random) -> Seed:
    """NoDraft but a user's turn that begins, now and then with its first words."""
    opening = rng.choice(words.CHAT_OPENINGS) if rng.random() < 0.75 else ""
    return Seed("chat", opening, open=True)


def mathematics(rng: random.Random) -> Seed:
    if rng.random() < 0.35:
        return Seed("math", rng.choice(words.MATH_OPENINGS), open=True)
    first, second = rng.sample(words.PEOPLE, 2)
    story = rng.choice(words.STORIES)
    numbers = {"x": rng.randint(12, 240), "y": rng.randint(2, 20), "z": rng.randint(3, 40)}
    told = story.format(a=first, b=second, t=rng.choice(words.THINGS), p=rng.choice(words.PLACES), **numbers)
    return Seed("math", told[0].upper() + told[1:], open=False)


def code(rng: random.Random) -> Seed:
    chance = rng.random()
    if chance < 0.25:
        return Seed("code", rng.choice(words.CODE_OPENINGS), open=True)
    lead = rng.choice((COMPLETE, COMPLETE, "", "Finish this code:\n"))
    known = library().functions
    if chance < 0.6 and known:
        return Seed("code", lead + rng.choice(known), open=False)
    return Seed("code", lead + _invented_function(rng), open=False)


def _invented_function(rng: random.Random) -> str:
    """A signature with a docstring and an example or two, of a function that nobody has written yet."""
    verb, noun, rule = rng.choice(words.CODE_VERBS), rng.choice(words.CODE_NOUNS), rng.choice(words.CODE_RULES)
    arguments, result = rng.choice(words.CODE_SHAPES)
    name = f"{verb}_{noun}"
    lines = [f"def {name}({arguments})" + (f" -> {result}:" if result else ":")]
    quotes = rng.choice(('"""', '"""', "'''"))
    lines.append(f"    {quotes} {verb.capitalize()} the {noun} {rule}.")
    for _ in range(rng.randint(0, 3)):
        given = ", ".join(rng.choice(words.SAMPLES[_kind(part)]) for part in arguments.split(", "))
        lines += [f"    >>> {name}({given})", f"    {rng.choice(words.SAMPLES[result])}"]
    lines.append(f"    {quotes}\n")
    needs_typing = "List" in arguments + result
    return ("from typing import List\n\n\n" if needs_typing else "") + "\n".join(lines)


def _kind(argument: str) -> str:
    return argument.split(": ")[1] if ": " in argument else ""


def summary(rng: random.Random) -> Seed:
    """A passage to be summed up: half of them prose from the library, half invented by the target."""
    request, prose = rng.choice(words.SUMMARY_REQUESTS), library().prose
    if prose and rng.random() < 0.55:
        return Seed("summarize", request + rng.choice(prose), open=False)
    return Seed("summarize", request + rng.choice(words.PASSAGE_OPENINGS), open=True, floor=rng.randint(120, 420))


def plain_text(rng: random.Random) -> Seed:
    return Seed("text", rng.choice(words.RAW_OPENINGS), open=True, chat=False, floor=rng.randint(4, 60))


MAKERS: dict[str, Callable[[random.Random], Seed]] = {
    "chat": chat,
    "math": mathematics,
    "code": code,
    "summarize": summary,
    "text": plain_text,
}


@dataclass(frozen=True, slots=True)
class Library:
    """What the standard library lends: signatures with docstrings, and longer docstrings of modules and classes."""

    functions: tuple[str, ...]
    prose: tuple[str, ...]


@lru_cache(maxsize=1)
def library() -> Library:
    """Read the sources of the running Python once. A frozen interpreter has none; the invented seeds remain."""
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
    return Library(tuple(functions), tuple(prose))


def _library_files() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    inside = (path for path in sorted(root.rglob("*.py")) if path.stat().st_size < LARGEST_FILE)
    return (path for path in inside if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts))


def _functions(nodes: list[ast.AST], lines: list[str]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            output = ast.get_docstring(node)
            if output and SHORTEST_DOCSTRING <= len(output) <= LONGEST_DOCSTRING:
                part = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])
                yield textwrap.dedent(part) + "\n"


def _prose(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef):
            output = ast.get_docstring(node) or ""
            if len(output) >= SHORTEST_PROSE:
                yield output[:LONGEST_PROSE]
