"""Metrics for Prometheus. The engine's counters are read at every scrape; latencies are observed here."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.protocols import Engine
from paceline.core.stats import EngineStats, SpecStats
from paceline.core.types import RequestOutput

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
DRAFT_LENGTH_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)


class Metrics:
    """The metrics of one server. Each has its own registry, so that two servers in one process do not mix."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "paceline_http_requests", "HTTP requests by route and status", ("route", "status"), registry=self.registry
        )
        self.time_to_first_token = self._histogram(
            "paceline_time_to_first_token_seconds", "From request to first token", FIRST_TOKEN_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "paceline_inter_token_latency_seconds", "Between two tokens of a sequence", INTER_TOKEN_BUCKETS
        )
        self.request_latency = self._histogram(
            "paceline_e2e_request_latency_seconds", "From first byte to last", REQUEST_BUCKETS, ("route",)
        )
        self.registry.register(EngineCollector(engine))

    def _histogram(
        self, name: str, description: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Histogram:
        return Histogram(name, description, labels, buckets=buckets, registry=self.registry)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        self.http_requests.labels(route, str(status)).inc()
        self.request_latency.labels(route).observe(seconds)


class TokenTimer:
    """Observes the token latencies of one sequence."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last, self._first = time.perf_counter(), True

    def __call__(self, output: RequestOutput) -> None:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if not output.token_ids:
            return
        if self._first:
            self._metrics.time_to_first_token.observe(seconds)
            self._first = False
        else:
            self._metrics.inter_token_latency.observe(seconds / len(output.token_ids))


class EngineCollector(Collector):
    """The engine's stats at the time of the scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        by_method = stats.by_method or {self._engine.methods[0]: stats.spec}
        yield from _gauges(stats)
        yield from _counters(stats)
        yield from _spec_counters(by_method)
        yield from _position_counters(by_method)
        yield _draft_length_histogram(stats.draft_lengths)


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("paceline_requests_waiting", "Sequences in the queue", stats.waiting)
    yield GaugeMetricFamily("paceline_requests_running", "Sequences in prefill or decode", stats.running)
    blocks = GaugeMetricFamily("paceline_kv_blocks", "KV blocks by state", labels=("state",))
    for state, count in (("used", stats.blocks_used), ("cached", stats.blocks_cached), ("free", stats.blocks_free)):
        blocks.add_metric((state,), count)
    yield blocks


def _counters(stats: EngineStats) -> Iterator[Metric]:
    counts = (
        ("paceline_prompt_tokens", "Prompt tokens of all sequences", stats.prompt_tokens),
        ("paceline_prefix_cache_hits", "Sequences that reused a cached prefix", stats.prefix_hits),
        ("paceline_prefix_cache_hit_tokens", "Prompt tokens reused from the prefix cache", stats.prefix_tokens),
        ("paceline_preemptions", "Sequences preempted because KV blocks ran out", stats.preemptions),
        ("paceline_failed_steps", "Steps that raised an error", stats.failures),
    )
    for name, description, count in counts:
        yield CounterMetricFamily(name, description, count)


def _spec_counters(by_method: dict[str, SpecStats]) -> Iterator[Metric]:
    families = {
        "new_tokens": CounterMetricFamily("paceline_generation_tokens", "Generated tokens", labels=("method",)),
        "steps": CounterMetricFamily("paceline_steps", "Target passes that generated tokens", labels=("method",)),
        "drafted": CounterMetricFamily("paceline_spec_draft_tokens", "Draft tokens verified", labels=("method",)),
        "accepted": CounterMetricFamily("paceline_spec_accepted_tokens", "Draft tokens accepted", labels=("method",)),
    }
    for name, family in families.items():
        for method, spec in by_method.items():
            family.add_metric((method,), getattr(spec, name))
        yield family


def _position_counters(by_method: dict[str, SpecStats]) -> Iterator[Metric]:
    labels = ("method", "position")
    drafted = CounterMetricFamily(
        "paceline_spec_draft_tokens_per_position", "Steps with a draft token at this position", labels=labels
    )
    accepted = CounterMetricFamily(
        "paceline_spec_accepted_tokens_per_position", "Draft tokens accepted at this position", labels=labels
    )
    for method, spec in by_method.items():
        for family, counts in ((drafted, spec.offered_at), (accepted, spec.accepted_at)):
            for position, count in enumerate(list(counts), start=1):  # a copy: the engine's thread extends the list
                family.add_metric((method, str(position)), count)
    yield from (drafted, accepted)


def _draft_length_histogram(draft_lengths: dict[int, int]) -> Metric:
    family = HistogramMetricFamily("paceline_spec_num_draft_tokens", "Steps of one sequence by num_draft_tokens (k)")
    buckets = [
        (str(bound), sum(count for k, count in draft_lengths.items() if k <= bound)) for bound in DRAFT_LENGTH_BUCKETS
    ]
    total = sum(draft_lengths.values())
    family.add_metric((), [*buckets, ("+Inf", total)], sum(k * count for k, count in draft_lengths.items()))
    return family
