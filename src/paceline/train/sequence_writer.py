"""What the data pipeline needs of a text generator: plans in, finished sequences out.

Collecting data depends on these records and protocols only, so the generator behind them can be exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from paceline.hub.model_config import DecoderSizes

MAX_LOGIT_GAP = 3.5  # sampled tokens are at least exp(-3.5) times as likely as the best one: small models ramble
SHORTEST_CUT_ANSWER = 16  # of an answer that was under way when the writer was stopped


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """One sequence to be generated: the prompt, then optionally an invented question and its bridge, then the answer.

    prompt            token ids the sequence starts with
    question_max_len  the invented question ends at this sequence length at the latest; 0: no question is invented
    question_min_len  the question does not end before this sequence length
    bridge            tokens from the end of the question to the answer; () where the sequence simply continues
    temperature       of the answer, 0 is greedy; questions are sampled at temperature 1
    max_len           most tokens of the whole sequence
    tag               a number by which the caller recognises the sequence
    """

    prompt: tuple[int, ...]
    question_max_len: int
    question_min_len: int
    bridge: tuple[int, ...]
    temperature: float
    max_len: int
    tag: int = 0


def answer_plan(prompt: list[int], temperature: float, max_len: int, tag: int = 0) -> GenerationPlan:
    """A plan without an invented question: the prompt is answered at once."""
    return GenerationPlan(tuple(prompt), 0, 0, (), temperature, max_len, tag)


@dataclass(frozen=True, slots=True)
class GeneratedSequence:
    """A finished sequence; the answer starts at `start`."""

    tokens: list[int]
    start: int
    plan: GenerationPlan

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - self.start


@dataclass(frozen=True, slots=True)
class WriterLimits:
    """Upper bounds of what one writer generates."""

    num_seqs: int
    max_len: int
    bridge_len: int = 0


class SequenceWriter(Protocol):
    """Generates sequences with the target."""

    def write(self, plans: Iterator[GenerationPlan], stop: Callable[[], bool]) -> Iterator[GeneratedSequence]:
        """Yield sequences in the order in which they finish, until `stop()` is true or the plans run out.

        Plans are taken as sequences finish, so `plans` may be endless. After `stop()`, answers that are under way are
        yielded as they are. Raises OutOfMemory where the limits are too large.
        """


class WriterFactory(Protocol):
    """Opens writers of one target."""

    @property
    def sizes(self) -> DecoderSizes:
        """Sizes of the target, by which its data is recognised."""

    def num_seqs_that_fit(self, max_len: int) -> int:
        """How many sequences of this length can be generated at once."""

    def open(self, limits: WriterLimits) -> SequenceWriter:
        """A writer for plans within these limits."""
