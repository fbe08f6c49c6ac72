"""Namespaces and custom tools of the Responses API, and answers that go on, driven by the openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from paceline.serve.api_responses_tools import CustomInput, custom_arguments
from paceline.serve.config import ServerConfig
from tests.serve.running import NAME, RunningServer, serving
from tests.serve.scripted import TOOL_TEMPLATE, ScriptedEngine, tokenizer_with

APP: dict[str, Any] = {"type": "object", "properties": {"app": {"type": "string"}}, "required": ["app"]}
STATE = {"type": "function", "name": "get_state", "description": "State of an app", "parameters": APP}
SHELL = {"type": "custom", "name": "shell", "description": "Runs a command"}
DESKTOP = {"type": "namespace", "name": "mcp__desktop", "description": "A desktop", "tools": [STATE, SHELL]}
COMMAND = 'echo "café 😀"\n\tls\\x'
TEXT_ANSWER = [{"role": "user", "content": "Look."}]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def shared_engine() -> ScriptedEngine:
    return ScriptedEngine(tokenizer_with(TOOL_TEMPLATE))


@pytest.fixture(scope="module")
def server(shared_engine: ScriptedEngine) -> Iterator[RunningServer]:
    with serving(shared_engine, ServerConfig((NAME,))) as running:
        yield running


@pytest.fixture
def engine(shared_engine: ScriptedEngine) -> ScriptedEngine:
    shared_engine.requests, shared_engine.outputs = [], []
    return shared_engine


def answered(server: RunningServer, stream: bool, **params: Any) -> tuple[Any, list[Any]]:
    """The response, and the events of its stream."""
    client = server.client()
    params = {"model": NAME, "input": TEXT_ANSWER, **params}
    if not stream:
        return client.responses.create(**params), []
    events = list(client.responses.create(**params, stream=True))
    return events[-1].response, events


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_call_into_a_namespace_names_it_apart(server: RunningServer, engine: ScriptedEngine, stream: bool) -> None:
    engine.outputs = [call("mcp__desktop__get_state", '{"app": "Editor"}'), "It is open."]
    response, events = answered(server, stream, tools=[DESKTOP])
    item = response.output[0]
    assert (item.type, item.namespace, item.name) == ("function_call", "mcp__desktop", "get_state")
    assert json.loads(item.arguments) == {"app": "Editor"}
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [(item.namespace, item.name) for item in added] == [("mcp__desktop", "get_state")] * stream
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "open"}
    history = [*TEXT_ANSWER, item.model_dump(), output]
    assert answered(server, stream, tools=[DESKTOP], input=history)[0].output_text == "It is open."
    assert '{"name": "mcp__desktop__get_state", "arguments": {"app": "Editor"}}' in engine.prompts[-1]


@pytest.mark.parametrize("tool", [SHELL, DESKTOP], ids=["alone", "in a namespace"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_custom_tool_is_called_with_a_text(
    server: RunningServer, engine: ScriptedEngine, tool: dict[str, Any], stream: bool
) -> None:
    name = "shell" if tool is SHELL else "mcp__desktop__shell"
    engine.outputs = [call(name, custom_arguments(COMMAND)), "Done."]
    response, events = answered(server, stream, tools=[tool])
    item = response.output[0]
    assert (item.type, item.name, item.input) == ("custom_tool_call", "shell", COMMAND)
    assert item.id.startswith("ctc_") and item.namespace == (None if tool is SHELL else "mcp__desktop")
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    done = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
    assert ("".join(deltas), done) == ((COMMAND, [COMMAND]) if stream else ("", [])) and (len(deltas) > 1) == stream
    output = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "café"}
    history = [*TEXT_ANSWER, item.model_dump(), output]
    assert answered(server, stream, tools=[tool], input=history)[0].output_text == "Done."
    assert f'"name": "{name}"' in engine.prompts[-1] and "<s>tool: café</s>" in engine.prompts[-1]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "shell", "namespace": "mcp__desktop"},
        {"type": "function", "name": "get_state", "namespace": "mcp__desktop"},
    ],
    ids=["custom", "function"],
)
def test_a_tool_of_a_namespace_can_be_demanded(
    server: RunningServer, engine: ScriptedEngine, choice: dict[str, str]
) -> None:
    engine.outputs = [call(f"mcp__desktop__{choice['name']}", '{"input": "ls"}')]
    response, _ = answered(server, False, tools=[DESKTOP], tool_choice=choice)
    structure = engine.requests[-1].structured_output
    assert response.output[0].name == choice["name"]
    assert structure is not None and f"mcp__desktop__{choice['name']}" in str(structure)


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({**SHELL, "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}}, "tools.0.format"),
        ({**SHELL, "format": "text"}, "tools.0.format"),
        ({**DESKTOP, "tools": "all"}, "tools.0.tools"),
        ({**DESKTOP, "tools": [DESKTOP]}, "tools.0.tools.0"),
        ({"type": "custom"}, "tools.0.name"),
    ],
    ids=["a grammar", "no format", "no tools", "a namespace in another", "no name"],
)
def test_what_is_no_tool_is_refused_by_name(server: RunningServer, tool: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        answered(server, False, tools=[tool])
    assert error.value.param == param


@pytest.mark.parametrize("status", ["in_progress", "incomplete", "completed"])
def test_an_answer_goes_on_from_a_message_that_is_not_complete(
    server: RunningServer, engine: ScriptedEngine, status: str
) -> None:
    engine.outputs = ["C)."]
    content = [{"type": "output_text", "text": "The best answer is (", "annotations": []}]
    last = {"type": "message", "id": "msg_1", "role": "assistant", "status": status, "content": content}
    assert answered(server, False, input=[*TEXT_ANSWER, last])[0].output_text == "C)."
    assert engine.prompts[-1].endswith("The best answer is (") == (status != "completed")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (custom_arguments(COMMAND), COMMAND),
        (json.dumps({"input": COMMAND}), COMMAND),
        (' { "input" : "a" }', "a"),
        ('{"note": "b", "input": "a"}', "a"),
        ('{"input": "a\\ud83dz"}', "a\ud83dz"),
        ('{"input": 7}', '{"input": 7}'),
        ("ls -la", "ls -la"),
        ('{"input": "cut of', "cut of"),
    ],
    ids=["plain", "escaped", "blanks", "other keys", "half a pair", "a number", "no JSON", "cut"],
)
def test_the_text_is_the_same_wherever_the_arguments_are_split(arguments: str, text: str, size: int) -> None:
    parts = CustomInput()
    shown = "".join(parts.feed(arguments[start : start + size]) for start in range(0, len(arguments), size))
    assert parts.whole() == text and text.startswith(shown)
