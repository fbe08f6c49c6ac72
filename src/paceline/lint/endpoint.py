"""What a running server makes of a head: its acceptance by position against what the head reaches here.

The server answers the prompts that the target answered here. What a reading reaches here is counted over the same
steps: after a rejected draft token the next step starts behind the token that replaced it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.config import EngineConfig
from paceline.core.protocols import Engine
from paceline.core.sampling import SamplingParams
from paceline.core.stats import SpecStats
from paceline.core.types import Request
from paceline.errors import OptionError
from paceline.lint.comparison import Acceptance, error_probability
from paceline.lint.run import ALPHA, LintResult, TriedReading, acceptance
from paceline.lint.target import StatedText
from paceline.lint.text import WrittenAnswer

OpenEngine = Callable[[EngineConfig], Engine]
MOST_POSITIONS = 8  # draft tokens of a step that are followed here
ALIKE = 2.0  # a reading less than this many standard errors away may be the server's
MOST_ALIKE = 3  # readings that are counted over the whole text, to tell which is nearest


@dataclass(frozen=True, slots=True)
class PositionCount:
    """Draft tokens at one position of a step: how many were verified, and how many of them accepted."""

    offered: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / max(1, self.offered)

    def z(self, other: PositionCount) -> float:
        """How far this rate is above another one, in standard errors of two proportions."""
        pooled = (self.accepted + other.accepted) / max(1, self.offered + other.offered)
        spread = pooled * (1 - pooled) * (1 / max(1, self.offered) + 1 / max(1, other.offered))
        return (self.rate - other.rate) / math.sqrt(spread) if spread > 0 else 0.0

    def as_dict(self) -> dict[str, float]:
        return {"offered": self.offered, "accepted": self.accepted, "rate": self.rate}


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The positions of all steps along a text, from position 1 on."""

    positions: tuple[PositionCount, ...]

    @classmethod
    def of(cls, stats: SpecStats) -> StepCounts:
        """What a server tells; one that tells nothing by position counts as drafting one token a step."""
        if not stats.offered_at:
            return cls((PositionCount(stats.drafted, stats.accepted),))
        return cls(tuple(map(PositionCount, stats.offered_at, stats.accepted_at)))

    @property
    def first(self) -> PositionCount:
        return self.positions[0]

    def distance(self, other: StepCounts) -> float:
        """Root mean square of the standard errors between the rates, over the positions that both have."""
        errors = [own.z(its) for own, its in zip(self.positions, other.positions) if own.offered and its.offered]
        return math.sqrt(sum(error * error for error in errors) / len(errors)) if errors else math.inf


@dataclass(frozen=True, slots=True)
class ServerComparison:
    """A server's acceptance beside that of the best reading here. alike: a reading here that is as bad, if any."""

    url: str
    server: PositionCount
    here: PositionCount
    alike: str | None

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
        rates = f"this server's acceptance at position 1 is {self.server.rate:.2f}, the head reaches"
        rates = f"{rates} {self.here.rate:.2f}"
        if not self.lower:
            return f"server   {rates} here: as it should be (z = {self.z:+.1f})"
        reading = f"; it reads the head like: {self.alike}" if self.alike else ""
        return f"server   {rates} here (z = {self.z:.1f}, error probability {self.probability:.1g}){reading}"

    def as_dict(self) -> dict[str, Any]:
        """For a JSON document."""
        rates = {"server": self.server.as_dict(), "here": self.here.as_dict()}
        return {"url": self.url, **rates, "z": self.z, "error_probability": self.probability, "alike": self.alike}


def compare_server(
    url: str, model: str, answers: list[WrittenAnswer], text: StatedText, result: LintResult, open_engine: OpenEngine
) -> ServerComparison:
    """Let the server answer the same prompts. Raises OptionError where it tells nothing of draft tokens."""
    config = EngineConfig.create(engine="http", engine_options={"url": url, "tokenizer": model})
    stats = asyncio.run(_answered(open_engine(config), answers))
    if not stats.drafted:
        raise OptionError(f"the server at {url} tells nothing of draft tokens; start it with this head")
    server = StepCounts.of(stats)
    followed = _Followed(text, len(server.positions))
    here = followed.counts(acceptance(result.files, text, followed.num_positions))
    alike = followed.alike(server, result) if here.first.z(server.first) > 0 else None
    return ServerComparison(url, server.first, here.first, alike)


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


@dataclass(frozen=True, slots=True, eq=False)
class _Followed:
    """The steps that greedy decoding takes along a text with `k` draft tokens each."""

    text: StatedText
    k: int

    @property
    def num_positions(self) -> int:
        return min(self.k, MOST_POSITIONS)

    def counts(self, measured: Acceptance) -> StepCounts:
        """The steps with these accepted lengths: each starts behind the token that replaced the first rejected one."""
        anchors = self.text.anchors(measured.k)
        rows, columns = anchors.row.tolist(), anchors.column.tolist()
        reached = [0] * (1 + min(self.k, measured.k))  # steps with at least so many accepted tokens
        next_column: dict[int, int] = {}
        for row, column, length in zip(rows, columns, measured.lengths.clamp(max=self.k).tolist()):
            if column >= next_column.get(row, 0):
                next_column[row] = column + length + 1
                for count in range(length + 1):
                    reached[count] += 1
        return StepCounts(tuple(map(PositionCount, reached, reached[1:])))

    def alike(self, server: StepCounts, result: LintResult) -> str | None:
        """The reading whose acceptance is nearest to the server's, if it is within the error."""
        tried = [entry for entry in (result.as_given, *result.tried) if entry is not result.best and not entry.error]
        distances = {
            entry.reading.name: self.counts(entry.acceptance).distance(server)
            for entry in tried
            if entry.acceptance is not None
        }
        near = [entry for entry in tried if distances.get(entry.reading.name, math.inf) < ALIKE]
        near = sorted(near, key=lambda entry: distances[entry.reading.name])[:MOST_ALIKE]
        if result.correct:  # readings that a part of the text showed to be worse are known on that part alone
            distances |= {entry.reading.name: self._distance(entry, server, result) for entry in near}
        nearest = min(near, key=lambda entry: distances[entry.reading.name], default=None)
        return nearest.reading.name if nearest and distances[nearest.reading.name] < ALIKE else None

    def _distance(self, entry: TriedReading, server: StepCounts, result: LintResult) -> float:
        files = entry.reading.edit(result.files)
        return self.counts(acceptance(files, self.text, self.num_positions)).distance(server)
