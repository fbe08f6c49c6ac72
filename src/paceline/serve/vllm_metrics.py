"""The server's metrics under vLLM's names too: dashboards and autoscalers made for vLLM read this server.

Every value is one that a metric of paceline's own holds; nothing is counted a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paceline.core.stats import SpecStats
from paceline.serve.engine_readings import EngineReading

ENGINE = "0"  # vLLM numbers the replicas of a model; a model has one engine here
LABELS = ("model_name", "engine")
Value = Callable[[EngineReading], float]


def _num_drafts(spec: SpecStats) -> int:
    """Steps with draft tokens: each has one at the first position."""
    return spec.offered_at[0] if spec.offered_at else 0


def _usage(reading: EngineReading) -> float:
    """Share of the KV blocks that running sequences hold; cached ones are free for the asking."""
    return reading.stats.blocks_used / reading.num_blocks if reading.num_blocks else 0.0


GAUGES: dict[str, tuple[str, Value]] = {
    "vllm:num_requests_running": ("Sequences in prefill or decode", lambda reading: reading.stats.running),
    "vllm:num_requests_waiting": ("Sequences in the queue", lambda reading: reading.num_waiting),
    "vllm:kv_cache_usage_perc": ("KV blocks in use; 1 is all of them", _usage),
}
COUNTERS: dict[str, tuple[str, Value]] = {
    "vllm:prompt_tokens": ("Prompt tokens", lambda reading: reading.stats.prompt_tokens),
    "vllm:generation_tokens": ("Generated tokens", lambda reading: reading.spec.new_tokens),
    "vllm:prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache",
        lambda reading: reading.stats.prompt_tokens,
    ),
    "vllm:prefix_cache_hits": (
        "Prompt tokens reused from the prefix cache",
        lambda reading: reading.stats.prefix_tokens,
    ),
    "vllm:num_preemptions": ("Sequences preempted", lambda reading: reading.stats.preemptions),
    "vllm:spec_decode_num_drafts": ("Steps with draft tokens", lambda reading: _num_drafts(reading.spec)),
    "vllm:spec_decode_num_draft_tokens": ("Draft tokens verified", lambda reading: reading.spec.drafted),
    "vllm:spec_decode_num_accepted_tokens": ("Draft tokens accepted", lambda reading: reading.spec.accepted),
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
SEQUENCE_METRICS = {  # metrics of SequenceMetrics that vLLM has too
    "paceline_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "paceline_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "paceline_sequence_queue_seconds": "vllm:request_queue_time_seconds",
    "paceline_sequence_prefill_seconds": "vllm:request_prefill_time_seconds",
    "paceline_sequence_decode_seconds": "vllm:request_decode_time_seconds",
    "paceline_sequence_latency_seconds": "vllm:e2e_request_latency_seconds",
    "paceline_sequence_prompt_tokens": "vllm:request_prompt_tokens",
    "paceline_sequence_generation_tokens": "vllm:request_generation_tokens",
    "paceline_sequences_finished": "vllm:request_success",
}
LABEL_NAMES = {"model": "model_name", "reason": "finished_reason"}


def engine_metrics(readings: list[EngineReading]) -> Iterator[Metric]:
    """vLLM's gauges and counters of the engines."""
    for families, kind in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
        for name, (description, value) in families.items():
            family = kind(name, description, labels=LABELS)
            for reading in readings:
                family.add_metric((reading.model, ENGINE), value(reading))
            yield family
    yield _position_counter(readings)


def _position_counter(readings: list[EngineReading]) -> Metric:
    """vLLM counts positions from 0."""
    family = CounterMetricFamily(PER_POSITION, "Draft tokens accepted at this position", labels=(*LABELS, "position"))
    for reading in readings:
        for position, count in enumerate(reading.spec.accepted_at):
            family.add_metric((reading.model, ENGINE, str(position)), count)
    return family


def sequence_metrics(metrics: Iterable[Metric]) -> Iterator[Metric]:
    """Of these metrics of sequences those that vLLM has too, under its names and labels."""
    for metric in metrics:
        name = SEQUENCE_METRICS[metric.name]
        copy = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            labels = {LABEL_NAMES.get(label, label): value for label, value in sample.labels.items()}
            copy.add_sample(name + sample.name.removeprefix(metric.name), labels | {"engine": ENGINE}, sample.value)
        yield copy
