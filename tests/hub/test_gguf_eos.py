"""The end tokens of a GGUF file: its keys', and those that llama.cpp knows by their text."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.hub import gguf_transformers, locate
from paceline.hub.gguf_eos import eos_token_ids
from paceline.hub.gguf_fields import GgufFields
from tests.runners.native.models import SIZES
from tests.support.gguf import write_gguf

NORMAL, CONTROL, USER = 1, 3, 4


def fields_of(tokens: dict[str, int], **ids: int) -> GgufFields:
    """tokens: their types by their texts; ids: what keys name."""
    values = {f"tokenizer.ggml.{key}_token_id": token for key, token in ids.items()}
    lists = {"tokenizer.ggml.tokens": list(tokens), "tokenizer.ggml.token_type": list(tokens.values())}
    entries = {key: _Entry(value) for key, value in (values | lists).items()}
    reader: Any = SimpleNamespace(fields=entries)
    return GgufFields(reader, Path("tiny.gguf"))


class _Entry:
    def __init__(self, value: Any) -> None:
        self._value = value

    def contents(self) -> Any:
        return self._value


LLAMA3 = {"a": NORMAL, "<|end_of_text|>": CONTROL, "<|eot_id|>": CONTROL, "<|eom_id|>": USER}


@pytest.mark.parametrize(
    "tokens, named, ends",
    [
        (LLAMA3, {"eos": 1}, [1, 2, 3]),
        (LLAMA3, {"eos": 2, "eot": 0}, [2, 0, 1, 3]),
        ({"a": CONTROL, "b": CONTROL}, {"eos": 1}, 1),
        ({"a": CONTROL}, {}, None),
        ({"a": NORMAL, "<|im_end|>": NORMAL, "</s>": USER}, {"eos": 0}, 0),
        ({"<|end|>": CONTROL, "<|endoftext|>": CONTROL}, {"eos": 1}, [1, 0]),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}, {"eos": 1}, [1, 2]),
    ],
)
def test_tokens_end_a_sequence_by_key_or_by_text(
    tokens: dict[str, int], named: dict[str, int], ends: int | list[int] | None
) -> None:
    assert eos_token_ids(fields_of(tokens, **named)) == ends


def test_a_file_without_tokens_has_those_of_its_keys() -> None:
    reader: Any = SimpleNamespace(fields={"tokenizer.ggml.eos_token_id": _Entry(7)})
    assert eos_token_ids(GgufFields(reader, Path("tiny.gguf"))) == 7


@pytest.mark.slow
def test_what_transformers_converts_has_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    model = Gemma2ForCausalLM(Gemma2Config(**{**SIZES, "vocab_size": 261, "query_pre_attn_scalar": 32}))

    def tokenizer(writer: Any) -> None:
        from tokenizers import pre_tokenizers

        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        marks = ["<bos>", "<eos>", "<end_of_turn>", "x"]
        writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", *marks])
        writer.add_token_types([1] * 257 + [3] * 4)
        writer.add_token_merges(["h e"] * 2)
        writer.add_bos_token_id(257)
        writer.add_eos_token_id(258)

    def metadata(writer: Any) -> None:
        writer.add_attn_logit_softcapping(50.0)

    file = write_gguf(tmp_path / "tiny.gguf", model, tokenizer=tokenizer, metadata=metadata)
    monkeypatch.setattr(gguf_transformers, "find_spec", lambda name: name)
    monkeypatch.setattr(gguf_transformers, "_load", lambda path: model)
    folder = locate(str(file)).folder
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == [258, 259]
