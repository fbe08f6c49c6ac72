"""Ollama's routes: over HTTP, with the ollama client where it is installed, and on fixed documents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest

from paceline.serve.api_ollama_input import chat_messages
from paceline.serve.api_ollama_output import OllamaShape
from paceline.serve.config import ServerConfig
from tests.serve.running import NAME, RunningServer, serving
from tests.serve.toy_engine import ReversingEngine

MESSAGES = [{"role": "user", "content": "abcdef"}]


@pytest.fixture(scope="module")
def engine() -> ReversingEngine:
    return ReversingEngine()


@pytest.fixture(scope="module")
def server(engine: ReversingEngine) -> Iterator[RunningServer]:
    with serving(engine, ServerConfig((NAME,))) as running_server:
        yield running_server


def post(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    with server.http() as client:
        return client.post(path, json={"model": NAME, **fields})


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("application/x-ndjson"), response.text
    return [json.loads(line) for line in response.text.splitlines()]


# --- over HTTP --------------------------------------------------------------------------------------------------------


def test_a_chat_is_streamed_as_lines(server: RunningServer) -> None:
    documents = lines(post(server, "/api/chat", messages=MESSAGES))
    assert "".join(document["message"]["content"] for document in documents) == "fedcba"
    assert [document["done"] for document in documents] == [False] * (len(documents) - 1) + [True]
    last = documents[-1]
    assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == ("length", 6, 6)
    durations = (last["total_duration"], last["prompt_eval_duration"], last["eval_duration"])
    assert durations[0] == durations[1] + durations[2] and min(durations) > 0


def test_a_chat_without_a_stream_is_one_document(server: RunningServer) -> None:
    document = post(server, "/api/chat", messages=MESSAGES, stream=False).json()
    assert document["message"] == {"role": "assistant", "content": "fedcba"} and document["done"]
    assert document["eval_duration"] > 0, "clients divide by it"


@pytest.mark.slow
def test_a_generation_uses_the_system_prompt_or_the_raw_prompt(server: RunningServer) -> None:
    assert post(server, "/api/generate", prompt="abc", system="xy", stream=False).json()["response"] == "cbayx"
    long = post(server, "/api/generate", prompt="abcdefghijklmnopqrstuvwxyz", raw=True, stream=False).json()
    assert long["response"] == "zyxwvutsrqponmlkjihgfedcba", "no limit of 16 tokens"
    documents = lines(post(server, "/api/generate", prompt="abc", raw=True))
    assert "".join(document["response"] for document in documents) == "cba"


def test_options_reach_the_engine(server: RunningServer, engine: ReversingEngine) -> None:
    options = {
        "num_predict": 3, "temperature": 0.5, "top_k": 7, "seed": 11, "stop": ["q"], "repeat_penalty": 1.5,
        "num_ctx": 4096, "num_gpu": 1,
    }  # fmt: skip
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    post(server, "/api/chat", messages=MESSAGES, options=options, format=schema, keep_alive="5m", stream=False)
    request = engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.repetition_penalty) == (0.5, 7, 11, 1.5)
    assert request.max_new_tokens == 3 and request.stop == ("q",)
    assert request.structured_output is not None and json.loads(request.structured_output.value) == schema
    post(server, "/api/chat", messages=MESSAGES, options={"num_predict": -1}, format="json", stream=False)
    assert engine.requests[-1].max_new_tokens == 58
    assert engine.requests[-1].structured_output.kind == "json_object"  # type: ignore[union-attr]


def test_a_negative_seed_is_any(server: RunningServer, engine: ReversingEngine) -> None:
    assert post(server, "/api/generate", prompt="a", stream=False, options={"seed": -1}).status_code == 200
    assert engine.requests[-1].sampling.seed is None


def test_a_request_without_a_prompt_loads_the_model(server: RunningServer) -> None:
    assert post(server, "/api/chat", messages=[]).json()["done_reason"] == "load"
    assert post(server, "/api/generate").json()["done_reason"] == "load"


def test_models_are_listed_and_described(server: RunningServer) -> None:
    with server.http() as client:
        assert [model["name"] for model in client.get("/api/tags").json()["models"]] == [NAME]
        assert client.get("/api/ps").json()["models"][0]["context_length"] == 64
        assert client.get("/api/version").json()["version"]
    shown = post(server, "/api/show").json()
    assert shown["model_info"]["paceline.context_length"] == 64 and "completion" in shown["capabilities"]


def test_the_tag_latest_is_understood(server: RunningServer) -> None:
    assert post(server, "/api/show", model=f"{NAME}:latest").status_code == 200
    document = post(server, "/api/generate", model=f"{NAME}:latest", prompt="ab", stream=False).json()
    assert document["response"] == "ba" and document["model"] == f"{NAME}:latest"


@pytest.mark.slow
def test_errors_have_ollamas_shape(server: RunningServer) -> None:
    response = post(server, "/api/chat", model="nothing", messages=MESSAGES)
    assert response.status_code == 404 and "there is no model" in response.json()["error"]
    refused = post(server, "/api/chat", messages=MESSAGES, options={"mirostat": 2})
    assert refused.status_code == 400 and "mirostat" in refused.json()["error"]
    assert post(server, "/api/pull").status_code == 501
    images = [{"role": "user", "content": "a", "images": ["AAAA"]}]
    assert "reads text" in post(server, "/api/chat", messages=images).json()["error"]


@pytest.mark.parametrize("content_type", ["", "application/x-www-form-urlencoded"])
def test_a_body_without_its_type_is_read_unless_a_browser_sent_it(server: RunningServer, content_type: str) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    body = json.dumps({"model": NAME, "prompt": "abc", "stream": False}).encode()
    with server.http() as client:
        assert client.post("/api/generate", content=body, headers=headers).json()["response"] == "cba"
        for name, value in (("Origin", "https://example.org"), ("Sec-Fetch-Site", "cross-site")):
            assert client.post("/api/generate", content=body, headers={**headers, name: value}).status_code == 415
        assert client.post("/v1/responses", content=body, headers=headers).status_code == 415


def test_an_error_before_the_first_token_has_its_status(server: RunningServer, engine: ReversingEngine) -> None:
    engine.failure = ValueError("broken")
    assert post(server, "/api/chat", messages=MESSAGES).status_code == 500


# --- with the client --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_client_chats_streams_and_lists(server: RunningServer) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)
    assert client.chat(model=NAME, messages=MESSAGES).message.content == "fedcba"
    parts = list(client.chat(model=NAME, messages=MESSAGES, stream=True))
    assert "".join(part.message.content for part in parts) == "fedcba" and parts[-1].done
    assert client.generate(model=NAME, prompt="abc").response == "cba"
    assert "".join(part.response for part in client.generate(model=NAME, prompt="abc", stream=True)) == "cba"
    assert [model.model for model in client.list().models] == [NAME]
    assert client.ps().models[0].model == NAME and client.show(NAME).modelinfo["paceline.block_count"] == 1
    with pytest.raises(ollama.ResponseError, match="there is no model"):
        client.chat(model="nothing", messages=MESSAGES)


# --- tools and thinking, on fixed documents ---------------------------------------------------------------------------

CALL = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def test_tool_calls_and_reasoning_of_a_whole_answer() -> None:
    message = {"role": "assistant", "content": None, "reasoning_content": "A city.", "tool_calls": [CALL]}
    choice = {"message": message, "finish_reason": "tool_calls"}
    document = OllamaShape(NAME, is_chat=True).whole({"choices": [choice], "usage": {"completion_tokens": 3}})
    assert document["message"]["thinking"] == "A city." and document["done_reason"] == "stop"
    function = document["message"]["tool_calls"][0]["function"]
    assert (function["name"], function["arguments"]) == ("weather", {"city": "Rome"})


def test_tool_calls_of_a_stream_are_one_line_with_whole_arguments() -> None:
    def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
        return {"choices": [{"delta": delta, "finish_reason": finish_reason}]}

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        yield chunk(reasoning_content="A city.")
        yield chunk(tool_calls=[{**CALL, "function": {"name": "weather", "arguments": '{"city": '}}])
        yield chunk(tool_calls=[{"index": 0, "function": {"arguments": '"Rome"}'}}])
        yield chunk("tool_calls")

    async def collected() -> list[dict[str, Any]]:
        return [line async for line in OllamaShape(NAME, is_chat=True).chunks(chunks())]

    thinking, calls, last = asyncio.run(collected())
    assert thinking["message"]["thinking"] == "A city." and last["done"]
    assert calls["message"]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}


def test_results_get_the_ids_of_the_calls_they_answer() -> None:
    calls = [{"function": {"name": name, "arguments": {"city": "Rome"}}} for name in ("weather", "time")]
    messages = chat_messages(
        [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
            {"role": "tool", "tool_name": "time", "content": "noon"},
            {"role": "tool", "tool_name": "weather", "content": "rain"},
        ]
    )
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert [messages[2]["tool_call_id"], messages[3]["tool_call_id"]] == ids[::-1]
    assert json.loads(messages[1]["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
    assert messages[1]["reasoning_content"] == "hm"


def test_results_of_calls_of_one_name_answer_them_in_order() -> None:
    calls = [{"function": {"name": "weather", "arguments": {"city": city}}} for city in ("Rome", "Oslo")]
    results = [{"role": "tool", "tool_name": "weather", "content": weather} for weather in ("rain", "snow")]
    messages = chat_messages([{"role": "assistant", "tool_calls": calls}, *results])
    ids = [call["id"] for call in messages[0]["tool_calls"]]
    assert [message["tool_call_id"] for message in messages[1:]] == ids
