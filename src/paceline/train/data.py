"""The user's own data: a file with one JSON object per line.

    {"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]}     a conversation
    {"text": …}                                                                             a text
    {"prompt": …}                                                        a question, which the target answers

A conversation that ends with the user's turn is a question too. The sequences of the file are kept in shards of a
fixed number of lines, so an interrupted run continues after the last whole shard and a second run reuses everything.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import OptionError, PromptError
from paceline.hub.tokenizer import Message, Tokenizer
from paceline.kv.prefix_cache import common_prefix_length
from paceline.train.collect import (
    SHORTEST_ANSWER,
    CollectOptions,
    CollectProgress,
    CollectWatcher,
    check_origin,
    load_shards,
    num_seqs_at_once,
    temperature,
)
from paceline.train.corpus import SHARD, Corpus, TrainingSequence
from paceline.train.sequence_writer import GenerationPlan, WriterFactory, WriterLimits, answer_plan

LINES_PER_SHARD = 4096
LONGEST_ANSWER = 320
ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class DataLine:
    """One object of a data file, and its line number for messages."""

    location: str
    record: dict[str, Any]


def read_lines(path: Path) -> list[DataLine]:
    """All objects of the file. Raises OptionError naming a line that is not one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the data file {path} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise OptionError(f"the data file {path} is empty; without --data the target generates its own data")
    return [_parsed(f"{path.name}, line {number}", line) for number, line in numbered]


def _parsed(location: str, line: str) -> DataLine:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise OptionError(f"{location}: not JSON ({error}); the file must hold one JSON object per line") from None
    if not isinstance(record, dict) or not {"messages", "text", "prompt"} & set(record):
        raise OptionError(f'{location}: an object with "messages", "text" or "prompt" is needed')
    return DataLine(location, record)


class DataReader:
    """Turns lines into sequences, or into plans for the target's answer."""

    def __init__(self, tokenizer: Any, max_seq_len: int, seed: int, greedy_share: float = 0.6) -> None:
        self._tokenizer, self._max_seq_len, self._greedy_share = Tokenizer(tokenizer), max_seq_len, greedy_share
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._rng = random.Random(seed)

    def read(self, line: DataLine) -> TrainingSequence | GenerationPlan | None:
        """None: too long for an answer to fit. Raises OptionError naming a line that makes no sense."""
        try:
            record = line.record
            if "messages" in record:
                return self._conversation(record["messages"])
            if "text" in record:
                return TrainingSequence(self._tokenizer.encode(str(record["text"])), 1)
            return self._question(self._prompt_ids(str(record["prompt"])))
        except (PromptError, KeyError, TypeError) as error:
            raise OptionError(f"{line.location}: {error}") from error

    def _prompt_ids(self, prompt: str) -> list[int]:
        return self._tokenizer.encode([{"role": "user", "content": prompt}] if self._has_template else prompt)

    def _conversation(self, messages: list[Message]) -> TrainingSequence | GenerationPlan | None:
        """Everything from the first answer on is trained on."""
        roles = [message["role"] for message in messages]
        if not roles or roles[-1] != ASSISTANT:
            return self._question(self._tokenizer.encode(messages))
        first = roles.index(ASSISTANT)
        prompt = self._tokenizer.encode(messages[:first]) if first else []
        encoding = self._tokenizer.hf_tokenizer.apply_chat_template(messages, return_dict=True)
        tokens = [int(token) for token in encoding["input_ids"]]
        return TrainingSequence(tokens, max(1, common_prefix_length(prompt, tokens)))

    def _question(self, prompt: list[int]) -> GenerationPlan | None:
        if len(prompt) + SHORTEST_ANSWER > self._max_seq_len:
            return None
        heat = temperature(self._rng, self._greedy_share)
        return answer_plan(prompt, heat, min(self._max_seq_len, len(prompt) + LONGEST_ANSWER))


def collect_from(
    path: Path,
    writers: WriterFactory,
    tokenizer: Any,
    folder: Path,
    options: CollectOptions,
    watch: CollectWatcher = lambda _: None,
) -> Corpus:
    """The sequences of a data file, its questions answered by the target, kept in `folder`, without repeats."""
    lines = read_lines(path)
    check_origin(writers, folder, data=hashlib.sha256(path.read_bytes()).hexdigest(), max_seq_len=options.max_seq_len)
    parts = load_shards(folder)
    answering = _Answering(writers, options, CollectProgress.of(parts), watch)
    for number in range(len(parts), -(-len(lines) // LINES_PER_SHARD)):
        reader = DataReader(tokenizer, options.max_seq_len, hash((options.seed, number)), options.greedy_share)
        shard_lines = lines[number * LINES_PER_SHARD : (number + 1) * LINES_PER_SHARD]
        parts.append(Corpus.of(list(answering.sequences([reader.read(line) for line in shard_lines]))))
        parts[-1].save(folder / SHARD.format(number))
    return Corpus.joined(parts).cut(options.max_seq_len).without_repeats()


@dataclass(frozen=True, slots=True)
class _Answering:
    """Completes the entries of a data file with the target's answers and reports progress."""

    writers: WriterFactory
    options: CollectOptions
    progress: CollectProgress
    watch: CollectWatcher

    def sequences(self, entries: list[TrainingSequence | GenerationPlan | None]) -> Iterator[TrainingSequence]:
        """The complete entries as they are, then the answered questions."""
        for entry in entries:
            if isinstance(entry, TrainingSequence):
                self._count(entry)
                yield entry
        for seq in self._answers([entry for entry in entries if isinstance(entry, GenerationPlan)]):
            self._count(seq)
            self.watch(self.progress)
            yield seq

    def _answers(self, plans: list[GenerationPlan]) -> Iterator[TrainingSequence]:
        if not plans:
            return
        num_seqs = min(num_seqs_at_once(self.writers, self.options), len(plans))
        writer = self.writers.open(WriterLimits(num_seqs, max(plan.max_len for plan in plans)))
        for seq in writer.write(iter(plans), lambda: False):
            yield TrainingSequence(seq.tokens, seq.start, greedy=seq.plan.temperature == 0)

    def _count(self, seq: TrainingSequence) -> None:
        self.progress.num_seqs += 1
        self.progress.answer_tokens += len(seq.tokens) - seq.start
