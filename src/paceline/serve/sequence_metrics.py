"""What is observed of every sequence, by model: latencies, lengths and how it ended."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from paceline.core.types import RequestOutput

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
LATENCY_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
LENGTH_BUCKETS = (1, 10, 50, 100, 500, 1_000, 5_000, 10_000, 50_000, 100_000)
REASONS = ("stop", "length")  # exported from the first scrape on


class SequenceMetrics:
    """The instruments of one server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"paceline_{name}", description, ("model",), buckets=buckets, registry=registry)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From request to first token", FIRST_TOKEN_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two tokens of a sequence", INTER_TOKEN_BUCKETS
        )
        self.queue_time = histogram("sequence_queue_seconds", "From request to its turn in the engine", LATENCY_BUCKETS)
        self.prefill_time = histogram("sequence_prefill_seconds", "From its turn to the first token", LATENCY_BUCKETS)
        self.decode_time = histogram("sequence_decode_seconds", "From first token to last", LATENCY_BUCKETS)
        self.latency = histogram("sequence_latency_seconds", "From request to last token", LATENCY_BUCKETS)
        self.prompt_tokens = histogram("sequence_prompt_tokens", "Prompt tokens of a sequence", LENGTH_BUCKETS)
        self.generation_tokens = histogram(
            "sequence_generation_tokens", "Generated tokens of a sequence", LENGTH_BUCKETS
        )
        self.finished = Counter(
            "paceline_sequences_finished", "Sequences by what ended them", ("model", "reason"), registry=registry
        )

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        return (
            self.time_to_first_token,
            self.inter_token_latency,
            self.queue_time,
            self.prefill_time,
            self.decode_time,
            self.latency,
            self.prompt_tokens,
            self.generation_tokens,
        )

    def add_model(self, model: str) -> None:
        """Export the metrics of one more model before its first sequence."""
        for histogram in self.histograms:
            histogram.labels(model)
        for reason in REASONS:
            self.finished.labels(model, reason)

    def collect(self) -> Iterator[Metric]:
        """All of them, as they are now."""
        for instrument in (*self.histograms, self.finished):
            yield from instrument.collect()


class SequenceObserver:
    """Observes one sequence, output by output. num_prompt_tokens: of its prompt."""

    def __init__(self, metrics: SequenceMetrics, model: str, num_prompt_tokens: int) -> None:
        self._metrics, self._model, self._num_prompt_tokens = metrics, model, num_prompt_tokens
        self._inter_token_latency = metrics.inter_token_latency.labels(model)
        self._start = self._last = self._turn = self._first_token = time.perf_counter()
        self._num_tokens = 0

    def begin(self) -> None:
        """The turn of the sequence has come."""
        self._turn = time.perf_counter()
        self._metrics.queue_time.labels(self._model).observe(self._turn - self._start)

    def __call__(self, output: RequestOutput) -> None:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if output.token_ids:
            self._observe_tokens(len(output.token_ids), seconds)
        if output.finish_reason is not None:
            self._observe_end(output.finish_reason, now - self._start)

    def _observe_tokens(self, count: int, seconds: float) -> None:
        if self._num_tokens:
            self._inter_token_latency.observe(seconds / count)
        else:
            self._first_token = self._last
            self._metrics.time_to_first_token.labels(self._model).observe(self._first_token - self._start)
            self._metrics.prefill_time.labels(self._model).observe(self._first_token - self._turn)
        self._num_tokens += count

    def _observe_end(self, reason: str, seconds: float) -> None:
        self._metrics.latency.labels(self._model).observe(seconds)
        if self._num_tokens:
            self._metrics.decode_time.labels(self._model).observe(self._last - self._first_token)
        self._metrics.prompt_tokens.labels(self._model).observe(self._num_prompt_tokens)
        self._metrics.generation_tokens.labels(self._model).observe(self._num_tokens)
        self._metrics.finished.labels(self._model, reason).inc()
