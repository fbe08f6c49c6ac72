"""Headers of GGUF files under the keys of a Hugging Face config."""

from __future__ import annotations

import pytest

from paceline.plan.gguf_header import GgufHeader, header_config
from paceline.plan.model_sizes import sizes_from_config

SIZES = {
    "block_count": 8, "context_length": 4096, "embedding_length": 512, "feed_forward_length": 1024,
    "attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 64, "attention.value_length": 64,
}  # fmt: skip
STATES = {
    "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 4, "ssm.time_step_rank": 8, "ssm.inner_size": 1024,
    "full_attention_interval": 4,
}  # fmt: skip
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 128}


def sizes_of(architecture: str, settings: dict[str, int]):
    named = {f"{architecture}.{key}": value for key, value in (SIZES | settings).items()}
    header = GgufHeader({"general.architecture": architecture, **named}, ())
    return sizes_from_config({**header_config(header), "vocab_size": 1000}, architecture)


@pytest.mark.parametrize(
    "name, known, settings",
    [
        ("qwen35", "qwen3next", STATES),
        ("qwen35moe", "qwen3next", STATES | EXPERTS),
        ("qwen3vl", "qwen3", {}),
        ("qwen3vlmoe", "qwen3moe", EXPERTS),
        ("hunyuan-dense", "qwen3", {}),
        ("nemotron_h_moe", "nemotron_h", STATES | EXPERTS),
    ],
)
def test_an_architecture_that_llama_cpp_names_otherwise_is_known(name, known, settings):
    """Counted as a Llama, a model with recurrent layers would have four times its keys and values."""
    sizes, expected = sizes_of(name, settings), sizes_of(known, settings)
    assert not any("unknown" in note for note in sizes.notes)
    assert (sizes.parameters, sizes.kv_values_per_token) == (expected.parameters, expected.kv_values_per_token)
    assert sizes.state_values == expected.state_values
