"""Anthropic's Messages API: over HTTP, with the anthropic client where it is installed, and on fixed documents."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest

from paceline.serve.api_messages_input import MessagesRequest, chat_document
from paceline.serve.api_messages_output import MessagesShape
from paceline.serve.config import NetworkConfig, ServerConfig
from paceline.serve.errors import ApiError
from tests.serve.running import NAME, RunningServer, serving
from tests.serve.toy_engine import ReversingEngine

KEY = "first-secret"
BODY = {"model": NAME, "max_tokens": 32, "messages": [{"role": "user", "content": "abcdef"}]}


@pytest.fixture(scope="module")
def engine() -> ReversingEngine:
    return ReversingEngine()


@pytest.fixture(scope="module")
def server(engine: ReversingEngine) -> Iterator[RunningServer]:
    with serving(engine, ServerConfig((NAME,), network=NetworkConfig(api_keys=(KEY,)))) as running_server:
        yield running_server


def anthropic_client(server: RunningServer) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=120)


def post(server: RunningServer, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    with server.http(**{"x-api-key": KEY}) as client:
        return client.post(path, json={**BODY, **fields})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


# --- over HTTP --------------------------------------------------------------------------------------------------------


def test_a_message_is_answered(server: RunningServer) -> None:
    message = post(server, system=[{"type": "text", "text": "xyz"}]).json()
    assert message["content"] == [{"type": "text", "text": "fedcbazyx"}]
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert message["usage"] == {
        "input_tokens": 9, "output_tokens": 9, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
    }  # fmt: skip


def test_a_stream_has_the_events_in_order(server: RunningServer) -> None:
    response = post(server, stream=True)
    events = events_of(response)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert list(dict.fromkeys(event["type"] for event in events)) == [
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    start = events[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["input_tokens"] == 6
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == "fedcba"
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 6


def test_tokens_are_counted(server: RunningServer) -> None:
    body = {"model": NAME, "messages": BODY["messages"], "system": "xy"}
    with server.http(**{"x-api-key": KEY}) as client:
        assert client.post("/v1/messages/count_tokens", json=body).json() == {"input_tokens": 8}


@pytest.mark.slow
def test_sampling_and_stop_sequences_reach_the_engine(server: RunningServer, engine: ReversingEngine) -> None:
    post(server, temperature=0.5, top_k=7, stop_sequences=["x", "y"], seed=3)
    request = engine.requests[-1]
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.5, 7, 3)
    assert request.stop == ("x", "y") and request.max_new_tokens == 32


@pytest.mark.slow
def test_a_stop_sequence_is_named(tiny_server: RunningServer) -> None:
    fields = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}
    text = post(tiny_server, **fields).json()["content"][0]["text"]
    stop = next(character for character in text[4:] if character.isascii())
    message = post(tiny_server, **fields, stop_sequences=["never met", stop]).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == text[: text.index(stop)]
    events = events_of(post(tiny_server, **fields, stop_sequences=[stop], stream=True))
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


@pytest.mark.slow
def test_errors_have_anthropics_shape(server: RunningServer) -> None:
    response = post(server, model="nothing")
    assert response.status_code == 404 and response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "not_found_error"
    assert post(server, max_tokens=0).json()["error"]["type"] == "invalid_request_error"
    unauthorised = server.http().post("/v1/messages", json=BODY)
    assert unauthorised.status_code == 401 and unauthorised.json()["error"]["type"] == "authentication_error"
    image = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}]
    response = post(server, messages=[{"role": "user", "content": image}])
    assert response.status_code == 400 and "reads text" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_conversation_without_messages_is_refused(server: RunningServer, path: str) -> None:
    response = post(server, path, messages=[])
    error = response.json()
    assert response.status_code == 400 and (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith("messages: "), "in Anthropic's words, it names the field"


def test_a_conversation_that_is_too_long_is_said_in_anthropics_words(server: RunningServer) -> None:
    response = post(server, messages=[{"role": "user", "content": "x" * 100}])
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and re.match(r"prompt is too long: \d+ tokens > \d+ maximum", message)


def test_an_answer_that_is_too_long_is_said_in_words_after_which_clients_ask_for_less(server: RunningServer) -> None:
    response = post(server, max_tokens=5000)
    pattern = r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)"
    sizes = re.match(pattern, response.json()["error"]["message"])
    assert response.status_code == 400 and sizes is not None
    num_tokens, asked, limit = map(int, sizes.groups())
    assert asked == 5000 and post(server, max_tokens=limit - num_tokens).status_code == 200


@pytest.mark.slow
def test_an_answer_goes_on_from_the_last_message(tiny_server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "to be or"}]
    document = chat_document(MessagesRequest.model_validate({**BODY, "messages": messages}))
    body = {"messages": document["messages"], "continue_final_message": True, "add_generation_prompt": False}
    expected = tiny_server.http().post("/tokenize", json=body).json()["count"]
    assert post(tiny_server, messages=messages).json()["usage"]["input_tokens"] == expected
    turns = tiny_server.http().post("/tokenize", json={"messages": document["messages"]}).json()["count"]
    assert expected < turns, "it does not start a turn of its own"


def test_a_bearer_key_still_works(server: RunningServer) -> None:
    assert server.http(authorization=f"Bearer {KEY}").post("/v1/messages", json=BODY).status_code == 200


# --- with the client --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_client_asks_streams_and_counts(server: RunningServer) -> None:
    client = anthropic_client(server)
    message = client.messages.create(**BODY)
    assert message.content[0].text == "fedcba" and message.stop_reason == "max_tokens"
    with client.messages.stream(**BODY) as stream:
        assert "".join(stream.text_stream) == "fedcba"
        assert stream.get_final_message().usage.output_tokens == 6
    assert client.messages.count_tokens(model=NAME, messages=BODY["messages"]).input_tokens == 6


@pytest.mark.slow
def test_the_client_passes_an_answer_back(server: RunningServer, engine: ReversingEngine) -> None:
    client = anthropic_client(server)
    messages: list[Any] = list(BODY["messages"])
    for turn in range(3):
        answer = client.messages.create(model=NAME, max_tokens=4, messages=messages)
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": str(turn)}]
    assert engine.tokenizer.decode(engine.requests[-1].prompt) == "abcdef" "fedc" "0" "0cde" "1"


@pytest.mark.slow
def test_the_client_reads_errors(server: RunningServer) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic_client(server)
    with pytest.raises(anthropic.NotFoundError, match="there is no model"):
        client.messages.create(**{**BODY, "model": "nothing"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**BODY, extra_body={"temperature": 5.0})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0).messages.create(**BODY)


# --- tools and thinking, on fixed documents ---------------------------------------------------------------------------

CALL = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def test_tool_calls_and_reasoning_are_blocks() -> None:
    message = {"role": "assistant", "content": None, "reasoning_content": "A city.", "tool_calls": [CALL]}
    details = {"cached_tokens": 5, "cache_write_tokens": 3}
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": details}
    choice = {"message": message, "finish_reason": "tool_calls"}
    document = MessagesShape().whole({"model": NAME, "choices": [choice], "usage": usage})
    thinking, *_ = document["content"]
    assert document["content"] == [
        {"type": "thinking", "thinking": "A city.", "signature": thinking["signature"]},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}},
    ]
    assert thinking["signature"], "clients send only signed thoughts back"
    assert document["stop_reason"] == "tool_use"
    assert document["usage"] == {
        "input_tokens": 1, "output_tokens": 4, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 5,
    }  # fmt: skip


@pytest.mark.parametrize("logprobs", [None, {"content": [{"token": "a", "logprob": 0.0}]}])
def test_a_stream_of_tool_calls_has_a_block_for_each(logprobs: dict[str, Any] | None) -> None:
    def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
        return {"model": NAME, "choices": [{"delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}]}

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        yield chunk(role="assistant", content="")
        yield chunk(reasoning_content="A city.")
        yield chunk(content="I look.")
        yield chunk(tool_calls=[{**CALL, "function": {"name": "weather", "arguments": ""}}])
        yield chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"city": '}}])
        yield chunk(tool_calls=[{"index": 0, "function": {"arguments": '"Rome"}'}}])
        yield chunk(tool_calls=[{"index": 1, "id": "call_2", "function": {"name": "time", "arguments": "{}"}}])
        yield chunk("tool_calls")

    async def collected() -> list[dict[str, Any]]:
        return [event async for event in MessagesShape().chunks(chunks())]

    events = asyncio.run(collected())
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert starts[2] == {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}}
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    kinds = ["thinking_delta", "signature_delta", "text_delta", *["input_json_delta"] * 3]
    assert [delta["type"] for delta in deltas] == kinds and deltas[1]["signature"]
    assert "".join(delta["partial_json"] for delta in deltas[3:5]) == '{"city": "Rome"}'
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stops == [0, 1, 2, 3] and events[-2]["delta"]["stop_reason"] == "tool_use"


def test_an_error_in_a_stream_is_an_event() -> None:
    event = MessagesShape().error(ApiError(500, "the model failed"))
    assert event == {"type": "error", "error": {"type": "api_error", "message": "the model failed"}}


def request_of(**fields: Any) -> dict[str, Any]:
    return chat_document(MessagesRequest.model_validate({**BODY, **fields}))


def test_blocks_of_earlier_turns_become_chat_messages() -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A city.", "signature": "x"},
                {"type": "text", "text": "I look.", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "2", "content": "no such city", "is_error": True},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    first, turn, result, failure, question = request_of(messages=messages)["messages"]
    assert first == {"role": "user", "content": "Weather?"}
    assert turn["content"] == "I look." and turn["reasoning_content"] == "A city."
    assert turn["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city":"Rome"}'}
    assert result == {"role": "tool", "tool_call_id": "1", "content": "rain"}
    assert failure["content"] == "Error: no such city" and question == {"role": "user", "content": "And now?"}


@pytest.mark.slow
def test_turns_of_the_assistant_that_follow_one_another_are_one(tiny_server: RunningServer) -> None:
    call = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
    turns = [{"role": "assistant", "content": "I look."}, {"role": "assistant", "content": [call]}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "rain"}]}
    _, turn, answer = request_of(messages=[*BODY["messages"], *turns, result])["messages"]
    assert turn["content"] == "I look." and len(turn["tool_calls"]) == 1 and answer["role"] == "tool"
    texts = [{"role": "assistant", "content": text} for text in ("to be", "or not")]
    assert request_of(messages=[*BODY["messages"], *texts])["messages"][-1]["content"] == "to be\n\nor not"
    assert post(tiny_server, messages=[*BODY["messages"], *texts]).status_code == 200, "the answer goes on from both"


def test_tools_and_their_choice_take_the_chat_spelling() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"name": "weather", "description": "of a city", "input_schema": schema}
    document = request_of(tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    function = {"name": "weather", "parameters": schema, "description": "of a city"}
    assert document["tools"] == [{"type": "function", "function": function}]
    assert document["tool_choice"] == "required" and document["parallel_tool_calls"] is False
    chosen = request_of(tools=[tool], tool_choice={"type": "tool", "name": "weather"})["tool_choice"]
    assert chosen == {"type": "function", "function": {"name": "weather"}}
    with pytest.raises(ApiError, match="own tools only"):
        request_of(tools=[{"type": "bash_20250124", "name": "bash"}])


def test_a_schema_of_the_output_takes_the_chat_spelling() -> None:
    config = {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"}
    document = request_of(output_config=config)
    assert document["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert document["reasoning_effort"] == "low"
