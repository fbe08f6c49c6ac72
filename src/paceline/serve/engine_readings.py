"""What the metrics read of the engines at every scrape."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.protocols import Engine
from paceline.core.stats import EngineStats, SpecStats
from paceline.errors import EngineFailed
from paceline.serve.fair_queue import FairQueue


@dataclass(frozen=True, slots=True)
class EngineSource:
    """An engine, the name of its model, and the sequences that wait for it in the server."""

    model: str
    engine: Engine
    queue: FairQueue

    def is_up(self) -> bool:
        try:
            self.engine.check_health()
        except EngineFailed:
            return False
        return True


@dataclass(frozen=True, slots=True)
class EngineReading:
    """The stats of one engine at the time of the scrape."""

    model: str
    stats: EngineStats
    num_waiting: int
    is_up: bool
    by_method: dict[str, SpecStats]

    @classmethod
    def of(cls, source: EngineSource) -> EngineReading:
        stats, engine = source.engine.stats(), source.engine
        by_method = stats.by_method or {engine.methods[0]: stats.spec}
        return cls(source.model, stats, stats.waiting + source.queue.num_waiting, source.is_up(), by_method)

    @property
    def spec(self) -> SpecStats:
        """The counts of all methods together."""
        total = SpecStats()
        for spec in self.by_method.values():
            total.add(spec)
        return total

    @property
    def num_blocks(self) -> int:
        return self.stats.blocks_used + self.stats.blocks_cached + self.stats.blocks_free
