"""Metric names: the dashboard and the document use those that exist."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.core.protocols import Engine
from paceline.core.stats import EngineStats, LearningStats, SpecStats
from paceline.core.types import RequestOutput
from paceline.serve.engine_readings import EngineSource
from paceline.serve.fair_queue import FairQueue
from paceline.serve.metrics import Metrics
from paceline.serve.sequence_metrics import SequenceObserver
from tests.serve.running import COMPLETIONS, NAME, RunningServer
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


def exported_names(exposition: str, prefix: str = "paceline_") -> set[str]:
    names = set(re.findall(rf"^({prefix}\w+)", exposition, re.MULTILINE))
    return {name for name in names if not name.endswith("_created")}


def documented_names(prefix: str) -> set[str]:
    return set(re.findall(rf"`({prefix}\w+)`", (DOCS / "serving.md").read_text()))


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


@pytest.mark.parametrize("prefix", ["paceline_", "vllm:"])
def test_the_document_names_every_metric(exposition: str, prefix: str) -> None:
    names = exported_names(exposition, prefix)
    exported = {re.sub(rf"({'|'.join(SUFFIXES)})$", "", name) for name in names}
    assert documented_names(prefix) == exported


def test_the_engine_stats_are_exported_under_vllms_names(exposition: str) -> None:
    labels = 'engine="0",model_name="model-0"'
    for line in (
        f"vllm:num_requests_running{{{labels}}} 2.0",
        f"vllm:num_requests_waiting{{{labels}}} 1.0",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.25",
        f"vllm:prompt_tokens_total{{{labels}}} 10.0",
        f"vllm:generation_tokens_total{{{labels}}} 9.0",
        f"vllm:prefix_cache_queries_total{{{labels}}} 10.0",
        f"vllm:prefix_cache_hits_total{{{labels}}} 7.0",
        f"vllm:num_preemptions_total{{{labels}}} 8.0",
        f"vllm:spec_decode_num_drafts_total{{{labels}}} 4.0",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} 7.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 5.0",
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}} 3.0',
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}} 2.0',
        f"vllm:e2e_request_latency_seconds_count{{{labels}}} 0.0",
    ):
        assert line in exposition.splitlines()


@pytest.mark.slow
def test_vllms_counts_are_of_all_methods_together() -> None:
    class TwoMethods(CountingEngine):
        def stats(self) -> EngineStats:
            stats = super().stats()
            return replace(stats, by_method={"ngram": stats.spec, "eagle": stats.spec})

    text = metrics_of(TwoMethods()).exposition().decode()
    assert 'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="model-0"} 14.0' in text
    assert 'vllm:generation_tokens_total{engine="0",model_name="model-0"} 18.0' in text


def test_an_observer_sees_the_first_token_the_others_and_the_end() -> None:
    metrics = metrics_of()
    observe = SequenceObserver(metrics.sequences, "model-0", 7)
    observe.begin()
    for tokens in ((), (1,), (2, 3), ()):
        observe(RequestOutput("", tokens))
    observe(RequestOutput("", finish_reason="length"))
    lines = metrics.exposition().decode().splitlines()
    for own, vllms, value in (
        ("time_to_first_token_seconds_count", "time_to_first_token_seconds_count", 1.0),
        ("inter_token_latency_seconds_count", "inter_token_latency_seconds_count", 1.0),
        ("sequence_queue_seconds_count", "request_queue_time_seconds_count", 1.0),
        ("sequence_prefill_seconds_count", "request_prefill_time_seconds_count", 1.0),
        ("sequence_decode_seconds_count", "request_decode_time_seconds_count", 1.0),
        ("sequence_latency_seconds_count", "e2e_request_latency_seconds_count", 1.0),
        ("sequence_prompt_tokens_sum", "request_prompt_tokens_sum", 7.0),
        ("sequence_generation_tokens_sum", "request_generation_tokens_sum", 3.0),
    ):
        assert f'paceline_{own}{{model="model-0"}} {value}' in lines
        assert f'vllm:{vllms}{{engine="0",model_name="model-0"}} {value}' in lines
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="model-0"} 1.0' in lines


def vllm_samples(server: RunningServer) -> dict[str, float]:
    """What a Prometheus server reads, by name; positions and buckets added up."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(server.http().get("/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                assert (sample.labels["model_name"], sample.labels["engine"]) == (NAME, "0")
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


@pytest.mark.slow
def test_requests_move_vllms_counters(tiny_server: RunningServer) -> None:
    body = {"model": NAME, "prompt": "abcabcabcabcabc", "max_tokens": 24, "ignore_eos": True, "temperature": 0,
            "speculative": {"num_draft_tokens": 3}}  # fmt: skip
    before = vllm_samples(tiny_server)
    usage = tiny_server.http().post(COMPLETIONS, json=body).json()["usage"]
    tiny_server.wait_until_idle()
    after = vllm_samples(tiny_server)
    moved = {name: after[name] - before.get(name, 0.0) for name in after}
    assert moved["vllm:prompt_tokens_total"] == moved["vllm:request_prompt_tokens_sum"] == usage["prompt_tokens"]
    assert moved["vllm:generation_tokens_total"] == moved["vllm:request_generation_tokens_sum"] == 24
    assert moved["vllm:request_success_total"] == moved["vllm:e2e_request_latency_seconds_count"] == 1
    stages = ("request_queue_time", "request_prefill_time", "request_decode_time")
    assert all(moved[f"vllm:{stage}_seconds_count"] == 1 for stage in stages)
    seconds = sum(moved[f"vllm:{stage}_seconds_sum"] for stage in stages)
    assert 0 < seconds <= moved["vllm:e2e_request_latency_seconds_sum"] * 1.000001
    drafted = moved["vllm:spec_decode_num_draft_tokens_total"]
    accepted = moved["vllm:spec_decode_num_accepted_tokens_total"]
    assert drafted >= max(accepted, moved["vllm:spec_decode_num_drafts_total"]) > 0
    assert moved["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == accepted
