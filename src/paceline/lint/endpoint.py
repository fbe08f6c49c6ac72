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


@dataclass(frozen=True, slots=True)
class FirstPosition:
    """Draft tokens at position 1: how many were verified, and how many of them accepted."""

    offered: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / max(1, self.offered)

    def z(self, other: FirstPosition) -> float:
        """How far this rate is above another one, in standard errors of two proportions."""
        pooled = (self.accepted + other.accepted) / max(1, self.offered + other.offered)
        spread = pooled * (1 - pooled) * (1 / max(1, self.offered) + 1 / max(1, other.offered))
        return (self.rate - other.rate) / math.sqrt(spread) if spread > 0 else 0.0

    def as_dict(self) -> dict[str, float]:
        return {"offered": self.offered, "accepted": self.accepted, "rate": self.rate}


@dataclass(frozen=True, slots=True)
class ServerComparison:
    """A server's acceptance beside that of the best reading here. alike: a reading here that is as bad, if any."""

    url: str
    server: FirstPosition
    here: FirstPosition
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
    first = bool(stats.offered_at)
    server = FirstPosition(
        stats.offered_at[0] if first else stats.drafted, stats.accepted_at[0] if first else stats.accepted
    )
    k = max(1, len(stats.offered_at))  # draft tokens the server verifies in a step
    here = stepped(acceptance(result.files, text, min(k, MOST_POSITIONS)), text, k)
    alike = _alike(server, [result.as_given, *result.tried], result.best, lambda measured: stepped(measured, text, k))
    return ServerComparison(url, server, here, alike if here.z(server) > 0 else None)


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


def stepped(measured: Acceptance, text: StatedText, k: int) -> FirstPosition:
    """The steps that greedy decoding takes along the text with these accepted lengths and k draft tokens a step."""
    anchors = text.anchors(measured.k)
    rows, columns = anchors.row.tolist(), anchors.column.tolist()
    offered = accepted = 0
    next_column: dict[int, int] = {}
    for row, column, length in zip(rows, columns, measured.lengths.clamp(max=k).tolist()):
        if column >= next_column.get(row, 0):
            offered, accepted = offered + 1, accepted + (length > 0)
            next_column[row] = column + length + 1
    return FirstPosition(offered, accepted)


def _alike(
    server: FirstPosition,
    tried: list[TriedReading],
    best: TriedReading,
    counted: Callable[[Acceptance], FirstPosition],
) -> str | None:
    """The reading whose acceptance is nearest to the server's, if it is within the error."""
    measured = [(entry.reading.name, entry.acceptance) for entry in tried if entry is not best and not entry.error]
    distances = {name: abs(counted(value).z(server)) for name, value in measured if value is not None}
    nearest = min(distances, key=lambda name: distances[name], default=None)
    return nearest if nearest is not None and distances[nearest] < ALIKE else None
