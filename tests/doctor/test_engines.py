"""Counters of other engines, as they write them."""

from __future__ import annotations

from paceline.doctor.engines import ENGINES, AcceptanceCounts, engine_of

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 21.0
"""


def read(name: str, text: str) -> AcceptanceCounts | None:
    reader = ENGINES[name].read_counts
    assert reader is not None
    return reader(text)


def test_vllm_counts_accepted_tokens_by_position() -> None:
    assert read("vllm", VLLM) == AcceptanceCounts((40.0, 40.0), (30.0, 21.0))
    assert read("vllm", "") is None


def test_sglang_gives_tokens_a_step() -> None:
    counts = read("sglang", '{"internal_states": [{"avg_spec_accept_length": 2.5}]}')
    assert counts is not None and counts.mean_tokens_per_step == 2.5
    assert read("sglang", "no JSON") is None


def test_only_what_was_counted_since_counts() -> None:
    now, before = AcceptanceCounts((50.0, 50.0), (30.0, 20.0)), AcceptanceCounts((10.0,), (5.0,))
    assert now.since(before) == AcceptanceCounts((40.0, 50.0), (25.0, 20.0))


def test_an_engine_is_found_by_its_owner() -> None:
    assert engine_of("vllm").name == "vllm" and engine_of("llamacpp").name == "llama.cpp"
    assert engine_of("organization-owner").name == "other"
