"""Texts from the running Python's own library, which is on every machine and part of no benchmark."""

from __future__ import annotations

import ast
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

SKIPPED_FOLDERS = frozenset({"test", "tests", "site-packages", "dist-packages", "idlelib", "turtledemo", "encodings"})
LARGEST_FILE = 400_000
SHORTEST_DOCSTRING, LONGEST_DOCSTRING = 40, 900
SHORTEST_PROSE, LONGEST_PROSE = 500, 2600
FEWEST_LINES, MOST_LINES = 4, 22  # of a whole function
SHORTEST_SENTENCE, LONGEST_SENTENCE = 30, 140


@dataclass(frozen=True, slots=True)
class LibraryTexts:
    """Texts from the standard library.

    functions  signatures with docstrings
    bodies     whole short functions
    prose      longer docstrings of modules and classes
    sentences  first sentences of docstrings
    """

    functions: tuple[str, ...]
    bodies: tuple[str, ...]
    prose: tuple[str, ...]
    sentences: tuple[str, ...]


@lru_cache(maxsize=1)
def library() -> LibraryTexts:
    """Read the sources of the running Python once. A frozen interpreter has none; invented seeds remain."""
    columns: list[dict[str, None]] = [{}, {}, {}, {}]
    for path in _library_files():
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        lines = source.splitlines()
        texts = (_functions(nodes, lines), _bodies(nodes, lines), _prose(nodes), _sentences(nodes))
        for column, found in zip(columns, texts):
            column.update(dict.fromkeys(found))
    return LibraryTexts(*(tuple(column) for column in columns))


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


def _bodies(nodes: list[ast.AST], lines: list[str]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            source = lines[node.lineno - 1 : node.end_lineno]
            if FEWEST_LINES <= len(source) <= MOST_LINES:
                yield textwrap.dedent("\n".join(source)) + "\n"


def _prose(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef):
            docstring = ast.get_docstring(node) or ""
            if len(docstring) >= SHORTEST_PROSE:
                yield docstring[:LONGEST_PROSE]


def _sentences(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            sentence = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()).split(". ")[0]
            if SHORTEST_SENTENCE <= len(sentence) <= LONGEST_SENTENCE and sentence[0].isupper():
                yield sentence.rstrip(".:") + "."
