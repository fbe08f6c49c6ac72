"""Metrics of a head that learns from traffic (`paceline serve --learn`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paceline.core.stats import LearningStats

GAUGES = {  # fields of LearningStats
    "ring_bytes": ("paceline_learning_ring_bytes", "Size of the stored sequences"),
    "ring_seqs": ("paceline_learning_ring_sequences", "Stored sequences"),
    "acceptance": ("paceline_learning_acceptance", "First draft tokens accepted, of the latest sequences"),
    "head": ("paceline_learning_head", "Number of the head in use; 0: the one that was given"),
}
COUNTERS = {
    "attempts": ("paceline_learning_attempts", "Trainings finished"),
    "swaps": ("paceline_learning_swaps", "Heads swapped in"),
    "rollbacks": ("paceline_learning_rollbacks", "Heads rolled back"),
}


def learning_metrics(stats_by_model: Mapping[str, LearningStats | None]) -> Iterator[Metric]:
    """Of the models that learn; nothing where none does."""
    learning = {model: stats for model, stats in stats_by_model.items() if stats is not None}
    if not learning:
        return
    for families, kind in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
        for field_name, (name, description) in families.items():
            family = kind(name, description, labels=("model",))
            for model, stats in learning.items():
                family.add_metric((model,), getattr(stats, field_name))
            yield family
