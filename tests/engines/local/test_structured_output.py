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
        (StructuredOutput("grammar", "root ::= root"), "no output can match the grammar"),
        (StructuredOutput("choice", "[]"), "list of strings"),
        (StructuredOutput("structural_tag", '{"format": {"type": "poem"}}'), "not 'poem'"),
        (StructuredOutput("structural_tag", '{"structures": [{"begin": "x"}], "triggers": ["y"]}'), "no trigger"),
        (StructuredOutput("haiku", ""), "json_schema, json_object, regex, choice, grammar or structural_tag"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_what_cannot_be_compiled_is_an_option_error(
    compiler: GrammarCompiler, wanted: StructuredOutput, words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        compiler.compile(wanted)


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_after_an_end_token_that_is_ignored_only_end_tokens_follow(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(StructuredOutput("regex", "ab*"))
    assert constraint.allowed([*ids("a"), EOS, EOS]).nonzero().flatten().tolist() == [EOS]
    constraint.advance([*ids("a"), EOS])
    assert constraint.allowed([]).nonzero().flatten().tolist() == [EOS]


@pytest.mark.slow
def test_a_grammar_that_outgrows_the_limits_ends_the_output_and_says_so(
    compiler: GrammarCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    constraint = compiler.compile(StructuredOutput("regex", "(a{1000}){1000}"))
    constraint.advance(ids("a"))
    assert constraint.allowed([]).nonzero().flatten().tolist() == [EOS]
    assert "ends before it is complete" in caplog.text


def test_a_choice_is_one_of_thousands(compiler: GrammarCompiler) -> None:
    choices = [f"{number}é/\"\n" for number in range(4000)]
    constraint = compiler.compile(StructuredOutput("choice", json.dumps(choices)))
    tokens = ids(choices[3999])
    for token in tokens:
        assert constraint.allowed([])[token] and not constraint.allowed([])[EOS]
        constraint.advance([token])
    assert constraint.allowed([]).nonzero().flatten().tolist() == [EOS]


TAGGED = {"type": "json_schema", "json_schema": {"type": "integer"}}
FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f="]},
        ["free", "x <f=a>12</f> y <f=a>3</f>"],
        ["x <f=b>", "<f=a>x</f>", "<f=a>1"],
    ),
    (
        {"format": {"type": "sequence", "elements": [
            {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
            {"type": "or", "elements": [
                {"type": "const_string", "value": "yes"}, {"type": "regex", "pattern": r"n/?o+\/?\\?"}
            ]},
        ]}},
        ["<t>a<b</t>yes", "<t></t>n/oo", "<t></t>no/", "<t></t>no\\"],
        ["yes", "<t>a</t>maybe"],
    ),
    (
        {"format": {"type": "triggered_tags", "triggers": ["<"], "at_least_one": True, "stop_after_first": True,
                    "tags": [{"begin": "<a>", "content": TAGGED, "end": "."}]}},
        ["x <a>3."],
        ["x", "<a>3. more", "<b>"],
    ),
    (
        {"format": {"type": "tags_with_separator", "separator": ",",
                    "tags": [{"begin": "a", "content": TAGGED, "end": "b"}]}},
        ["", "a1b", "a1b,a2b"],
        ["a1b,", "ab"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tags", "right", "wrong"), FORMATS, ids=["structures", "sequence", "triggered", "separated"])
def test_structural_tags(compiler: GrammarCompiler, tags: Any, right: list[str], wrong: list[str]) -> None:
    def matches(text: str) -> bool:
        """Whether every token is allowed where it stands, and then the end."""
        constraint = compiler.compile(StructuredOutput("structural_tag", json.dumps(tags)))
        tokens = [*ids(text), EOS] if text else [EOS]
        return all(bool(constraint.allowed(tokens[:place])[token]) for place, token in enumerate(tokens))

    assert all(map(matches, right)) and not any(map(matches, wrong))
