"""Tool calls as models write them on a bad day: marks forgotten or repeated, words around them, reasoning left open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.serve.config import ServerConfig
from tests.serve.running import CHAT, NAME, RunningServer, serving
from tests.serve.scripted import OPEN_THINKING_TEMPLATE, TOOL_TEMPLATE, ScriptedEngine, tokenizer_with

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "forecast", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
ROME: tuple[str, Any] = ("forecast", {"city": "Rome"})
NOW: tuple[str, Any] = ("now", {})

# parser, output, content, calls
OUTPUTS: dict[str, tuple[str, str, str | None, list[tuple[str, Any]]]] = {
    "a sentence before and after a call": (
        "llama3_json",
        'I look: {"name": "forecast", "parameters": {"city": "Rome"}} One moment.',
        "I look: One moment.",
        [ROME],
    ),
    "calls between sentences": (
        "llama3_json",
        'First {"name": "forecast", "parameters": {"city": "Rome"}}; {"name": "now", "parameters": {}} done',
        "First done",
        [ROME, NOW],
    ),
    "an object of an offered name without arguments": ("llama3_json", '{"name": "now"}', '{"name": "now"}', []),
    "arguments that are no JSON": (
        "llama3_json",
        '{"name": "forecast", "parameters": {Rome}}',
        '{"name": "forecast", "parameters": {Rome}}',
        [],
    ),
    "arguments that are no JSON between tags": (
        "hermes",
        '<tool_call>{"name": "forecast", "arguments": {Rome}}</tool_call>',
        '{"name": "forecast", "arguments": {Rome}}',
        [],
    ),
    "a call without its last brace": (
        "hermes",
        'I look.<tool_call>\n{"name": "forecast", "arguments": {"city": "Rome"}\n</tool_call> One moment.',
        "I look. One moment.",
        [ROME],
    ),
    "a call with a brace too many": (
        "hermes",
        '<tool_call>\n{"name": "forecast", "arguments": {"city": "Rome"}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        None,
        [ROME, NOW],
    ),
    "text after a call keeps its distance": (
        "deepseek",
        'I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>forecast<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜> One moment.",
        "I look. One moment.",
        [ROME],
    ),
    "the mark of calls twice": (
        "mistral",
        '[TOOL_CALLS] [TOOL_CALLS] [{"name": "forecast", "arguments": {"city": "Rome"}}]',
        None,
        [ROME],
    ),
    "an entry that is no call beside one that is": (
        "mistral",
        '[TOOL_CALLS][{"name": "forecast", "arguments": {"city": "Rome"}}, "Oslo", {"name": "now", "arguments": {}}]',
        None,
        [ROME, NOW],
    ),
    "a list without a call": ("mistral", '[TOOL_CALLS] ["forecast"]', '["forecast"]', []),
    "a name alone": ("mistral", "[TOOL_CALLS]now", None, [NOW]),
    "words between the mark and its list": (
        "mistral",
        '[TOOL_CALLS] here: [{"name": "forecast", "arguments": {"city": "Rome"}}]',
        None,
        [ROME],
    ),
    "text after a list of calls": (
        "mistral",
        'I look.[TOOL_CALLS] [{"name": "forecast", "arguments": {"city": "Rome"}}, {"name": "now", "arguments": {}}]\n'
        "One moment, please.",
        "I look.\nOne moment, please.",
        [ROME, NOW],
    ),
    "text after named calls": (
        "mistral",
        '[TOOL_CALLS]forecast[ARGS]{"city": "Rome"}[TOOL_CALLS]now{} One moment: {"a": [1]}.',
        'One moment: {"a": [1]}.',
        [ROME, NOW],
    ),
    "text between named calls": (
        "mistral",
        '[TOOL_CALLS]forecast{"city": "Rome"} and [TOOL_CALLS]now[CALL_ID]a1[ARGS]{}',
        "and",
        [ROME, NOW],
    ),
    "a call without arguments before another one": (
        "mistral",
        '[TOOL_CALLS]now[TOOL_CALLS]forecast[ARGS]{"city": "Rome"}',
        None,
        [NOW, ROME],
    ),
    "a name before the mark": (
        "mistral",
        'forecast[TOOL_CALLS]{"city": "Rome"}now[TOOL_CALLS][ARGS]{}',
        "forecastnow",
        [ROME, NOW],
    ),
    "a name before the mark and in the object": (
        "mistral",
        'forecast[TOOL_CALLS]{"name": "forecast", "arguments": {"city": "Rome"}}',
        "forecast",
        [ROME],
    ),
    "words after the mark and no name": ("mistral", "[TOOL_CALLS]I take {this} one.", "I take {this} one.", []),
    "an argument whose end tag is missing": (
        "qwen3_coder",
        "<tool_call>\n<function=forecast>\n<parameter=city>\nRome\n<parameter=days>\n2\n</function>\n</tool_call>",
        None,
        [("forecast", {"city": "Rome", "days": 2})],
    ),
    "a recipient without its namespace": (
        "harmony",
        '<|channel|>commentary to=forecast <|constrain|>json<|message|>{"city": "Rome"}<|call|>',
        None,
        [ROME],
    ),
    "a call without a text": ("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>", None, [NOW]),
    "recipients that are no functions": (
        "harmony",
        "<|channel|>analysis to=python<|message|>1+1<|call|><|start|>assistant<|channel|>commentary to=assistant"
        "<|message|>2<|end|><|start|>assistant<|channel|>final<|message|>It is 2.<|return|>",
        "It is 2.",
        [],
    ),
    "two messages for the user": (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Warm.<|return|>",
        "I look.\nWarm.",
        [],
    ),
    "an answer whose mark is missing": ("harmony", "<|channel|>final It is warm.<|return|>", "It is warm.", []),
}


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(tokenizer_with(TOOL_TEMPLATE))


@pytest.fixture(scope="module")
def servers(engine: ScriptedEngine) -> Iterator[dict[str, RunningServer]]:
    """A server for each parser that occurs, all over one engine."""
    parsers = {output[0] for output in OUTPUTS.values()}
    contexts = {parser: serving(engine, ServerConfig((NAME,), tool_parser=parser)) for parser in sorted(parsers)}
    yield {parser: context.__enter__() for parser, context in contexts.items()}
    for context in contexts.values():
        context.__exit__(None, None, None)


def message_of(server: RunningServer, stream: bool) -> Any:
    """The message of a chat completion, put together by the client where it is streamed."""
    client = server.client()
    ask: list[Any] = [{"role": "user", "content": "Is it warm in Rome?"}]
    if not stream:
        return client.chat.completions.create(model=NAME, messages=ask, tools=TOOLS).choices[0].message
    with client.chat.completions.stream(model=NAME, messages=ask, tools=TOOLS) as events:
        return events.get_final_completion().choices[0].message


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", OUTPUTS)
def test_a_client_gets_the_calls_and_the_text(
    servers: dict[str, RunningServer], engine: ScriptedEngine, case: str, stream: bool
) -> None:
    parser, output, content, calls = OUTPUTS[case]
    engine.outputs = [output]
    message = message_of(servers[parser], stream)
    written = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    assert (message.content or None, written) == (content, calls)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_call_ends_reasoning_that_was_left_open(stream: bool) -> None:
    engine = ScriptedEngine(tokenizer_with(OPEN_THINKING_TEMPLATE))
    engine.outputs = ['I need the forecast.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'] * 2
    with serving(engine, ServerConfig((NAME,))) as server:
        message = message_of(server, stream)
        assert message.reasoning_content == "I need the forecast."
        assert [call.function.name for call in message.tool_calls] == ["now"] and not message.content
        without_tools = server.client().chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "Is it warm?"}]
        )
        assert "<tool_call>" in without_tools.choices[0].message.reasoning_content  # type: ignore[attr-defined]


@pytest.mark.parametrize("body", [{"prompt": None}, {"prompt": {"text": "a"}}])
def test_a_field_of_several_kinds_says_which(servers: dict[str, RunningServer], body: dict[str, Any]) -> None:
    server = servers["hermes"]
    error = server.http().post("/v1/completions", json={"model": NAME, **body}).json()["error"]
    assert error["param"] == "prompt" and "a valid string or a valid list" in error["message"]
    assert server.http().post(CHAT, json={"model": NAME, "messages": 1}).json()["error"]["param"] == "messages"
