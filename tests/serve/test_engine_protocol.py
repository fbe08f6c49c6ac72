"""The server serves any Engine: here one that shares no code with ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.protocols import Engine
from paceline.core.stats import LearningStats
from paceline.errors import ContextLengthExceeded, OutOfMemory, StepFailed
from paceline.learning.engine import Activity, LearningEngine
from paceline.learning.ring import TrafficRing
from paceline.serve.config import ServerConfig
from paceline.serve.context import ServerContext
from paceline.serve.schema import CompletionRequest
from paceline.serve.supervisor import FailurePolicy, SupervisedEngine
from tests.serve.running import CHAT, COMPLETIONS, NAME, RunningServer, serving
from tests.serve.toy_engine import ReversingEngine


@pytest.fixture(scope="module")
def engine() -> ReversingEngine:
    return ReversingEngine()


@pytest.fixture(scope="module")
def server(engine: ReversingEngine) -> Iterator[RunningServer]:
    with serving(engine, ServerConfig((NAME,), max_model_len=32)) as running_server:
        yield running_server
    assert engine.is_closed, "the server closes its engine"


def test_the_toy_satisfies_the_protocol(engine: ReversingEngine) -> None:
    assert isinstance(engine, Engine)


def test_a_completion_and_a_chat_are_served(server: RunningServer) -> None:
    body = server.http().post(COMPLETIONS, json={"prompt": "abcdef", "x_paceline": True}).json()
    assert body["choices"][0]["text"] == "fedcba" and body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["x_paceline"]["accepted"] == 3
    assert body["choices"][0]["x_paceline"]["from_draft_mask"] == [1, 1, 1, 0, 0, 0]
    messages = [{"role": "user", "content": "olleh"}]
    response = server.http().post(CHAT, json={"messages": messages}).json()
    assert response["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize("wrapped", ["not", "supervised", "learning"])
def test_an_engine_is_told_of_a_request_ahead(tmp_path: Path, wrapped: str) -> None:
    """It compiles a grammar then, while other requests go on."""
    toy = ReversingEngine()
    engine: Engine = toy
    if wrapped == "supervised":
        engine = SupervisedEngine(lambda: toy, FailurePolicy())
    elif wrapped == "learning":
        engine = LearningEngine(toy, TrafficRing(tmp_path, 1 << 20), Activity(int, int), LearningStats)
    context = ServerContext.of(engine, ServerConfig((NAME,)))
    task = context.requests.completion(CompletionRequest(prompt="abc", guided_choice=["a", "b"]))

    async def work() -> None:
        async for _ in context.generate(task):
            pass

    asyncio.run(work())
    assert toy.prepared == toy.requests == [task.choices[0].request]


def test_a_stream_shows_which_tokens_come_from_the_draft(server: RunningServer) -> None:
    body = {"prompt": "abcdef", "stream": True, "x_paceline": True}
    events = server.http().post(COMPLETIONS, json=body).text.split("\n\n")
    assert events[-2] == "data: [DONE]"
    choices = [json.loads(event[6:])["choices"][0] for event in events[:-2]]
    deltas = choices[:-1]
    assert [choice["text"] for choice in deltas] == ["fed", "c", "b", "a"]
    assert [choice["x_paceline"]["from_draft"] for choice in deltas] == [True, False, False, False]
    assert [choice["x_paceline"]["num_tokens"] for choice in deltas] == [3, 1, 1, 1]
    assert choices[-1]["finish_reason"] == "length" and choices[-1]["x_paceline"]["tokens_per_step"] == 2


def test_logprobs_need_only_encode_and_decode(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "ab"}], "logprobs": True}
    entries = server.http().post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["b", "a"] and entries[0]["bytes"] == [98]


@pytest.mark.slow
def test_models_health_and_metrics_read_the_protocol(server: RunningServer) -> None:
    entry = server.http().get("/v1/models").json()["data"][0]
    assert entry["x_paceline"] == {
        "methods": ["reverse"],
        "num_draft_tokens": "auto",
        "max_model_len": 32,
        "sampling_defaults": {},
        "dtype": "fp32",
        "near_tie_logprob": 0.001,
    }
    assert server.http().get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}
    server.http().post(COMPLETIONS, json={"prompt": "abcdef"})
    assert 'paceline_spec_accepted_tokens_total{method="reverse",model="model"}' in server.http().get("/metrics").text
    assert server.http().post("/tokenize", json={"prompt": "ab"}).json()["tokens"] == [97, 98]


def test_max_model_len_bounds_prompt_and_output(server: RunningServer, engine: ReversingEngine) -> None:
    response = server.http().post(COMPLETIONS, json={"prompt": "x" * 32})
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    response = server.http().post(COMPLETIONS, json={"prompt": "x" * 20, "max_tokens": 50})
    assert response.status_code == 400 and "ask for 12 or fewer" in response.json()["error"]["message"]
    assert server.http().post(COMPLETIONS, json={"prompt": "x" * 20}).status_code == 200
    assert engine.requests[-1].max_new_tokens == 12


def test_a_chat_without_max_tokens_ends_with_the_context_and_not_before() -> None:
    engine = ReversingEngine()
    engine.info = replace(engine.info, max_seq_len=5000)
    with serving(engine, ServerConfig((NAME,))) as running_server:
        body = {"messages": [{"role": "user", "content": "ab" * 1000}]}
        response = running_server.http().post(CHAT, json=body).json()
    assert response["usage"]["completion_tokens"] == 2000
    assert engine.requests[-1].max_new_tokens == 3000


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StepFailed("broken"), 500, "model_failed"),
        (OutOfMemory("full"), 500, "out_of_memory"),
        (ContextLengthExceeded("too long"), 400, "context_length_exceeded"),
        (KeyError("a mistake in the engine"), 500, "internal_error"),
    ],
)
def test_an_engine_error_is_a_response_by_its_type(
    server: RunningServer, engine: ReversingEngine, error: Exception, status: int, code: str, stream: bool
) -> None:
    engine.failure = error
    response = server.http().post(COMPLETIONS, json={"prompt": "abc", "stream": stream})
    assert response.status_code == status and response.json()["error"]["code"] == code
    assert server.http().post(COMPLETIONS, json={"prompt": "abc"}).status_code == 200
