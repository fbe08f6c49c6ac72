"""`--quantize FORMAT`: weights are converted at load, in the library and on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline import SpeculativeDecoder
from paceline.cli import main
from paceline.config import EngineConfig
from paceline.errors import OptionError
from paceline.quantization import registry
from tests.support.tiny import write_tiny_model

PROMPT = "to be or not to be"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_command_line_and_the_library_convert_alike(
    name: str, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", PROMPT, "--model", str(tiny_folder), "--max-new-tokens", "12", "--json"]
    assert main([*arguments, "--quantize", name]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    with SpeculativeDecoder(tiny_folder, quantize=name, method="ngram", num_draft_tokens=3) as decoder:
        assert decoder.info.dtype == name
        assert decoder.generate(PROMPT, max_new_tokens=12).token_ids == document["token_ids"]
    with SpeculativeDecoder(tiny_folder, dtype=name) as decoder:
        assert decoder.generate(PROMPT, max_new_tokens=12).token_ids == document["token_ids"]


def test_help_names_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--quantize F" in text and ", ".join(registry.names()) in text


def test_a_format_and_another_dtype_are_an_error() -> None:
    with pytest.raises(OptionError, match="name the weight format alone"):
        EngineConfig.create("default", dtype="bf16", quantize="int4")
    assert EngineConfig.create("default", dtype="int4", quantize="int4").model.dtype == "int4"


def test_a_format_that_does_not_exist_is_an_error(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, "--model", str(tiny_folder), "--quantize", "int3"]) != 0
    assert "int8, int4, fp8" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("name", registry.names())
def test_on_a_gpu_drafted_text_is_plain_text_bit_for_bit(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, hidden_size=256, intermediate_size=512, num_attention_heads=4)
    options = {"max_new_tokens": 200, "ignore_eos": True}
    texts = []
    for method in ({}, {"method": "ngram", "num_draft_tokens": 7}, {"draft_model": folder, "num_draft_tokens": 5}):
        with SpeculativeDecoder(folder, device="cuda", quantize=name, **method) as decoder:
            texts.append(decoder.generate(PROMPT, **options).token_ids)
    assert texts[0] == texts[1] == texts[2]
