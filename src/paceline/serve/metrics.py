"""Metrics for Prometheus. Engines' counters are read at every scrape; requests and sequences are observed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.serve import vllm_metrics
from paceline.serve.engine_readings import EngineReading, EngineSource
from paceline.serve.learning_metrics import learning_metrics
from paceline.serve.sequence_metrics import LATENCY_BUCKETS, SequenceMetrics

DRAFT_LENGTH_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)


class Metrics:
    """The metrics of one server. Each has its own registry, so that two servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "paceline_http_requests", "HTTP requests by route and status", ("route", "status"), registry=self.registry
        )
        self.request_latency = Histogram(
            "paceline_e2e_request_latency_seconds",
            "From first byte to last",
            ("route",),
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.sequences = SequenceMetrics(self.registry)
        self._engines = EngineCollector(self.sequences)
        self.registry.register(self._engines)

    def add_engine(self, source: EngineSource) -> None:
        """Export the stats of one more engine, and those of its sequences from the first scrape on."""
        self.sequences.add_model(source.model)
        self._engines.sources.append(source)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        self.http_requests.labels(route, str(status)).inc()
        self.request_latency.labels(route).observe(seconds)


class EngineCollector(Collector):
    """The engines' stats at the time of the scrape, and all that vLLM has too under its names."""

    def __init__(self, sequences: SequenceMetrics) -> None:
        self.sources: list[EngineSource] = []
        self._sequences = sequences

    def collect(self) -> Iterator[Metric]:
        readings = [EngineReading.of(source) for source in self.sources]
        yield from _gauges(readings)
        yield from _counters(readings)
        yield from _spec_counters(readings)
        yield from _position_counters(readings)
        yield _draft_length_histogram(readings)
        yield from learning_metrics({reading.model: reading.stats.learning for reading in readings})
        yield from vllm_metrics.engine_metrics(readings)
        yield from vllm_metrics.sequence_metrics(self._sequences.collect())


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
