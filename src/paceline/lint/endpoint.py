"""What a running server makes of a head: its acceptance at position 1 against what the head reaches here.

The server answers the prompts that the target answered here. What a reading reaches here is counted over the same
steps: after a rejected draft token the next step starts behind the token that replaced it. A reading that the server
may have is one that gives the server's figures here, at every position the server tells of; there may be several.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from paceline.config import EngineConfig
from paceline.core.protocols import Engine
from paceline.core.sampling import SamplingParams
from paceline.core.stats import SpecStats
from paceline.core.types import Request
from paceline.errors import OptionError
from paceline.heads.checkpoint import Checkpoint
from paceline.lint.comparison import Acceptance, error_probability
from paceline.lint.run import ALPHA, LintResult, TriedReading, acceptance
from paceline.lint.target import StatedText
from paceline.lint.text import WrittenAnswer

OpenEngine = Callable[[EngineConfig], Engine]
MOST_POSITIONS = 8  # draft tokens of a step that are followed here
ALIKE = 2.5  # standard errors at any position within which a reading gives the server's figures
FAR = 4.0  # standard errors at which a part of the text tells that a reading is not the server's


@dataclass(frozen=True, slots=True)
class PositionCount:
    """Steps that verified a draft token at a position, and how many of them accepted it."""

    offered: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / max(1, self.offered)

    @property
    def error(self) -> float:
        """Binomial standard error of the rate."""
        return math.sqrt(self.rate * (1 - self.rate) / max(1, self.offered))

    def z(self, other: PositionCount) -> float:
        """How far this rate is above another one, in standard errors of two proportions."""
        pooled = (self.accepted + other.accepted) / max(1, self.offered + other.offered)
        spread = pooled * (1 - pooled) * (1 / max(1, self.offered) + 1 / max(1, other.offered))
        return (self.rate - other.rate) / math.sqrt(spread) if spread > 0 else 0.0

    def __str__(self) -> str:
        return f"{self.rate:.2f} ± {self.error:.2f}"

    def as_dict(self) -> dict[str, float]:
        return {"offered": self.offered, "accepted": self.accepted, "rate": self.rate, "standard_error": self.error}


@dataclass(frozen=True, slots=True)
class LikelyReading:
    """A reading that gives the server's figures here. z: of the position at which they are furthest apart."""

    name: str
    here: PositionCount
    z: float

    def __str__(self) -> str:
        return f"{self.name} ({self.here.rate:.2f})"


@dataclass(frozen=True, slots=True)
class ServerComparison:
    """A server's acceptance at position 1 beside that of the best reading here.

    likely: where the server's is lower, the readings that give its figures, the nearest first
    """

    url: str
    server: PositionCount
    here: PositionCount
    likely: tuple[LikelyReading, ...] = ()

    @property
    def z(self) -> float:
        return self.here.z(self.server)

    @property
    def probability(self) -> float:
        """Of a difference at least this large if the server reads the head rightly."""
        return error_probability(self.z, 1)

    @property
    def lower(self) -> bool:
        return self.probability < ALPHA

    def line(self) -> str:
        """The comparison in one line."""
        rates = f"this server's acceptance at position 1 is {self.server}, the head reaches {self.here}"
        if not self.lower:
            return f"server   {rates} here: as it should be (z = {self.z:+.1f})"
        return f"server   {rates} here (z = {self.z:.1f}, error probability {self.probability:.1g}); {self._cause()}"

    def _cause(self) -> str:
        names = " or ".join(map(str, self.likely))
        if not names:
            return "no reading tried here gives the server's figure"
        return f"{'readings' if len(self.likely) > 1 else 'the only reading'} tried here with its figure: {names}"

    def as_dict(self) -> dict[str, Any]:
        """For a JSON document."""
        rates = {"server": self.server.as_dict(), "here": self.here.as_dict()}
        likely = [{"reading": entry.name, **entry.here.as_dict(), "z": entry.z} for entry in self.likely]
        return {"url": self.url, **rates, "z": self.z, "error_probability": self.probability, "likely": likely}


def compare_server(
    url: str, model: str, answers: list[WrittenAnswer], text: StatedText, result: LintResult, open_engine: OpenEngine
) -> ServerComparison:
    """Let the server answer the same prompts. Raises OptionError where it tells nothing of draft tokens."""
    config = EngineConfig.create(engine="http", engine_options={"url": url, "tokenizer": model})
    stats = asyncio.run(_answered(open_engine(config), answers))
    if not stats.drafted:
        raise OptionError(f"the server at {url} tells nothing of draft tokens; start it with this head")
    if not stats.offered_at:
        raise OptionError(f"the server at {url} does not count draft tokens by position: nothing can be compared")
    server = _Server(list(map(PositionCount, stats.offered_at, stats.accepted_at)), _draft_length(stats), text)
    here = server.figures(result.files)[0]
    comparison = ServerComparison(url, server.counts[0], here)
    return replace(comparison, likely=server.likely(result)) if comparison.lower else comparison


def _draft_length(stats: SpecStats) -> int:
    """Draft tokens of a step; the last steps of an answer may have fewer."""
    return max(len(stats.offered_at), -(-stats.drafted // max(1, stats.offered_at[0])))


@dataclass(frozen=True, slots=True, eq=False)
class _Server:
    """A server's counts by position, its draft tokens a step, and the text it has answered with."""

    counts: list[PositionCount]
    k: int
    text: StatedText

    def figures(self, files: Checkpoint) -> list[PositionCount]:
        """What these files reach here in the server's place."""
        return stepped(acceptance(files, self.text, min(self.k, MOST_POSITIONS)), self.text)

    def likely(self, result: LintResult) -> tuple[LikelyReading, ...]:
        """The readings of the files that give the server's figures."""
        entries = (result.as_given, *result.tried) if result.changes else result.tried
        possible = [entry for entry in entries if entry is not result.best and self._near(entry)]
        measured = [self._measured(entry.reading.name, entry.reading.edit(result.given)) for entry in possible]
        alike = [entry for entry in measured if abs(entry.z) < ALIKE]
        return tuple(sorted(alike, key=lambda entry: abs(entry.z)))

    def _near(self, entry: TriedReading) -> bool:
        """Whether the text a reading was tried on does not tell its rate from the server's."""
        if entry.acceptance is None or entry.error:
            return False
        return abs(stepped(entry.acceptance, self.text)[0].z(self.counts[0])) < FAR

    def _measured(self, name: str, files: Checkpoint) -> LikelyReading:
        figures = self.figures(files)
        deviates = [figure.z(count) for figure, count in zip(figures, self.counts)]
        return LikelyReading(name, figures[0], max(deviates, key=abs))


async def _answered(engine: Engine, answers: list[WrittenAnswer]) -> SpecStats:
    """The server's counts over the answers, all asked for at once."""

    async def counts(answer: WrittenAnswer) -> SpecStats:
        seq, stats = answer.seq, SpecStats()
        request = Request(seq.tokens[: seq.start], SamplingParams(0.0), len(seq.tokens) - seq.start)
        async for output in engine.generate(request):
            stats = output.stats or stats
        return stats

    try:
        total = SpecStats()
        for stats in await asyncio.gather(*(counts(answer) for answer in answers)):
            total.add(stats)
        return total
    finally:
        await engine.close()


def stepped(measured: Acceptance, text: StatedText) -> list[PositionCount]:
    """By position: the steps that greedy decoding takes along the text, or its first part, with accepted lengths."""
    anchors = text.anchors(measured.k)
    rows, columns = anchors.row.tolist(), anchors.column.tolist()
    lengths: list[int] = []
    next_column: dict[int, int] = {}
    for row, column, length in zip(rows, columns, measured.lengths.tolist()):
        if column >= next_column.get(row, 0):
            lengths.append(length)
            next_column[row] = column + length + 1
    reached = [sum(length > position for length in lengths) for position in range(measured.k)]
    return [PositionCount(len(lengths), count) for count in reached]
