"""How model families write tool calls: what each parser reads, wherever the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import OptionError
from paceline.serve.output_pieces import (
    ContentText,
    OutputParser,
    Parse,
    ReasoningText,
    StreamParser,
    ToolCallName,
    TrimmedParser,
)
from paceline.serve.reasoning import FORMATS as REASONING_FORMATS
from paceline.serve.reasoning import content_only, detect_reasoning, reasoning_format
from paceline.serve.tools import families, registry
from paceline.serve.tools.offer import ToolFunction, ToolOffer

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
OFFER = ToolOffer((ToolFunction("get_weather", WEATHER), ToolFunction("now", {"type": "object"})))
ARGUMENTS = '{"city": "São \\"Paulo\\" } {", "days": 3}'
CITY = 'São "Paulo" } {'
CALL, NOW = ("get_weather", {"city": CITY, "days": 3}), ("now", {})

# For each family: an output with content, one call, then a call without arguments where the family has several.
OUTPUTS: dict[str, tuple[str, list[tuple[str, Any]]]] = {
    "hermes": (
        f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [CALL, NOW],
    ),
    "llama3_json": (
        f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}',
        [CALL, NOW],
    ),
    "mistral": (
        f'I look.[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
        '{"name": "now", "arguments": {}}]',
        [CALL, NOW],
    ),
    "deepseek": (
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [CALL, NOW],
    ),
    "glm": (
        f"I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        [CALL, NOW],
    ),
    "qwen3_coder": (
        f"I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [CALL, NOW],
    ),
    "harmony": (
        "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|>",
        [CALL],
    ),
    "pythonic": (f"[get_weather(city='{CITY}', days=3), now()]", [CALL, NOW]),
}
OTHER_SPELLINGS: dict[str, tuple[str, list[tuple[str, Any]]]] = {
    "mistral": (f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{{}}", [CALL, NOW]),
    "deepseek": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [CALL, NOW],
    ),
    "llama3_json": (f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}', [CALL]),
    "hermes": (f'<tool_call>{{"arguments": {json.dumps(ARGUMENTS)}, "name": "get_weather"}}</tool_call>', [CALL]),
    "harmony": (f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>", [CALL]),
    "pythonic": ('<|python_start|>[get_weather(city="São \\"Paulo\\" } {", days=3)]<|python_end|>', [CALL]),
    "glm": (f"<tool_call>get_weather<arg_key>city</arg_key><arg_value>{CITY}</arg_value></tool_call>", [
        ("get_weather", {"city": CITY})
    ]),
    "qwen3_coder": (f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>', [CALL]),
}  # fmt: skip
NO_CALLS = [
    "plain text",
    "a < b and b > c",
    '{"city": "Rome"}',
    "[1, 2, 3]",
    "<tool_call>",
    "<tool_call>\nnot json\n</tool_call>",
    '<tool_call>{"nothing": 1}</tool_call> and more',
    "[TOOL_CALLS]",
    "<｜tool▁calls▁begin｜>",
    "[open(",
    '{"name": "unknown", "parameters": {}}',
    "<|channel|>",
    "  spaces at both ends  \n",
]


class Read:
    """What a parser has read: content, reasoning and calls with their arguments as text."""

    def __init__(self, parser: OutputParser, parts: list[str]) -> None:
        self.content = self.reasoning = ""
        self.calls: list[list[str]] = []
        for piece in [*(piece for part in parts for piece in parser.feed(part)), *parser.finish()]:
            if isinstance(piece, ContentText):
                self.content += piece.text
            elif isinstance(piece, ReasoningText):
                self.reasoning += piece.text
            elif isinstance(piece, ToolCallName):
                self.calls.append([piece.name, ""])
            else:
                self.calls[-1][1] += piece.text

    @property
    def called(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def read(parse: Parse, *parts: str) -> Read:
    return Read(TrimmedParser(StreamParser(parse)), list(parts))


def parse_of(name: str) -> Parse:
    return registry.tool_format(name).parse(OFFER)


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


def test_every_family_has_an_output_here() -> None:
    assert set(OUTPUTS) == set(OTHER_SPELLINGS) == set(registry.names())


@pytest.mark.parametrize("name", sorted(OUTPUTS))
@pytest.mark.parametrize("outputs", [OUTPUTS, OTHER_SPELLINGS], ids=["usual", "other"])
def test_a_family_reads_its_calls(name: str, outputs: dict[str, tuple[str, list[tuple[str, Any]]]]) -> None:
    text, calls = outputs[name]
    result = read(parse_of(name), text)
    assert result.called == calls
    assert result.content == ("I look." if "I look." in text else "")
    assert result.reasoning == ("The user asks." if "The user asks." in text else "")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OUTPUTS))
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_borders_of_chunks_change_nothing(name: str, data: st.DataObject) -> None:
    """Outputs of the family, of other families, damaged ones and plain text, cut anywhere."""
    known = [OUTPUTS[name][0], OTHER_SPELLINGS[name][0], *NO_CALLS, *(text for text, _ in OUTPUTS.values())]
    text = data.draw(st.sampled_from(known) | st.text(alphabet='<>[]{}"|/_ \nabt:,=(', max_size=30))
    text = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text
    places = data.draw(st.lists(st.integers(0, 10_000), max_size=20))
    whole, parts = read(parse_of(name), text), read(parse_of(name), *cut(text, places))
    assert (parts.content, parts.reasoning, parts.calls) == (whole.content, whole.reasoning, whole.calls)


@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_one_character_at_a_time_gives_the_same(name: str) -> None:
    for text, calls in (OUTPUTS[name], OTHER_SPELLINGS[name]):
        assert read(parse_of(name), *text).called == calls


@pytest.mark.parametrize("name", sorted({*OUTPUTS} - {"harmony"}))
def test_text_without_a_call_is_content_as_it_is(name: str) -> None:
    for text in ("plain text", "a < b and b > c", '{"city": "Rome"}', "[1, 2, 3]", "  spaces at both ends  \n"):
        result = read(parse_of(name), text)
        assert (result.content, result.calls) == (text, [])


def test_arguments_are_passed_on_while_they_are_written() -> None:
    parser = StreamParser(parse_of("hermes"))
    pieces = parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "Ro')
    assert pieces == [ToolCallName("get_weather"), *pieces[1:]] and pieces[1].text == '{"city": "Ro'  # type: ignore[union-attr]
    assert parser.feed('me"}')[0].text == 'me"}'  # type: ignore[union-attr]


# --- which family ---

TEMPLATES = {
    "hermes": "{% if tools %}<tool_call>{{ tools }}</tool_call>{% endif %}",
    "glm": "{% if tools %}<tool_call>{{ name }}<arg_key>{% endif %}",
    "qwen3_coder": "{% if tools %}<tool_call><function={{ name }}>{% endif %}",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]",
    "deepseek": "{{ '<｜tool▁calls▁begin｜>' }}{{ tools }}",
    "llama3_json": "{{ '<|python_tag|>' }}{{ tools }}",
    "harmony": "<|start|>assistant<|channel|>final<|message|>{{ tools }}",
    "pythonic": "{{ tools }} [func_name1(params_name1=params_value1)]",
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_chat_template_decides_the_family_and_only_one_matches(name: str) -> None:
    assert registry.detect(TEMPLATES[name]).name == name
    assert [known for known in registry.names() if registry.tool_format(known).matches(TEMPLATES[name])] == [name]


def test_a_template_without_calls_gets_the_default_and_a_wrong_name_lists_the_right_ones() -> None:
    assert registry.detect("{{ messages }}").name == registry.DEFAULT
    with pytest.raises(OptionError, match=r"hermes.*not 'nonsense'"):
        registry.tool_format("nonsense")


def test_a_command_line_written_for_vllm_names_the_same_formats() -> None:
    tools = {"openai": "harmony", "glm45": "glm", "deepseek_v3": "deepseek", "qwen3_xml": "qwen3_coder"}
    assert {alias: registry.tool_format(alias).name for alias in tools} == tools
    reasoning = {"qwen3": "think", "deepseek_r1": "think", "openai_gptoss": "harmony", "seed_oss": "seed"}
    assert {alias: reasoning_format(alias).name for alias in reasoning} == reasoning


def test_no_name_and_no_alias_stands_for_two_formats() -> None:
    for formats in (REASONING_FORMATS, tuple(registry.formats().values())):
        spellings = [spelling for known in formats for spelling in (known.name, *known.aliases)]
        assert len(spellings) == len(set(spellings))


# --- reasoning ---

TAGGED = [known.name for known in REASONING_FORMATS if known.is_tagged]


@pytest.mark.parametrize("name", TAGGED)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_reasoning_is_split_wherever_the_text_is_cut(name: str, data: st.DataObject) -> None:
    known, is_open = reasoning_format(name), data.draw(st.booleans())
    thought, answer = "first < then\nagain", 'So: <tool_call>{"name": "now"}</tool_call>'
    text = f"{'' if is_open else known.begin}\n{thought}\n{known.end}\n\n{answer}"
    text = text[: data.draw(st.sampled_from([len(text), len(text) // 2, 3]))]
    parse = known.parse(is_open, parse_of("hermes"))
    whole = read(parse, text)
    parts = read(parse, *cut(text, data.draw(st.lists(st.integers(0, 1000), max_size=12))))
    assert (parts.content, parts.reasoning, parts.calls) == (whole.content, whole.reasoning, whole.calls)
    if text.endswith("</tool_call>"):
        assert (whole.reasoning, whole.content, whole.called) == (thought, "So:", [NOW])


@pytest.mark.parametrize("name", TAGGED)
def test_an_answer_without_reasoning_stays_as_it_is(name: str) -> None:
    known = reasoning_format(name)
    result = read(known.parse(False, content_only), f" no mark first, {known.begin} later {known.end} ")
    assert result.content == f" no mark first, {known.begin} later {known.end} " and not result.reasoning


def test_the_chat_template_says_whether_a_model_reasons() -> None:
    expected = {"{{ '<think>\n' }}{{ '</think>' }}": "think", "<|start|><|channel|>analysis<|message|>": "harmony"}
    for template, name in expected.items():
        known = detect_reasoning(template)
        assert known is not None and known.name == name
    assert detect_reasoning("{{ messages }}") is None
    with pytest.raises(OptionError, match=r"think.*not 'nonsense'"):
        reasoning_format("nonsense")


def test_a_family_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the folder of families is found by name and by its templates; nothing else changes."""
    source = (Path(families.__path__[0]) / "hermes.py").read_text()
    source = source.replace("tool_call>", "act>").replace('"hermes"', '"acting"')
    (tmp_path / "acting.py").write_text(source)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    registry.formats.cache_clear()
    try:
        assert "acting" in registry.names() and registry.detect("<act>").name == "acting"
        assert read(registry.tool_format("acting").parse(OFFER), '<act>{"name": "now"}</act>').called == [NOW]
    finally:
        registry.formats.cache_clear()
