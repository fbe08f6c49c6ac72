"""Tools and reasoning through the APIs of others: conversations that their own clients hold over several turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.serve.config import ServerConfig
from tests.serve.running import NAME, RunningServer, serving
from tests.serve.scripted import THINKING_TEMPLATE, ScriptedEngine, tokenizer_with

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
THOUGHT = "<think>\nThey ask about Rome.\n</think>\n\n"
CALLS = "".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' for city in ("Rome", "Oslo")
)
ANSWER = "It rains in Rome."
QUESTION = "Does it rain in Rome and Oslo?"


@pytest.fixture(scope="module")
def shared_engine() -> ScriptedEngine:
    return ScriptedEngine(tokenizer_with(THINKING_TEMPLATE))


@pytest.fixture
def engine(shared_engine: ScriptedEngine) -> ScriptedEngine:
    shared_engine.requests, shared_engine.outputs = [], [f"{THOUGHT}I look.{CALLS}", ANSWER]
    return shared_engine


@pytest.fixture(scope="module")
def server(shared_engine: ScriptedEngine) -> Iterator[RunningServer]:
    with serving(shared_engine, ServerConfig((NAME,))) as running:
        yield running


def check_second_prompt(engine: ScriptedEngine) -> None:
    """The second turn shows the model its calls and their results."""
    prompt = engine.prompts[-1]
    assert prompt.count('"name": "weather", "arguments": {"city":') == 2 and '"parameters"' in prompt
    assert "<s>tool: rain</s><s>tool: snow</s>" in prompt and f"<s>user: {QUESTION}</s>" in prompt


# --- responses --------------------------------------------------------------------------------------------------------


def respond(server: RunningServer, stream: bool, **params: Any) -> Any:
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    client, params = server.client(), {"model": NAME, "tools": tools, **params}
    if not stream:
        return client.responses.create(**params)
    with client.responses.stream(**params) as events:
        return events.get_final_response()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_the_openai_client_calls_tools_with_responses(
    server: RunningServer, engine: ScriptedEngine, stream: bool, stored: bool
) -> None:
    first = respond(server, stream, input=QUESTION, store=stored)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert first.output[0].content[0].text.strip() == "They ask about Rome." and first.status == "completed"
    assert first.output_text.strip() == "I look."
    calls = first.output[2:]
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Rome", "Oslo"]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": weather}
        for call, weather in zip(calls, ("rain", "snow"))
    ]
    if stored:
        second = respond(server, stream, input=results, previous_response_id=first.id)
    else:
        sent_back = [item.model_dump() for item in first.output]  # with all their nulls
        second = respond(server, stream, input=[{"role": "user", "content": QUESTION}, *sent_back, *results])
    assert second.output_text == ANSWER
    check_second_prompt(engine)


# --- messages ---------------------------------------------------------------------------------------------------------


def message(server: RunningServer, stream: bool, messages: list[Any], **params: Any) -> Any:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)
    tools = [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}]
    params = {"model": NAME, "max_tokens": 500, "messages": messages, "tools": tools, **params}
    if not stream:
        return client.messages.create(**params)
    with client.messages.stream(**params) as events:
        return events.get_final_message()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_the_anthropic_client_calls_tools(server: RunningServer, engine: ScriptedEngine, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    first = message(server, stream, messages, thinking=thinking, tool_choice={"type": "auto"})
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.stop_reason == "tool_use" and first.content[0].thinking.strip() == "They ask about Rome."
    assert [block.input for block in first.content[2:]] == [{"city": "Rome"}, {"city": "Oslo"}]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": weather}
        for block, weather in zip(first.content[2:], ("rain", "snow"))
    ]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = message(server, stream, messages)
    assert second.content[-1].text == ANSWER and second.stop_reason == "end_turn"
    check_second_prompt(engine)


def test_thinking_can_be_switched_off(server: RunningServer, engine: ScriptedEngine) -> None:
    message(server, False, [{"role": "user", "content": QUESTION}], thinking={"type": "disabled"})
    assert engine.prompts[-1].endswith("<think>\n\n</think>\n\n")


def test_tokens_of_tools_are_counted(server: RunningServer) -> None:
    with server.http() as client:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}]}
        tools = [{"name": "weather", "input_schema": SCHEMA}]
        plain = client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
        assert client.post("/v1/messages/count_tokens", json={**body, "tools": tools}).json()["input_tokens"] > plain


# --- Ollama -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_the_ollama_client_calls_tools(server: RunningServer, engine: ScriptedEngine, stream: bool) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)
    function = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    answer = client.chat(model=NAME, messages=messages, tools=tools, think=True, stream=stream)
    parts = [part.message for part in answer] if stream else [answer.message]
    assert "".join(part.thinking or "" for part in parts).strip() == "They ask about Rome."
    assert "".join(part.content or "" for part in parts).strip() == "I look."
    calls = [call for part in parts for call in part.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [{"city": "Rome"}, {"city": "Oslo"}]
    messages += [{"role": "assistant", "content": "I look.", "tool_calls": calls}]
    messages += [{"role": "tool", "tool_name": "weather", "content": weather} for weather in ("rain", "snow")]
    assert client.chat(model=NAME, messages=messages, tools=tools).message.content == ANSWER
    check_second_prompt(engine)
