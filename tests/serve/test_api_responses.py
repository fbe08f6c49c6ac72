"""OpenAI's Responses API, driven by the openai client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import openai
import pytest

from paceline.serve.api_chat import chat_request
from paceline.serve.api_responses_input import ResponsesRequest, chat_document, messages_of
from paceline.serve.api_responses_output import ResponseDocument, ResponsesShape
from paceline.serve.api_responses_store import ResponseStore, StoredResponse
from paceline.serve.config import NetworkConfig, ServerConfig
from paceline.serve.errors import ApiError
from tests.serve.running import NAME, RunningServer, serving, slowed
from tests.serve.toy_engine import ReversingEngine

KEYS = ("first-secret", "other-secret")


@pytest.fixture(scope="module")
def engine() -> ReversingEngine:
    return ReversingEngine()


@pytest.fixture(scope="module")
def server(engine: ReversingEngine) -> Iterator[RunningServer]:
    with serving(engine, ServerConfig((NAME,), network=NetworkConfig(api_keys=KEYS))) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client(KEYS[0])


def create(client: openai.OpenAI, **params: Any) -> Any:
    return client.responses.create(**{"model": NAME, "input": "abc", **params})


# --- whole ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_response_has_its_output_and_usage(client: openai.OpenAI) -> None:
    response = create(client, instructions="xyz", metadata={"job": "seven"}, temperature=0.5)
    assert response.output_text == "cbazyx" and response.output[0].type == "message"
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (6, 6, 12)
    assert response.instructions == "xyz" and response.metadata == {"job": "seven"} and response.temperature == 0.5


def test_input_items_are_read_and_the_system_messages_are_one(
    client: openai.OpenAI, engine: ReversingEngine
) -> None:
    items = [
        {"role": "developer", "content": "b"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "c"}]},
    ]
    assert create(client, instructions="a", input=items).output_text == "cb\n\na"
    assert engine.tokenizer.decode(engine.requests[-1].prompt) == "a\n\nbc"


def test_the_length_is_limited_by_max_output_tokens(client: openai.OpenAI, engine: ReversingEngine) -> None:
    assert create(client, max_output_tokens=2).output_text == "cb"
    assert engine.requests[-1].max_new_tokens == 2


def test_log_probabilities_are_part_of_the_text(client: openai.OpenAI) -> None:
    response = create(client, include=["message.output_text.logprobs"], top_logprobs=1)
    assert [entry.token for entry in response.output[0].content[0].logprobs] == ["c", "b", "a"]


@pytest.mark.parametrize("how", ["whole", "stream", "background"])
def test_what_the_model_read_and_wrote_is_shown(client: openai.OpenAI, how: str) -> None:
    extra, params = {"enable_response_messages": True}, {"instructions": "xy"}
    if how == "stream":
        response = list(create(client, extra_body=extra, stream=True, **params))[-1].response
    else:
        response = create(client, extra_body=extra, background=how == "background", **params)
    while response.status == "queued":
        response = client.responses.retrieve(response.id)
    (read,), (written,) = response.input_messages, response.output_messages
    assert (read["type"], read["message"]) == ("raw_message_tokens", "xyabc") and written["message"] == "cbayx"
    assert (read["tokens"], written["tokens"]) == ([120, 121, 97, 98, 99], [99, 98, 97, 121, 120])
    assert "input_messages" not in create(client).model_dump()


@pytest.mark.slow
def test_there_are_as_many_alternatives_as_asked_for(tiny_server: RunningServer) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 5, "temperature": 1.8}
    response = create(tiny_server.client(), max_output_tokens=24, extra_body={"seed": 3, "ignore_eos": True}, **fields)
    entries = response.output[0].content[0].logprobs
    assert entries and all(len(entry.top_logprobs) == 5 for entry in entries)
    assert all(entry.logprob in [other.logprob for other in entry.top_logprobs] for entry in entries)


def test_fields_of_the_server_reach_the_engine(client: openai.OpenAI, engine: ReversingEngine) -> None:
    create(client, extra_body={"seed": 7, "top_k": 3, "speculative": {"num_draft_tokens": 2}})
    request = engine.requests[-1]
    assert (request.sampling.seed, request.sampling.top_k, request.num_draft_tokens) == (7, 3, 2)


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_answers_in_a_schema(default_server: RunningServer) -> None:
    schema = {
        "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False,
    }  # fmt: skip
    text = {"format": {"type": "json_schema", "name": "city", "schema": schema, "strict": True}}
    response = create(
        default_server.client(), input="The capital of France?", text=text, max_output_tokens=24, temperature=0
    )
    assert json.loads(response.output_text)["city"] in ("Paris", "Rome") and response.status == "completed"


# --- streams ----------------------------------------------------------------------------------------------------------

ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.incomplete",
]


def test_a_stream_has_the_events_in_order_and_numbered(client: openai.OpenAI) -> None:
    events = list(create(client, input="abcdef", stream=True))
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds)) == ORDER and kinds.count("response.output_text.delta") == 4
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == ORDER[4]) == "fedcba"
    assert {event.item_id for event in events if event.type in ORDER[3:7]} == {events[-1].response.output[0].id}
    final = events[-1].response
    assert final.output_text == "fedcba" and final.usage.output_tokens == 6
    assert client.responses.retrieve(final.id).output_text == "fedcba"


@pytest.mark.slow
def test_the_stream_helper_of_the_client_adds_it_up(client: openai.OpenAI) -> None:
    with client.responses.stream(model=NAME, input="abcdef") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == "fedcba"


def test_an_error_in_a_stream_is_a_failed_response() -> None:
    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        yield {"model": NAME, "choices": [{"delta": {"content": "a"}, "finish_reason": None}]}

    shape = ResponsesShape(ResponseDocument("resp_1", {}, lambda document: None))
    events = asyncio.run(collected(shape.chunks(chunks())))
    failure = shape.error(ApiError(500, "the model failed", code="model_failed"))
    assert failure["type"] == "response.failed" and failure["sequence_number"] == len(events)
    assert failure["response"]["error"] == {"code": "model_failed", "message": "the model failed"}


async def collected(events: AsyncGenerator[dict[str, Any], None]) -> list[dict[str, Any]]:
    return [event async for event in events]


# --- state ------------------------------------------------------------------------------------------------------------


def test_a_response_continues_from_another(client: openai.OpenAI, engine: ReversingEngine) -> None:
    first = create(client, input="ab", instructions="not carried over")
    second = create(client, input="cd", previous_response_id=first.id)
    create(client, input="ef", previous_response_id=second.id)
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt)
    assert prompt == "ab" + first.output_text + "cd" + second.output_text + "ef"
    client.responses.delete(first.id)
    assert create(client, input="gh", previous_response_id=second.id).previous_response_id == second.id


@pytest.mark.slow
def test_responses_are_read_and_deleted(client: openai.OpenAI) -> None:
    response = create(client, input=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert client.responses.retrieve(response.id).output_text == response.output_text
    with pytest.raises(openai.BadRequestError, match="not streamed again"):
        client.responses.retrieve(response.id, stream=True)
    items = client.responses.input_items.list(response.id, order="asc")
    assert [item.content[0].text for item in items] == ["a", "b"]
    latest = client.responses.input_items.list(response.id, limit=1)
    assert latest.data[0].content[0].text == "b" and latest.has_more
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(response.id)


def test_a_response_that_is_not_stored_is_gone(client: openai.OpenAI) -> None:
    response = create(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError) as caught:
        create(client, previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"


def test_a_response_of_another_key_is_not_shown(client: openai.OpenAI, server: RunningServer) -> None:
    response = create(client)
    other = server.client(KEYS[1])
    for call in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    with pytest.raises(openai.NotFoundError):
        create(other, previous_response_id=response.id)


def test_the_store_is_bounded_by_number_and_size() -> None:
    def stored(name: str, size: int = 0) -> StoredResponse:
        return StoredResponse("key", {"id": name, "text": "x" * size}, [])

    store = ResponseStore(max_responses=3, max_characters=1000)
    for name in "abc":
        store.put(stored(name))
    store.get("a", "key")  # now the latest
    store.put(stored("d"))
    assert store.get("a", "key") and len(store) == 3
    with pytest.raises(ApiError):
        store.get("b", "key")
    store.put(stored("e", 975))
    assert len(store) == 1 and store.get("e", "key")
    store.put(stored("f", 2000))
    assert len(store) == 0
    store.update(stored("a"))
    assert len(store) == 0, "it has gone"


def test_a_response_that_has_not_finished_counts_with_its_inputs() -> None:
    store = ResponseStore(max_characters=1000)
    first = StoredResponse("key", {"id": "a"}, [{"text": "x" * 900}])
    store.put(first)
    store.put(StoredResponse("key", {"id": "b"}, [{"text": "x" * 50}]))
    first.document = {"id": "a", "error": "x" * 40}
    store.update(first)
    assert len(store) == 1 and store.get("a", "key"), "its latest state counts, and makes it the latest"


def test_a_background_response_is_polled(client: openai.OpenAI) -> None:
    response = create(client, background=True)
    assert response.status == "queued"
    deadline = time.monotonic() + 60
    while response.status == "queued" and time.monotonic() < deadline:
        response = client.responses.retrieve(response.id)
    assert response.status == "incomplete" and response.output_text == "cba"
    assert client.responses.cancel(response.id).status == "incomplete"


@pytest.mark.slow
def test_a_background_response_can_be_cancelled(tiny_server: RunningServer) -> None:
    client = tiny_server.client()
    with slowed(tiny_server, 0.02):
        response = create(client, background=True, extra_body={"ignore_eos": True})
        assert client.responses.cancel(response.id).status == "cancelled"
        tiny_server.wait_until_idle()
    assert client.responses.retrieve(response.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="only a finished one"):
        create(client, previous_response_id=response.id)


def test_a_failure_in_the_background_is_told(client: openai.OpenAI, engine: ReversingEngine) -> None:
    engine.failure = ValueError("broken")
    response = create(client, background=True)
    deadline = time.monotonic() + 60
    while response.status == "queued" and time.monotonic() < deadline:
        response = client.responses.retrieve(response.id)
    assert response.status == "failed" and response.error.code == "internal_error"


def test_a_response_of_a_request_cannot_be_cancelled(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(create(client).id)


def test_input_tokens_are_counted(client: openai.OpenAI) -> None:
    assert client.responses.input_tokens.count(model=NAME, input="abc", instructions="de").input_tokens == 5


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"input": []}, "input is empty"),
        ({"input": [{"type": "computer_call"}]}, "does not read"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "reads text"),
        ({"tools": [{"type": "web_search"}]}, "functions and custom tools"),
        ({"background": True, "store": False}, "`store` is true"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "needs its schema"),
        ({"conversation": "conv_1"}, "previous_response_id"),
        ({"extra_body": {"n": 2}}, "one answer"),
        ({"temperature": 9}, "temperature"),
    ],
)
def test_what_cannot_be_answered_is_refused(client: openai.OpenAI, params: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        create(client, **params)


# --- tools and reasoning, on fixed documents --------------------------------------------------------------------------

CALL = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
MESSAGE = {"role": "assistant", "content": "Let me look.", "reasoning_content": "A city.", "tool_calls": [CALL]}
USAGE = {
    "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 2}, "completion_tokens_details": {"reasoning_tokens": 1},
}  # fmt: skip


def shaped() -> ResponsesShape:
    return ResponsesShape(ResponseDocument("resp_1", {}, lambda document: None))


def test_tool_calls_and_reasoning_are_items() -> None:
    choice = {"message": MESSAGE, "finish_reason": "tool_calls"}
    document = shaped().whole({"model": NAME, "choices": [choice], "usage": USAGE})
    reasoning, message, call = document["output"]
    assert reasoning["type"] == "reasoning" and reasoning["content"][0]["text"] == "A city."
    assert message["content"][0]["text"] == "Let me look." and document["status"] == "completed"
    assert (call["type"], call["call_id"], call["name"]) == ("function_call", "call_1", "weather")
    assert json.loads(call["arguments"]) == {"city": "Rome"}
    assert document["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert document["usage"]["output_tokens_details"]["reasoning_tokens"] == 1


def test_a_call_that_was_cut_is_left_out() -> None:
    message = {**MESSAGE, "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": '{"ci'}}]}
    choice = {"message": message, "finish_reason": "length"}
    document = shaped().whole({"model": NAME, "choices": [choice], "usage": USAGE})
    assert [item["type"] for item in document["output"]] == ["reasoning", "message"]
    assert document["status"] == "incomplete" and document["incomplete_details"]["reason"] == "max_output_tokens"


def test_a_stream_with_tool_calls_and_reasoning_adds_up_to_the_whole() -> None:
    def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
        return {"model": NAME, "choices": [{"delta": delta, "finish_reason": finish_reason}]}

    second = {"index": 1, "id": "call_2", "function": {"name": "time", "arguments": "{}"}}

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        yield chunk(role="assistant", content="")
        yield chunk(reasoning_content="A ")
        yield chunk(reasoning_content="city.")
        yield chunk(content="Let me look.")
        yield chunk(tool_calls=[{**CALL, "function": {"name": "weather", "arguments": ""}}])
        for piece in ('{"city": ', '"Rome"}'):
            yield chunk(tool_calls=[{"index": 0, "function": {"arguments": piece}}])
        yield chunk(tool_calls=[second])
        yield chunk("tool_calls")
        yield {"model": NAME, "choices": [], "usage": USAGE}

    events = asyncio.run(collected(shaped().chunks(chunks())))
    kinds = list(dict.fromkeys(event["type"] for event in events))
    assert kinds[2:6] == [
        "response.output_item.added", "response.content_part.added",
        "response.reasoning_text.delta", "response.reasoning_text.done",
    ]  # fmt: skip
    arguments = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert arguments == ['{"city": ', '"Rome"}', "{}"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    final = events[-1]["response"]
    assert final["output"] == done and [item["type"] for item in done] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    assert events[-1]["type"] == "response.completed" and final["usage"]["total_tokens"] == 7


def test_log_probabilities_divide_no_item() -> None:
    """Every chunk brings those of its tokens: also of marks, which are not shown, and of reasoning and calls."""
    tokens = iter(range(20))

    def chunk(**delta: Any) -> dict[str, Any]:
        logprobs = {"content": [{"token": str(next(tokens)), "logprob": 0.0, "bytes": None, "top_logprobs": []}]}
        return {"model": NAME, "choices": [{"delta": delta, "logprobs": logprobs, "finish_reason": None}]}

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        yield chunk()
        for part in ("A ", "city."):
            yield chunk(reasoning_content=part)
        yield chunk()
        for part in ("I ", "look."):
            yield chunk(content=part)
        yield chunk()
        yield chunk(tool_calls=[{**CALL, "function": {"name": "weather", "arguments": ""}}])
        for part in ('{"city": ', '"Rome"}'):
            yield chunk(tool_calls=[{"index": 0, "function": {"arguments": part}}])
            yield chunk()
        yield {"model": NAME, "choices": [{"delta": {}, "finish_reason": "tool_calls"}], "usage": USAGE}

    events = asyncio.run(collected(shaped().chunks(chunks())))
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[2]["arguments"] == '{"city": "Rome"}' and output[0]["content"][0]["text"] == "A city."
    assert [entry["token"] for entry in output[1]["content"][0]["logprobs"]] == ["3", "4", "5", "6"]
    assert len([event for event in events if event["type"] == "response.output_item.added"]) == 3


def test_items_of_earlier_turns_become_chat_messages() -> None:
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "A city."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "assistant", "content": "Rain at noon."},
        {"role": "assistant", "content": "Take an umbrella."},
    ]
    messages = messages_of(items)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"] + ["assistant"] * 2
    turn = messages[1]
    assert turn["content"] == "I look." and turn["reasoning_content"] == "A city."
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["weather", "time"]
    assert messages[3] == {"role": "tool", "tool_call_id": "2", "content": "noon"}


def test_tools_and_their_choice_take_the_chat_spelling() -> None:
    tools = [
        {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": True} for name in ("f", "g")
    ]
    body = ResponsesRequest(input="a", tools=tools, tool_choice={"type": "function", "name": "g"})
    document = chat_document(body, body.items)
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert document["tools"][0] == {"type": "function", "function": function}
    assert document["tool_choice"] == {"type": "function", "function": {"name": "g"}}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    document = chat_document(ResponsesRequest(input="a", tools=tools, tool_choice=allowed), body.items)
    assert [tool["function"]["name"] for tool in document["tools"]] == ["g"] and document["tool_choice"] == "required"


def test_formats_reasoning_and_truncation_take_the_chat_spelling() -> None:
    text = {"format": {"type": "json_object"}, "verbosity": "medium"}
    body = ResponsesRequest(input="a", text=text, reasoning={"effort": "low"}, truncation="auto")
    document = chat_document(body, body.items)
    assert document["response_format"] == {"type": "json_object"} and "verbosity" not in document
    assert document["reasoning_effort"] == "low" and document["truncate_prompt_tokens"] == -1
    assert chat_request({"messages": document["messages"]}).messages[0].content == "a"
