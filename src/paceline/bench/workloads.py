"""Prompts to measure with: the built-in set, published benchmark files, or the user's own text.

    builtin                 12 prompts each of code, technical, creative, maths, summarising and chat
    builtin:code,maths      some of these
    FILE.jsonl              Spec-Bench (`turns`, `category`), HumanEval (`prompt`, `task_id`), GSM8K (`question`),
                            or one {"prompt": ..., "domain": ...} a line
    FILE.txt                plain text; prompts are separated by a line that holds only ---, or else one a line

The fields of a .jsonl file show which of them it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from paceline.core.protocols import Tokenizer
from paceline.errors import OptionError, PromptError

BUILTIN = "builtin"
DOMAINS = ("code", "technical", "creative", "maths", "summarising", "chat")
SEPARATOR = "---"


@dataclass(frozen=True, slots=True)
class WorkloadPrompt:
    """One prompt. `chat`: it is sent as a user's message, where the model has a chat template."""

    domain: str
    text: str
    chat: bool = True

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        if self.chat and getattr(tokenizer.hf_tokenizer, "chat_template", None):
            return tokenizer.encode([{"role": "user", "content": self.text}])
        return tokenizer.encode(self.text)


def load_prompts(source: str, limit: int | None = None) -> list[WorkloadPrompt]:
    """Read prompts from a source as described above; `limit` of them, spread over the domains."""
    if limit is not None and limit < 1:
        raise OptionError(f"the number of prompts must be 1 or more, not {limit}")
    prompts = _builtin(source) if source.split(":")[0] == BUILTIN else _from_file(Path(source).expanduser())
    if not prompts:
        raise PromptError(f"{source} holds no prompts")
    return prompts if limit is None else _spread(prompts, limit)


def _builtin(source: str) -> list[WorkloadPrompt]:
    domains = source.partition(":")[2].split(",") if ":" in source else list(DOMAINS)
    unknown = [domain for domain in domains if domain not in DOMAINS]
    if unknown:
        raise OptionError(f"the built-in prompts have no domain {unknown[0]!r}; they have {', '.join(DOMAINS)}")
    folder = files("paceline.bench").joinpath("prompts")
    prompts: list[WorkloadPrompt] = []
    for domain in domains:
        for line in folder.joinpath(f"{domain}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            prompts.append(WorkloadPrompt(domain, row["prompt"], row["kind"] == "chat"))
    return prompts


def _from_file(path: Path) -> list[WorkloadPrompt]:
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PromptError(f"there is no file {path}; the built-in prompts are called {BUILTIN}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path} cannot be read as text: {error}") from error
    if path.suffix in (".jsonl", ".json"):
        return [_from_row(row, path, number) for number, row in enumerate(_rows(content, path), start=1)]
    return [WorkloadPrompt("text", part, chat=False) for part in _parts(content)]


def _parts(content: str) -> list[str]:
    """Paragraphs between --- lines, or lines."""
    lines = content.splitlines()
    if SEPARATOR in lines:
        joined = "\n".join("\0" if line == SEPARATOR else line for line in lines)
        parts = [part.strip("\n") for part in joined.split("\0")]
    else:
        parts = lines
    return [part for part in parts if part.strip()]


def _rows(content: str, path: Path) -> list[dict[str, Any]]:
    try:
        whole = json.loads(content)
        rows = whole if isinstance(whole, list) else [whole]
    except ValueError:
        rows = [_row(line, path, number) for number, line in enumerate(content.splitlines(), start=1) if line.strip()]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise PromptError(f"{path}, entry {number}: expected an object with a prompt, not {type(row).__name__}")
    return rows


def _row(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise PromptError(f"{path}, line {number} is not JSON: {error}") from error


def _from_row(row: dict[str, Any], path: Path, number: int) -> WorkloadPrompt:
    """Recognise a row by its fields."""
    if isinstance(row.get("turns"), list) and row["turns"]:  # Spec-Bench, MT-bench: the first turn
        return WorkloadPrompt(str(row.get("category", "chat")), str(row["turns"][0]))
    if isinstance(row.get("prompt"), str) and "task_id" in row:  # HumanEval: a function to continue
        return WorkloadPrompt("code", row["prompt"], chat=False)
    if isinstance(row.get("question"), str):  # GSM8K
        return WorkloadPrompt("maths", row["question"])
    if isinstance(row.get("prompt"), str) and row["prompt"]:
        return WorkloadPrompt(str(row.get("domain", "text")), row["prompt"], row.get("kind", "text") == "chat")
    known = "turns (Spec-Bench), prompt with task_id (HumanEval), question (GSM8K) or prompt"
    raise PromptError(f"{path}, entry {number} has none of the fields {known}")


def _spread(prompts: list[WorkloadPrompt], limit: int) -> list[WorkloadPrompt]:
    """One of each domain, then a second of each, until there are enough; in the order of the domains."""
    by_domain: dict[str, list[WorkloadPrompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    in_turns = [prompt for turn in zip_longest(*by_domain.values()) for prompt in turn if prompt is not None]
    chosen = set(map(id, in_turns[:limit]))
    return [prompt for prompt in prompts if id(prompt) in chosen]
