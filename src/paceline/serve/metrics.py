"""Metrics for Prometheus, by model. Engines' counters are read at every scrape; latencies are observed here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.protocols import Engine
from paceline.core.stats import EngineStats, SpecStats
from paceline.core.types import RequestOutput
from paceline.errors import EngineFailed
from paceline.serve.fair_queue import FairQueue
from paceline.serve.learning_metrics import learning_metrics

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
DRAFT_LENGTH_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)


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


class Metrics:
    """The metrics of one server. Each has its own registry, so that two servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "paceline_http_requests", "HTTP requests by route and status", ("route", "status"), registry=self.registry
        )
        self.time_to_first_token = self._histogram(
            "paceline_time_to_first_token_seconds", "From request to first token", FIRST_TOKEN_BUCKETS, ("model",)
        )
        self.inter_token_latency = self._histogram(
            "paceline_inter_token_latency_seconds", "Between two tokens of a sequence", INTER_TOKEN_BUCKETS, ("model",)
        )
        self.request_latency = self._histogram(
            "paceline_e2e_request_latency_seconds", "From first byte to last", REQUEST_BUCKETS, ("route",)
        )
        self._engines = EngineCollector()
        self.registry.register(self._engines)

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...], labels: tuple[str, ...]) -> Histogram:
        return Histogram(name, description, labels, buckets=buckets, registry=self.registry)

    def add_engine(self, source: EngineSource) -> None:
        """Export the stats of one more engine, its latencies from the first scrape on."""
        for histogram in (self.time_to_first_token, self.inter_token_latency):
            histogram.labels(source.model)
        self._engines.sources.append(source)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        self.http_requests.labels(route, str(status)).inc()
        self.request_latency.labels(route).observe(seconds)


class TokenTimer:
    """Observes the token latencies of one sequence."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._time_to_first_token = metrics.time_to_first_token.labels(model)
        self._inter_token_latency = metrics.inter_token_latency.labels(model)
        self._last, self._first = time.perf_counter(), True

    def __call__(self, output: RequestOutput) -> None:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if not output.token_ids:
            return
        if self._first:
            self._time_to_first_token.observe(seconds)
            self._first = False
        else:
            self._inter_token_latency.observe(seconds / len(output.token_ids))


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


class EngineCollector(Collector):
    """The engines' stats at the time of the scrape."""

    def __init__(self) -> None:
        self.sources: list[EngineSource] = []

    def collect(self) -> Iterator[Metric]:
        readings = [EngineReading.of(source) for source in self.sources]
        yield from _gauges(readings)
        yield from _counters(readings)
        yield from _spec_counters(readings)
        yield from _position_counters(readings)
        yield _draft_length_histogram(readings)
        yield from learning_metrics({reading.model: reading.stats.learning for reading in readings})


def _gauges(readings: list[EngineReading]) -> Iterator[Metric]:
    values: dict[str, tuple[str, Callable[[EngineReading], float]]] = {
        "paceline_engine_up": ("1; 0 while the worker of the engine is dead", lambda reading: reading.is_up),
        "paceline_requests_waiting": ("Sequences in the queue", lambda reading: reading.num_waiting),
        "paceline_requests_running": ("Sequences in prefill or decode", lambda reading: reading.stats.running),
    }
    for name, (description, value) in values.items():
        family = GaugeMetricFamily(name, description, labels=("model",))
        for reading in readings:
            family.add_metric((reading.model,), value(reading))
        yield family
    yield _block_gauge(readings)


def _block_gauge(readings: list[EngineReading]) -> Metric:
    blocks = GaugeMetricFamily("paceline_kv_blocks", "KV blocks by state", labels=("model", "state"))
    for reading in readings:
        stats = reading.stats
        for state, count in (("used", stats.blocks_used), ("cached", stats.blocks_cached), ("free", stats.blocks_free)):
            blocks.add_metric((reading.model, state), count)
    return blocks


COUNTERS = {  # fields of EngineStats
    "prompt_tokens": ("paceline_prompt_tokens", "Prompt tokens of all sequences"),
    "prefix_hits": ("paceline_prefix_cache_hits", "Sequences that reused a cached prefix"),
    "prefix_tokens": ("paceline_prefix_cache_hit_tokens", "Prompt tokens reused from the prefix cache"),
    "preemptions": ("paceline_preemptions", "Sequences preempted because KV blocks ran out"),
    "failures": ("paceline_failed_steps", "Steps that raised an error"),
    "restarts": ("paceline_engine_restarts", "Restarts of the engine after its worker has died"),
}


def _counters(readings: list[EngineReading]) -> Iterator[Metric]:
    for field_name, (name, description) in COUNTERS.items():
        family = CounterMetricFamily(name, description, labels=("model",))
        for reading in readings:
            family.add_metric((reading.model,), getattr(reading.stats, field_name))
        yield family


SPEC_COUNTERS = {  # fields of SpecStats
    "new_tokens": ("paceline_generation_tokens", "Generated tokens"),
    "steps": ("paceline_steps", "Target passes that generated tokens"),
    "drafted": ("paceline_spec_draft_tokens", "Draft tokens verified"),
    "accepted": ("paceline_spec_accepted_tokens", "Draft tokens accepted"),
}


def _spec_counters(readings: list[EngineReading]) -> Iterator[Metric]:
    for field_name, (name, description) in SPEC_COUNTERS.items():
        family = CounterMetricFamily(name, description, labels=("model", "method"))
        for reading in readings:
            for method, spec in reading.by_method.items():
                family.add_metric((reading.model, method), getattr(spec, field_name))
        yield family


def _position_counters(readings: list[EngineReading]) -> Iterator[Metric]:
    labels = ("model", "method", "position")
    drafted = CounterMetricFamily(
        "paceline_spec_draft_tokens_per_position", "Steps with a draft token at this position", labels=labels
    )
    accepted = CounterMetricFamily(
        "paceline_spec_accepted_tokens_per_position", "Draft tokens accepted at this position", labels=labels
    )
    for reading in readings:
        for method, spec in reading.by_method.items():
            for family, counts in ((drafted, spec.offered_at), (accepted, spec.accepted_at)):
                for position, count in enumerate(list(counts), start=1):  # a copy: the engine's thread extends the list
                    family.add_metric((reading.model, method, str(position)), count)
    yield from (drafted, accepted)


def _draft_length_histogram(readings: list[EngineReading]) -> Metric:
    family = HistogramMetricFamily(
        "paceline_spec_num_draft_tokens", "Steps of one sequence by num_draft_tokens (k)", labels=("model",)
    )
    for reading in readings:
        counts = reading.stats.draft_lengths
        buckets = [
            (str(bound), sum(count for k, count in counts.items() if k <= bound)) for bound in DRAFT_LENGTH_BUCKETS
        ]
        total = sum(k * count for k, count in counts.items())
        family.add_metric((reading.model,), [*buckets, ("+Inf", sum(counts.values()))], total)
    return family
