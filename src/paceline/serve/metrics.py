"""Numbers for Prometheus. What the engine counts is read when asked for; what only the edge knows is observed here."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.protocols import Engine
from paceline.core.stats import EngineStats, SpecStats
from paceline.core.types import RequestOutput

FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
KS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)


class Metrics:
    """One registry a server, so that two servers in one process do not mix."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "paceline_requests", "HTTP requests by route and outcome", ("route", "status"), registry=self.registry
        )
        self.first = Histogram(
            "paceline_time_to_first_token_seconds", "From request to first token", buckets=FIRST, registry=self.registry
        )
        self.between = Histogram(
            "paceline_time_between_tokens_seconds", "Between tokens of a text", buckets=BETWEEN, registry=self.registry
        )
        self.whole = Histogram(
            "paceline_request_seconds", "From first byte to last", ("route",), buckets=WHOLE, registry=self.registry
        )
        self.registry.register(EngineNumbers(engine))

    def shown(self) -> bytes:
        return generate_latest(self.registry)

    async def timed(self, outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
        """Pass pieces on and take their times."""
        last, first = time.perf_counter(), True
        async with aclosing(outputs) as stream:  # type: ignore[type-var]
            async for output in stream:
                now = time.perf_counter()
                if first and output.token_ids:
                    self.first.observe(now - last)
                    first = False
                elif output.token_ids:
                    self.between.observe((now - last) / len(output.token_ids))
                last = now
                yield output


class EngineNumbers(Collector):
    """What an engine is doing and has done, read at the moment of asking."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        load = self._engine.stats()
        yield from _now(load)
        yield from _so_far(load)
        yield _ks(load)
        by_method = load.by_method or {"default": load.spec}
        yield from _guessing(by_method)
        yield _by_position("paceline_offered_at_position", "Rounds that offered a guess at this depth", by_method)
        yield _by_position("paceline_accepted_at_position", "Guesses that stood, by depth", by_method)


def _now(load: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("paceline_waiting", "Texts in the queue", load.waiting)
    yield GaugeMetricFamily("paceline_running", "Texts being read or written", load.running)
    pages = GaugeMetricFamily("paceline_cache_pages", "Pages of the cache by what holds them", labels=("state",))
    for state, count in (("used", load.blocks_used), ("cached", load.blocks_cached), ("free", load.blocks_free)):
        pages.add_metric((state,), count)
    yield pages


def _so_far(load: EngineStats) -> Iterator[Metric]:
    yield CounterMetricFamily("paceline_prefix_hits", "Texts whose beginning was already read", load.prefix_hits)
    yield CounterMetricFamily("paceline_prefix_tokens", "Prompt tokens that were not read again", load.prefix_tokens)
    yield CounterMetricFamily("paceline_prompt_tokens", "Prompt tokens of all texts", load.prompt_tokens)
    yield CounterMetricFamily("paceline_preemptions", "Texts sent back because pages ran out", load.preemptions)
    yield CounterMetricFamily("paceline_failed_rounds", "Rounds that broke", load.failures)


def _ks(load: EngineStats) -> Metric:
    family = HistogramMetricFamily("paceline_draft_tokens", "Guesses allowed a text and round (k)")
    buckets = [(str(edge), sum(count for k, count in load.draft_lengths.items() if k <= edge)) for edge in KS]
    total = sum(load.draft_lengths.values())
    family.add_metric((), [*buckets, ("+Inf", total)], sum(k * count for k, count in load.draft_lengths.items()))
    return family


def _guessing(by_method: dict[str, SpecStats]) -> Iterator[Metric]:
    names = {
        "new_tokens": ("paceline_generated_tokens", "Tokens written"),
        "steps": ("paceline_steps", "Passes of the target that wrote tokens"),
        "drafted": ("paceline_drafted_tokens", "Guesses put to the target"),
        "accepted": ("paceline_accepted_tokens", "Guesses that stood"),
    }
    for field, (name, words) in names.items():
        family = CounterMetricFamily(name, words, labels=("method",))
        for method, stats in by_method.items():
            family.add_metric((method,), getattr(stats, field))
        yield family


def _by_position(name: str, words: str, by_method: dict[str, SpecStats]) -> Metric:
    family = CounterMetricFamily(name, words, labels=("method", "position"))
    for method, stats in by_method.items():
        counts = stats.offered_at if "offered" in name else stats.accepted_at
        for depth, count in enumerate(list(counts)):
            family.add_metric((method, str(depth + 1)), count)
    return family
