"""What a generation config asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelError
from paceline.hub.generation_config import defaults_from, generation_defaults


@pytest.mark.parametrize(
    ("document", "settings"),
    [
        ({}, {}),
        ({"bos_token_id": 1, "transformers_version": "5"}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}, {"temperature": 1.0}),
        ({"repetition_penalty": 1.1, "temperature": None}, {"repetition_penalty": 1.1}),
    ],
    ids=str,
)
def test_only_what_the_file_sets_is_a_default(document: dict[str, Any], settings: dict[str, Any]) -> None:
    assert defaults_from(document, "m").settings == settings


def test_settings_that_verification_does_not_apply_are_named() -> None:
    defaults = defaults_from({"no_repeat_ngram_size": 3, "num_beams": 1, "typical_p": 0.9, "min_length": 0}, "m")
    assert defaults.unsupported == {"no_repeat_ngram_size": 3, "typical_p": 0.9} and not defaults.is_greedy
    assert str(defaults) == "typical_p 0.9 (not available), no_repeat_ngram_size 3 (not available)"


def test_greedy_is_what_asks_for_nothing_more() -> None:
    assert defaults_from({}, "m").is_greedy and defaults_from({"do_sample": False}, "m").is_greedy
    assert not defaults_from({"do_sample": True}, "m").is_greedy
    assert not defaults_from({"repetition_penalty": 1.2}, "m").is_greedy


def test_a_file_that_cannot_be_followed_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json of m cannot be followed: top_p must be above 0"):
        defaults_from({"top_p": 0}, "m")
    for text in ("{", "[1]"):
        folder = tmp_path / str(len(text))
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # a file of no tensors
        (folder / "generation_config.json").write_text(text)
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            generation_defaults(str(folder))


def test_a_loaded_model_has_its_own(tiny_model: Any) -> None:
    assert generation_defaults(tiny_model).settings == {}
    assert generation_defaults(object()).settings == {}


def test_a_folder_without_the_file_asks_for_nothing(tiny_folder: Path) -> None:
    assert json.loads((tiny_folder / "config.json").read_text())
    assert generation_defaults(str(tiny_folder)).is_greedy
