"""Structured output: schemas, expressions and grammars, with drafts on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.core.types import ModelInfo, Request, StructuredOutput
from paceline.engines.local.structured_output import GrammarCompiler
from paceline.errors import OptionError
from tests.support.build import tiny_engine
from tests.support.tiny import VOCABULARY, byte_tokenizer

EOS = 257
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    info = ModelInfo("tiny", VOCABULARY, frozenset({EOS}), 512, 3, 32, "cpu", "float32")
    return GrammarCompiler(byte_tokenizer(), info)


def ids(text: str) -> list[int]:
    tokens: list[int] = byte_tokenizer()(text).input_ids
    return tokens


def test_only_what_the_expression_allows_may_follow(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(StructuredOutput("regex", "ab(c|d)"))
    assert constraint.allowed([]).nonzero().flatten().tolist() == ids("a")
    assert constraint.allowed(ids("ab")).nonzero().flatten().tolist() == sorted(ids("c") + ids("d"))
    assert constraint.allowed(ids("abc")).nonzero().flatten().tolist() == [EOS]


def test_asking_along_a_path_changes_nothing(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(StructuredOutput("regex", "abc"))
    first = constraint.allowed([])
    constraint.allowed(ids("ab"))
    constraint.allowed(ids("ax"))
    assert torch.equal(constraint.allowed([]), first)
    constraint.advance(ids("a"))
    assert constraint.allowed([]).nonzero().flatten().tolist() == ids("b")


def test_after_an_excluded_draft_token_any_row_will_do(compiler: GrammarCompiler) -> None:
    """No row after it is ever sampled from, and the matcher goes back to where it was."""
    constraint = compiler.compile(StructuredOutput("regex", "abc"))
    assert constraint.allowed(ids("xyz")).all()
    assert constraint.allowed(ids("ab")).nonzero().flatten().tolist() == ids("c")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (StructuredOutput("json_schema", "{not json"), "json_schema|JSON schema"),
        (StructuredOutput("json_schema", '{"type": "teapot"}'), "JSON schema|json_schema"),
        (StructuredOutput("regex", "(unclosed"), "regex"),
        (StructuredOutput("grammar", "no grammar at all"), "grammar"),
        (StructuredOutput("haiku", ""), "json_schema, json_object, regex, choice, grammar or structural_tag"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_what_cannot_be_compiled_is_an_option_error(
    compiler: GrammarCompiler, wanted: StructuredOutput, words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        compiler.compile(wanted)


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_generated_object_fits_its_schema_with_and_without_drafts(
    tiny_folder: Path, num_draft_tokens: int, temperature: float
) -> None:
    engine = tiny_engine(tiny_folder, num_draft_tokens=num_draft_tokens)
    wanted = StructuredOutput("json_schema", json.dumps(SCHEMA))
    sampling = SamplingParams(temperature, seed=5)
    [seq] = engine.run([Request(ids("an object: "), sampling, 120, structured_output=wanted)])
    document: Any = json.loads(engine.tokenizer.decode(seq.generated))
    jsonschema.validate(document, SCHEMA)
    assert seq.finish_reason == "stop"


def test_drafts_do_not_change_a_greedy_constrained_sequence(tiny_folder: Path) -> None:
    wanted = StructuredOutput("regex", "(ab|cd|ef){10,20}")
    outputs = []
    for num_draft_tokens in (0, 5):
        engine = tiny_engine(tiny_folder, num_draft_tokens=num_draft_tokens, draft_options={"shortest": 1})
        [seq] = engine.run([Request(ids("abcdef"), SamplingParams(), 60, structured_output=wanted)])
        outputs.append((seq.generated, seq.stats.accepted > 0))
    assert outputs[0][0] == outputs[1][0] and outputs[1][1], "drafts must have been accepted, or this shows little"


def test_any_object_is_an_object(tiny_folder: Path) -> None:
    engine = tiny_engine(tiny_folder, num_draft_tokens=2)
    [seq] = engine.run([Request(ids("x"), SamplingParams(), 12, structured_output=StructuredOutput("json_object"))])
    assert engine.tokenizer.decode(seq.generated).startswith("{")
