"""Sizes from configs: dictionaries, config objects, GPT-2 keys, nested decoders, GGUF metadata."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import OptionError
from paceline.hub.model_config import DecoderSizes, decoder_sizes, gguf_config

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 320,
}


def test_missing_kv_heads_and_head_dim_follow_from_the_other_sizes() -> None:
    assert decoder_sizes(LLAMA) == DecoderSizes(64, 96, 4, 4, 16, 3, 320, 2048)


def test_stated_kv_heads_head_dim_and_length_are_used() -> None:
    sizes = decoder_sizes({**LLAMA, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 128})
    assert (sizes.num_kv_heads, sizes.head_dim, sizes.max_seq_len) == (2, 24, 128)
    assert sizes.kv_values_per_token == 2 * 3 * 2 * 24


def test_a_config_object_gives_the_sizes_of_its_dictionary() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**LLAMA, num_key_value_heads=2)
    assert decoder_sizes(config) == decoder_sizes(config.to_dict())
    gpt2 = transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, n_positions=128, vocab_size=320)
    assert decoder_sizes(gpt2) == DecoderSizes(64, 256, 4, 4, 16, 3, 320, 128)


def test_the_text_decoder_of_a_nested_config_is_read() -> None:
    assert decoder_sizes({"text_config": LLAMA, "hidden_size": 7}).hidden_size == 64


@pytest.mark.parametrize(("key", "value"), [("hidden_size", None), ("num_hidden_layers", -3), ("vocab_size", True)])
def test_a_missing_or_impossible_size_is_named(key: str, value: Any) -> None:
    with pytest.raises(OptionError, match=key):
        decoder_sizes({**LLAMA, key: value}, "odd-model")


def test_values_that_an_architecture_fixes_fill_gaps_only() -> None:
    sizes = decoder_sizes({**LLAMA, "num_key_value_heads": 2}, "gemma", {"head_dim": 256, "num_key_value_heads": 4})
    assert (sizes.head_dim, sizes.num_kv_heads) == (256, 2)


def test_gguf_metadata_is_a_config_under_other_keys() -> None:
    metadata = {"llama.embedding_length": 64, "llama.attention.head_count": 4, "llama.context_length": 512}
    config = gguf_config("llama", metadata.get)
    assert config == {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
