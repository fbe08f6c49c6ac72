"""Somebody's own data: a file with one JSON object a line.

    {"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]}     a conversation
    {"text": …}                                                                             a text
    {"prompt": …}                                                        a question, which the target answers

A conversation that ends with the user's turn is a question too. What came of the file is kept in shards, one for so
many lines, so that a run that was killed goes on behind the last whole shard and a second run finds everything there.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import OptionError, PromptError
from paceline.hub.tokenizer import Message, Tokenizer
from paceline.runners.loading import eos_token_ids_of
from paceline.train.batch_generator import Plan, Writer
from paceline.train.collect import (
    HEAT_SHARES,
    HEATS,
    SHORTEST_ANSWER,
    CollectOptions,
    Progress,
    Watcher,
    loaded,
    remember_origin,
    rows_that_fit,
    too_many_rows,
)
from paceline.train.corpus import SHARD, Corpus, Text

LINES_A_SHARD = 4096
LONGEST_ANSWER = 320
ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Line:
    """One object of a data file, and where it stands."""

    where: str
    record: dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """All objects of the file. Raises OptionError naming the line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the data file {path} cannot be read: {error}") from error
    found = [_parsed(f"{path.name}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise OptionError(f"the data file {path} is empty; without --data the target writes its own texts")
    return found


def _parsed(where: str, line: str) -> Line:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise OptionError(f"{where}: not JSON ({error}); the file must hold one JSON object a line") from None
    if not isinstance(record, dict) or not {"messages", "text", "prompt"} & set(record):
        raise OptionError(f'{where}: an object with "messages", "text" or "prompt" is needed')
    return Line(where, record)


class Reader:
    """Turns lines into texts, or into plans for the target's answer."""

    def __init__(self, tokenizer: Any, longest: int, seed: int) -> None:
        self._tokenizer, self._longest = Tokenizer(tokenizer), longest
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._rng = random.Random(seed)

    def read(self, line: Line) -> Text | Plan | None:
        """None: too long for an answer to fit. Raises OptionError naming the line that makes no sense."""
        try:
            record = line.record
            if "messages" in record:
                return self._conversation(record["messages"])
            if "text" in record:
                return Text(self._tokenizer.encode(str(record["text"])), 1)
            return self._question(self._asked(str(record["prompt"])))
        except (PromptError, KeyError, TypeError) as error:
            raise OptionError(f"{line.where}: {error}") from error

    def _asked(self, prompt: str) -> list[int]:
        return self._tokenizer.encode([{"role": "user", "content": prompt}] if self._has_template else prompt)

    def _conversation(self, messages: list[Message]) -> Text | Plan | None:
        """All from the first answer on is learnt."""
        roles = [message["role"] for message in messages]
        if not roles or roles[-1] != ASSISTANT:
            return self._question(self._tokenizer.encode(messages))
        first = roles.index(ASSISTANT)
        before = self._tokenizer.encode(messages[:first]) if first else []
        output = self._tokenizer.hf_tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        return Text([int(token) for token in output], max(1, _shared_beginning(before, output)))

    def _question(self, prompt: list[int]) -> Plan | None:
        if len(prompt) + SHORTEST_ANSWER > self._longest:
            return None
        heat = self._rng.choices(HEATS, HEAT_SHARES)[0]
        return Plan(tuple(prompt), 0, 0, (), heat, min(self._longest, len(prompt) + LONGEST_ANSWER))


def _shared_beginning(one: list[int], other: list[int]) -> int:
    for place, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return place
    return min(len(one), len(other))


def collect_from(
    path: Path, model: Any, tokenizer: Any, folder: Path, options: CollectOptions, watch: Watcher = lambda _: None
) -> Corpus:
    """The texts of a data file, its questions answered by the target, kept in `folder`. None comes twice."""
    lines = read_lines(path)
    remember_origin(model, folder, data=hashlib.sha256(path.read_bytes()).hexdigest(), longest=options.longest)
    parts = loaded(folder)
    progress = Progress(sum(map(len, parts)), sum(part.answer_tokens for part in parts))
    for first in range(len(parts) * LINES_A_SHARD, len(lines), LINES_A_SHARD):
        number = len(parts)
        reader = Reader(tokenizer, options.longest, hash((options.seed, number)))
        made = [reader.read(line) for line in lines[first : first + LINES_A_SHARD]]
        texts = [text for text in made if isinstance(text, Text)]
        progress.texts, progress.tokens = progress.texts + len(texts), progress.tokens + _answer_tokens(texts)
        plans = [plan for plan in made if isinstance(plan, Plan)]
        texts += _answered(model, plans, options, progress, watch)
        parts.append(Corpus.of(texts))
        parts[-1].save(folder / SHARD.format(number))
    return Corpus.joined(parts).cut(options.longest).without_repeats()


def _answer_tokens(texts: list[Text]) -> int:
    return sum(len(text.tokens) - text.start for text in texts)


def _answered(
    model: Any, plans: list[Plan], options: CollectOptions, progress: Progress, watch: Watcher
) -> Iterator[Text]:
    if not plans:
        return
    rows = min(options.rows or rows_that_fit(model, options), len(plans))
    writer = Writer(model, eos_token_ids_of(model), rows, max(plan.length for plan in plans))
    try:
        for result in writer.write(iter(plans), lambda: False):
            progress.texts, progress.tokens = progress.texts + 1, progress.tokens + len(result.tokens) - result.start
            watch(progress)
            yield Text(result.tokens, result.start, greedy=result.plan.heat == 0)
    except torch.OutOfMemoryError as error:
        raise too_many_rows(rows) from error
