"""The target writes its own training data.

It is shown the opening of a user's turn and invents the question, then answers it; or it continues a plain text. Every
text is kept as token ids in shards, so that a second run finds them and writes only what is missing.
"""

from __future__ import annotations

import contextlib
import json
import queue
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ModelError, OptionError, OutOfMemory
from paceline.runners.loading import eos_token_ids_of
from paceline.train.atomic import write_text
from paceline.train.batch_generator import Plan, Writer, Written
from paceline.train.corpus import KINDS, SHARD, Corpus, Text, shards
from paceline.train.seeds import LONG, SHORT, Mix, Seed, SeedStream

MARK = "\u241f"  # stands for the user's words while a chat template is taken apart
HEATS = (0.0, 0.5, 0.8, 1.0)
HEAT_SHARES = (0.6, 0.14, 0.14, 0.12)
TEXTS_A_SHARD = 20_000
ORIGIN = "origin.json"
SHORTEST_ANSWER = 32
RAW_QUESTION = 24  # tokens invented after a plain opening before the text counts as the target's answer


@dataclass(frozen=True, slots=True)
class Pool:
    """Texts of one size that are written together. share: of the tokens wanted."""

    mix: Mix
    length: int
    rows: int
    question: int
    answer: int
    share: float


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """How much the target writes, and how.

    tokens   answer tokens wanted in all; seconds: stop after so long, whatever is there
    rows     texts at a time on a GPU; 0: by the memory there is
    """

    tokens: int = 4_000_000
    seconds: float = float("inf")
    rows: int = 0
    longest: int = 1152
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.longest < 64 or self.rows < 0:
            raise OptionError("collecting needs 1 token or more, texts of 64 tokens or more and no negative batch")


def pools(options: CollectOptions, largest: int) -> list[Pool]:
    """Most texts are short, a few are long: the drafter has to know late positions too."""
    short = min(432, options.longest)
    wanted = [Pool(SHORT, short, options.rows or largest, short // 3, 288, 0.75)]
    if options.longest > short:
        rows = max(1, (options.rows or largest) * short // options.longest)
        wanted.append(Pool(LONG, options.longest, rows, options.longest * 5 // 8, 320, 0.25))
    return wanted if len(wanted) > 1 else [replace(wanted[0], share=1.0)]


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template taken apart: tokens before a user's first words, and from their end to the answer."""

    before: str
    after: tuple[int, ...]


def template_of(tokenizer: Any) -> Template | None:
    """None where the model has no chat template: then only plain texts are written."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turn = [{"role": "user", "content": MARK}]
    output = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    if output.count(MARK) != 1:
        raise ModelError("the model's chat template changes the user's words; give the data yourself with --data")
    before, after = output.split(MARK)
    return Template(before, tuple(tokenizer(after, add_special_tokens=False).input_ids))


class Planner:
    """Turns seeds into plans for a writer."""

    def __init__(self, tokenizer: Any, pool: Pool, seed: int) -> None:
        self._tokenizer, self._pool = tokenizer, pool
        self._template = template_of(tokenizer)
        self._rng = random.Random(seed)
        self._seeds = SeedStream(pool.mix, seed)

    @property
    def bridge(self) -> int:
        return len(self._template.after) if self._template else 0

    def __iter__(self) -> Iterator[Plan]:
        while True:
            plan = self.plan(next(self._seeds))
            if plan is not None:
                yield plan

    def plan(self, seed: Seed) -> Plan | None:
        """None when the seed leaves no room for an answer."""
        template = self._template if seed.chat else None
        bridge = template.after if template else ()
        prompt = self._ids((template.before if template else "") + seed.text, special=template is None)
        if not seed.open and bridge:
            prompt += bridge
        room = self._pool.length - len(prompt) - len(bridge) - SHORTEST_ANSWER
        if not prompt or room <= 0:
            return None
        least, until = self._question(seed, len(prompt), min(room, self._pool.question), bool(bridge))
        length = min(self._pool.length, max(until + len(bridge), len(prompt)) + self._pool.answer)
        heat = self._rng.choices(HEATS, HEAT_SHARES)[0]
        return Plan(prompt, until, least, bridge if seed.open else (), heat, length, KINDS.index(seed.domain))

    def _question(self, seed: Seed, size: int, room: int, chat: bool) -> tuple[int, int]:
        """Between which lengths an open question ends; a plain text is only set going."""
        if not seed.open:
            return 0, 0
        if chat:
            return size + min(seed.floor, room), size + room
        going = min(max(seed.floor, self._rng.randint(4, RAW_QUESTION)), room)
        return size, size + going

    def _ids(self, text: str, special: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=special).input_ids) if text else ()


@dataclass(slots=True)
class Progress:
    """How far collecting is; handed to whoever shows it."""

    texts: int = 0
    tokens: int = 0
    wanted: int = 0
    seconds: float = 0.0


Watcher = Callable[[Progress], None]


class _Shelf:
    """Plans that are ready, put there by one thread and taken by another."""

    def __init__(self, size: int) -> None:
        self._ready: queue.Queue[Plan | Exception] = queue.Queue(size)
        self._closed = threading.Event()

    def fill(self, plans: Iterator[Plan]) -> None:
        try:
            for plan in plans:
                if not self._put(plan):
                    return
        except Exception as error:  # carried over to the thread that asks
            self._put(error)

    def _put(self, item: Plan | Exception) -> bool:
        """False: nobody wants it any more."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(item, timeout=0.2)
                return True
        return False

    def take(self) -> Plan:
        item = self._ready.get()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self._closed.set()


def prefetched(plans: Iterator[Plan], size: int) -> Generator[Plan, None, None]:
    """The same endless plans, made in a thread while the device works: a look at the rows must not wait for a
    tokenizer."""
    shelf = _Shelf(size)
    threading.Thread(target=shelf.fill, args=(plans,), daemon=True).start()
    try:
        while True:
            yield shelf.take()
    finally:
        shelf.close()


def collect(
    model: Any, tokenizer: Any, folder: Path, options: CollectOptions, watch: Watcher = lambda _: None
) -> Corpus:
    """All texts of `folder`, with as many new ones as are missing to options.tokens. Returns them without repeats."""
    held = loaded(folder)
    progress = Progress(sum(map(len, held)), sum(part.answer_tokens for part in held), options.tokens)
    began, missing = time.monotonic(), options.tokens - progress.tokens
    if missing > 0:
        remember_origin(model, folder)
        for number, pool in enumerate(pools(options, rows_that_fit(model, options))):
            # A later run must not write the same texts again, so what is there already is part of the seed.
            planner = Planner(tokenizer, pool, hash((options.seed, number, progress.texts)) & 0xFFFFFFFF)
            goal = _Goal(int(missing * pool.share), options.seconds * pool.share)
            held += _fill(model, planner, pool, goal, _Sink(folder, progress, began, watch))
    return Corpus.joined(held).without_repeats()


def loaded(folder: Path) -> list[Corpus]:
    """The shards of a folder, in the order in which they were written."""
    return [Corpus.load(path) for path in shards(folder)]


def remember_origin(model: Any, folder: Path, **others: Any) -> None:
    """Refuse to mix texts of two targets, or of the target and somebody's file, in one folder."""
    config = model.config.get_text_config()
    sizes = {"vocab_size": config.vocab_size, "layers": config.num_hidden_layers, "width": config.hidden_size}
    facts, path = {**sizes, **others}, folder / ORIGIN
    if path.is_file() and json.loads(path.read_text()) != facts:
        raise OptionError(f"{folder} holds texts of another target or other data; choose another folder with --texts")
    write_text(path, json.dumps(facts) + "\n")


@dataclass(frozen=True, slots=True)
class _Goal:
    """When a pool is full: enough tokens, or no time left."""

    tokens: int
    seconds: float


@dataclass(slots=True)
class _Sink:
    """Where finished texts go: into shards, and into what the watcher is shown."""

    folder: Path
    progress: Progress
    began: float
    watch: Watcher

    def save(self, texts: list[Text]) -> Corpus:
        part = Corpus.of(texts)
        part.save(self.folder / SHARD.format(len(shards(self.folder))))
        return part

    def count(self, text: Written) -> None:
        self.progress.texts += 1
        self.progress.tokens += len(text.tokens) - text.start
        self.progress.seconds = time.monotonic() - self.began
        self.watch(self.progress)


def _fill(model: Any, planner: Planner, pool: Pool, goal: _Goal, sink: _Sink) -> list[Corpus]:
    """Write until the goal is reached."""
    began, before = time.monotonic(), sink.progress.tokens
    writer = Writer(model, eos_token_ids_of(model), pool.rows, pool.length, planner.bridge)
    parts: list[Corpus] = []
    waiting: list[Text] = []

    def enough() -> bool:
        return sink.progress.tokens - before >= goal.tokens or time.monotonic() - began > goal.seconds

    plans = prefetched(iter(planner), 2 * pool.rows)
    try:
        for written in writer.write(plans, enough):
            waiting.append(Text(written.tokens, written.start, written.plan.tag, written.plan.heat == 0))
            sink.count(written)
            if len(waiting) >= TEXTS_A_SHARD:
                parts.append(sink.save(waiting))
                waiting = []
    except torch.OutOfMemoryError as error:
        raise too_many_rows(pool.rows) from error
    finally:
        plans.close()
    if waiting:
        parts.append(sink.save(waiting))
    return parts


def too_many_rows(rows: int) -> OutOfMemory:
    return OutOfMemory(f"writing {rows} texts at a time does not fit; choose fewer with --rows")


def rows_that_fit(model: Any, options: CollectOptions) -> int:
    """Texts at a time: by the free memory of a GPU, few on a CPU."""
    config = model.config.get_text_config()
    device = next(model.parameters()).device
    if device.type != "cuda":
        return 32
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    entry = 2 * config.num_hidden_layers * heads * size * torch.finfo(model.dtype).bits // 8
    # A row of short texts keeps its cache and, for a moment, several copies of its logits in fp32.
    row = min(432, options.longest) * entry + 6 * 4 * config.vocab_size
    free, _ = torch.cuda.mem_get_info(device)
    return max(16, min(4096, int(0.6 * free / row) // 16 * 16))
