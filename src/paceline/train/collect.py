"""The target generates its own training data.

It gets the opening of a user's turn, invents the rest of the question and answers it; or it continues a raw text.
Sequences are kept as token ids in shards, so a second run reuses them and generates only what is missing.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import ModelError, OptionError
from paceline.train.atomic import write_text
from paceline.train.corpus import DOMAINS, SHARD, Corpus, TrainingSequence, shards
from paceline.train.options import setting
from paceline.train.prefetch import prefetched
from paceline.train.seeds import LONG, SHORT, Mix, Seed, SeedStream
from paceline.train.sequence_writer import GeneratedSequence, GenerationPlan, WriterFactory, WriterLimits

USER_TEXT = "\u241f"  # placeholder of the user's text while a chat template is taken apart
TEMPERATURES = (0.5, 0.8, 1.0)
SEQS_PER_SHARD = 20_000
SHORT_SEQ_LEN = 432
ORIGIN = "origin.json"
SHORTEST_ANSWER = 32
RAW_QUESTION = 24  # most tokens after a raw opening before the sequence counts as the target's answer


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """How much the target generates, and how. 0 means the usual amount, which is in the help."""

    answer_tokens: int = setting(0, "answer tokens the target generates (4000000 on a GPU, 100000 on a CPU)")
    generate_minutes: float = setting(0.0, "stop generating after this long (no limit)", "M")
    max_seq_len: int = setting(1152, "most tokens of a sequence, and at most what the target reads")
    max_num_seqs: int = setting(0, "sequences generated at a time (by the free memory)")
    greedy_share: float = setting(0.6, "share of greedy answers; the others are sampled at 0.5 to 1", "S")
    seed: int = setting(0, "seed of data, order and weights")

    def __post_init__(self) -> None:
        if not 0 <= self.greedy_share <= 1:
            raise OptionError(f"--greedy-share lies between 0 and 1, not at {self.greedy_share}")
        if self.max_seq_len < 64:
            raise OptionError(f"--max-seq-len must be 64 or more, not {self.max_seq_len}")

    @property
    def seconds(self) -> float:
        return 60 * self.generate_minutes or float("inf")

    def within(self, max_seq_len: int) -> CollectOptions:
        """The same for a target that reads at most so many tokens."""
        return replace(self, max_seq_len=min(self.max_seq_len, max_seq_len))

    def resolved(self, gpu: bool) -> CollectOptions:
        """The same with a number of answer tokens; where minutes are given, time alone ends the generating."""
        usual = 10**12 if self.generate_minutes else 4_000_000 if gpu else 100_000
        return replace(self, answer_tokens=self.answer_tokens or usual)


def temperature(rng: random.Random, greedy_share: float) -> float:
    """Of one answer."""
    return 0.0 if rng.random() < greedy_share else rng.choice(TEMPERATURES)


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Sequences of one length that are generated together. share: of the answer tokens."""

    mix: Mix
    max_len: int
    num_seqs: int
    question_len: int
    answer_len: int
    share: float
    greedy_share: float = 0.6


def length_buckets(options: CollectOptions, num_seqs: int) -> list[LengthBucket]:
    """Most sequences are short, a few are long: the drafter meets late positions too."""
    short, longest = min(SHORT_SEQ_LEN, options.max_seq_len), options.max_seq_len
    bucket = LengthBucket(SHORT, short, num_seqs, short // 3, 288, 0.75, options.greedy_share)
    if longest == short:
        return [replace(bucket, share=1.0)]
    num_long_seqs = max(1, num_seqs * short // longest)
    return [bucket, LengthBucket(LONG, longest, num_long_seqs, longest * 5 // 8, 320, 0.25, options.greedy_share)]


@dataclass(frozen=True, slots=True)
class ChatTemplateParts:
    """A chat template taken apart: the string before a user's first turn, and the tokens from its end to the answer."""

    before: str
    after: tuple[int, ...]


def template_parts(tokenizer: Any) -> ChatTemplateParts | None:
    """None where the model has no chat template: then only raw texts are continued."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turn = [{"role": "user", "content": USER_TEXT}]
    formatted = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    if formatted.count(USER_TEXT) != 1:
        raise ModelError("the model's chat template changes the user's text; give data of your own with --data")
    before, after = formatted.split(USER_TEXT)
    return ChatTemplateParts(before, tuple(tokenizer(after, add_special_tokens=False).input_ids))


def before_turn(tokenizer: Any, history: tuple[str, ...]) -> str:
    """The formatted conversation up to the user's next turn."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, (*history, USER_TEXT))]
    formatted: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return formatted.partition(USER_TEXT)[0]


@dataclass(frozen=True, slots=True)
class _QuestionLimits:
    """Sequence lengths between which an invented question ends; 0 and 0 where none is invented."""

    min_len: int = 0
    max_len: int = 0


class PromptPlanner:
    """Turns seeds into plans for a writer: an endless iterator."""

    def __init__(self, tokenizer: Any, bucket: LengthBucket, seed: int) -> None:
        self._tokenizer, self._bucket = tokenizer, bucket
        self._template = template_parts(tokenizer)
        self._rng = random.Random(seed)
        self._seeds = SeedStream(bucket.mix, seed)

    @property
    def bridge_len(self) -> int:
        return len(self._template.after) if self._template else 0

    def __iter__(self) -> Iterator[GenerationPlan]:
        for seed in self._seeds:
            plan = self.plan(seed)
            if plan is not None:
                yield plan

    def plan(self, seed: Seed) -> GenerationPlan | None:
        """None when the seed leaves no room for an answer."""
        bucket, template = self._bucket, self._template if seed.chat else None
        bridge = template.after if template else ()
        prompt = self._ids(self._before(seed, template) + seed.text, special=template is None)
        if not seed.open and bridge:
            prompt += bridge
        room = bucket.max_len - len(prompt) - len(bridge) - SHORTEST_ANSWER
        if not prompt or room <= 0:
            return None
        question = self._question(seed, len(prompt), min(room, bucket.question_len), bool(bridge))
        max_len = min(bucket.max_len, max(question.max_len + len(bridge), len(prompt)) + bucket.answer_len)
        heat = temperature(self._rng, bucket.greedy_share)
        bridge = bridge if seed.open else ()
        tag = DOMAINS.index(seed.domain)
        return GenerationPlan(prompt, question.max_len, question.min_len, bridge, heat, max_len, tag)

    def _before(self, seed: Seed, template: ChatTemplateParts | None) -> str:
        """What stands before the seed's text: nothing, or the template with the earlier turns."""
        if template is None:
            return ""
        return before_turn(self._tokenizer, seed.history) if seed.history else template.before

    def _question(self, seed: Seed, size: int, room: int, chat: bool) -> _QuestionLimits:
        """Lengths between which an open question ends; a raw text only gets a few tokens."""
        if not seed.open:
            return _QuestionLimits()
        if chat:
            return _QuestionLimits(size + min(seed.min_tokens, room), size + room)
        num_tokens = min(max(seed.min_tokens, self._rng.randint(4, RAW_QUESTION)), room)
        return _QuestionLimits(size, size + num_tokens)

    def _ids(self, text: str, special: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=special).input_ids) if text else ()


@dataclass(slots=True)
class CollectProgress:
    """How far collecting is, for display."""

    num_seqs: int = 0
    answer_tokens: int = 0
    goal_tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, parts: list[Corpus], goal_tokens: int = 0) -> CollectProgress:
        return cls(sum(map(len, parts)), sum(part.answer_tokens for part in parts), goal_tokens)


CollectWatcher = Callable[[CollectProgress], None]


def collect(
    writers: WriterFactory,
    tokenizer: Any,
    folder: Path,
    options: CollectOptions,
    watch: CollectWatcher = lambda _: None,
) -> Corpus:
    """All sequences of `folder`, with as many new ones as the goal still needs, without repeats."""
    parts = load_shards(folder)
    progress = CollectProgress.of(parts, options.answer_tokens)
    missing = options.answer_tokens - progress.answer_tokens
    if missing > 0:
        check_origin(writers, folder)
        sink = _ShardSink(folder, progress, watch)
        for number, bucket in enumerate(length_buckets(options, num_seqs_at_once(writers, options))):
            # A later run must not generate the same sequences again, so the number of present ones is in the seed.
            seed = hash((options.seed, number, progress.num_seqs)) & 0xFFFFFFFF
            goal = _BucketGoal(int(missing * bucket.share), options.seconds * bucket.share)
            parts += _fill(writers, PromptPlanner(tokenizer, bucket, seed), bucket, goal, sink)
    return Corpus.joined(parts).without_repeats()


def load_shards(folder: Path) -> list[Corpus]:
    """The shards of a folder, in the order in which they were written."""
    return [Corpus.load(path) for path in shards(folder)]


def num_seqs_at_once(writers: WriterFactory, options: CollectOptions) -> int:
    return options.max_num_seqs or writers.num_seqs_that_fit(min(SHORT_SEQ_LEN, options.max_seq_len))


def check_origin(writers: WriterFactory, folder: Path, **others: Any) -> None:
    """Refuse to mix data of two targets, or generated data and a data file, in one folder."""
    sizes = writers.sizes
    origin = {
        "vocab_size": sizes.vocab_size,
        "num_layers": sizes.num_layers,
        "hidden_size": sizes.hidden_size,
        **others,
    }
    path = folder / ORIGIN
    if path.is_file() and json.loads(path.read_text()) != origin:
        raise OptionError(
            f"{folder} holds sequences of another target or other data; choose another folder with --sequences"
        )
    write_text(path, json.dumps(origin) + "\n")


@dataclass(frozen=True, slots=True)
class _BucketGoal:
    """When a bucket is full: enough tokens, or no time left."""

    tokens: int
    seconds: float


@dataclass(slots=True)
class _ShardSink:
    """Writes finished sequences into shards and reports progress."""

    folder: Path
    progress: CollectProgress
    watch: CollectWatcher
    began: float = field(default_factory=time.monotonic)

    def save(self, seqs: list[TrainingSequence]) -> Corpus:
        part = Corpus.of(seqs)
        part.save(self.folder / SHARD.format(len(shards(self.folder))))
        return part

    def count(self, seq: GeneratedSequence) -> None:
        self.progress.num_seqs += 1
        self.progress.answer_tokens += seq.answer_tokens
        self.progress.seconds = time.monotonic() - self.began
        self.watch(self.progress)


def _fill(
    writers: WriterFactory, planner: PromptPlanner, bucket: LengthBucket, goal: _BucketGoal, sink: _ShardSink
) -> list[Corpus]:
    """Generate until the goal is reached."""
    began, before = time.monotonic(), sink.progress.answer_tokens
    writer = writers.open(WriterLimits(bucket.num_seqs, bucket.max_len, planner.bridge_len))
    parts: list[Corpus] = []
    unsaved: list[TrainingSequence] = []

    def enough() -> bool:
        return sink.progress.answer_tokens - before >= goal.tokens or time.monotonic() - began > goal.seconds

    with prefetched(iter(planner), 2 * bucket.num_seqs) as plans:
        for seq in writer.write(plans, enough):
            unsaved.append(TrainingSequence(seq.tokens, seq.start, seq.plan.tag, seq.plan.temperature == 0))
            sink.count(seq)
            if len(unsaved) >= SEQS_PER_SHARD:
                parts.append(sink.save(unsaved))
                unsaved = []
    if unsaved:
        parts.append(sink.save(unsaved))
    return parts
