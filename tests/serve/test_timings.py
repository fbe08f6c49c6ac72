"""llama.cpp's additions to a chat completion."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.serve.running import CHAT, RunningServer

MESSAGES = [{"role": "user", "content": "abc"}]


def post(server: RunningServer, path: str = CHAT, **fields: Any) -> httpx.Response:
    with server.http() as client:
        return client.post(path, json={"messages": MESSAGES, "max_tokens": 5, "ignore_eos": True, **fields})


def test_timings_come_where_asked_for(tiny_server: RunningServer) -> None:
    timings = post(tiny_server, timings_per_token=True).json()["timings"]
    assert timings["predicted_n"] == 5 and all(value >= 0 for value in timings.values())
    assert timings["prompt_ms"] > 0 and timings["predicted_per_second"] > 0
    options = {"stream": True, "stream_options": {"include_usage": True}, "timings_per_token": True}
    lines = post(tiny_server, **options).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "timings" not in events[0] and events[-1]["timings"]["predicted_n"] == 5
    assert "timings" not in post(tiny_server).json()


def test_the_prompt_is_shown_as_the_model_reads_it(tiny_server: RunningServer) -> None:
    document = post(tiny_server, verbose=True).json()
    with tiny_server.http() as client:
        prompt = client.post("/apply-template", json={"messages": MESSAGES}).json()["prompt"]
    assert document["__verbose"]["prompt"] == prompt and "abc" in prompt
    assert "__verbose" not in post(tiny_server, verbose=False).json()


def test_the_tokens_of_a_chat_are_counted(tiny_server: RunningServer) -> None:
    count = post(tiny_server, "/chat/completions/input_tokens").json()["input_tokens"]
    assert count == post(tiny_server).json()["usage"]["prompt_tokens"]
