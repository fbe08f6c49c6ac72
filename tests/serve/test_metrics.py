"""Metric names: the dashboard and the document use those that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from paceline.core.protocols import Engine
from paceline.core.stats import EngineStats, LearningStats, SpecStats
from paceline.core.types import RequestOutput
from paceline.serve.fair_queue import FairQueue
from paceline.serve.metrics import EngineSource, Metrics, TokenTimer
from tests.serve.toy_engine import ReversingEngine

DOCS = Path(__file__).parents[2] / "docs"
SUFFIXES = ("_bucket", "_count", "_sum", "_created")


class CountingEngine(ReversingEngine):
    """An engine whose stats are all different from 0."""

    def stats(self) -> EngineStats:
        spec = SpecStats(new_tokens=9, steps=4, drafted=7, accepted=5, offered_at=[4, 3], accepted_at=[3, 2])
        return EngineStats(
            waiting=1,
            running=2,
            blocks_used=3,
            blocks_cached=4,
            blocks_free=5,
            spec=spec,
            by_method={"ngram": spec},
            prefix_hits=6,
            prefix_tokens=7,
            preemptions=8,
            failures=9,
            prompt_tokens=10,
            draft_lengths={0: 1, 3: 2, 200: 1},
            learning=LearningStats(11, 12, 0.5, 13, 14, 15, 16),
        )


def metrics_of(*engines: Engine) -> Metrics:
    metrics = Metrics()
    for index, engine in enumerate(engines):
        metrics.add_engine(EngineSource(f"model-{index}", engine, FairQueue(1)))
    return metrics


@pytest.fixture(scope="module")
def exposition() -> str:
    metrics = metrics_of(CountingEngine())
    metrics.observe_request("/v1/completions", 200, 0.2)
    return metrics.exposition().decode()


def exported_names(exposition: str) -> set[str]:
    names = set(re.findall(r"^(paceline_\w+)", exposition, re.MULTILINE))
    return {name for name in names if not name.endswith("_created")}


def test_the_engine_stats_are_exported_under_their_names(exposition: str) -> None:
    for line in (
        'paceline_requests_waiting{model="model-0"} 1.0',
        'paceline_requests_running{model="model-0"} 2.0',
        'paceline_kv_blocks{model="model-0",state="used"} 3.0',
        'paceline_kv_blocks{model="model-0",state="cached"} 4.0',
        'paceline_kv_blocks{model="model-0",state="free"} 5.0',
        'paceline_prefix_cache_hits_total{model="model-0"} 6.0',
        'paceline_prefix_cache_hit_tokens_total{model="model-0"} 7.0',
        'paceline_preemptions_total{model="model-0"} 8.0',
        'paceline_failed_steps_total{model="model-0"} 9.0',
        'paceline_prompt_tokens_total{model="model-0"} 10.0',
        'paceline_generation_tokens_total{method="ngram",model="model-0"} 9.0',
        'paceline_steps_total{method="ngram",model="model-0"} 4.0',
        'paceline_spec_draft_tokens_total{method="ngram",model="model-0"} 7.0',
        'paceline_spec_accepted_tokens_total{method="ngram",model="model-0"} 5.0',
        'paceline_spec_draft_tokens_per_position_total{method="ngram",model="model-0",position="2"} 3.0',
        'paceline_spec_accepted_tokens_per_position_total{method="ngram",model="model-0",position="1"} 3.0',
        'paceline_spec_num_draft_tokens_bucket{le="2",model="model-0"} 1.0',
        'paceline_spec_num_draft_tokens_bucket{le="128",model="model-0"} 3.0',
        'paceline_spec_num_draft_tokens_count{model="model-0"} 4.0',
        'paceline_spec_num_draft_tokens_sum{model="model-0"} 206.0',
        'paceline_learning_ring_bytes{model="model-0"} 11.0',
        'paceline_learning_ring_sequences{model="model-0"} 12.0',
        'paceline_learning_acceptance{model="model-0"} 0.5',
        'paceline_learning_head{model="model-0"} 13.0',
        'paceline_learning_attempts_total{model="model-0"} 14.0',
        'paceline_learning_swaps_total{model="model-0"} 15.0',
        'paceline_learning_rollbacks_total{model="model-0"} 16.0',
        'paceline_http_requests_total{route="/v1/completions",status="200"} 1.0',
    ):
        assert line in exposition.splitlines()


def test_an_engine_without_methods_in_its_stats_is_counted_under_its_default() -> None:
    text = metrics_of(ReversingEngine()).exposition().decode()
    assert 'paceline_steps_total{method="reverse",model="model-0"} 0.0' in text


def test_a_model_that_does_not_learn_has_no_metrics_of_learning() -> None:
    assert "paceline_learning" not in metrics_of(ReversingEngine()).exposition().decode()


def test_the_dashboard_uses_only_metrics_that_exist(exposition: str) -> None:
    text = (DOCS / "grafana-dashboard.json").read_text()
    json.loads(text)
    assert set(re.findall(r"paceline_\w+", text)) <= exported_names(exposition)


def test_the_document_names_every_metric(exposition: str) -> None:
    documented = set(re.findall(r"`(paceline_\w+)`", (DOCS / "serving.md").read_text()))
    exported = {re.sub(rf"({'|'.join(SUFFIXES)})$", "", name) for name in exported_names(exposition)}
    assert documented == exported


def test_a_token_timer_observes_the_first_token_and_the_others_each() -> None:
    metrics = metrics_of()
    timer = TokenTimer(metrics, "model-0")
    for tokens in ((), (1,), (2, 3), ()):
        timer(RequestOutput("", tokens))
    text = metrics.exposition().decode()
    assert 'paceline_time_to_first_token_seconds_count{model="model-0"} 1.0' in text
    assert 'paceline_inter_token_latency_seconds_count{model="model-0"} 1.0' in text
