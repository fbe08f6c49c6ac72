"""Several models behind one port: requests choose by name, and everything that counts is counted by model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest

from paceline.core.types import Request
from paceline.errors import EngineFailed
from paceline.serve.config import NetworkConfig, RequestLimits, ServerConfig
from paceline.serve.context import ModelToServe
from tests.serve.running import CHAT, COMPLETIONS, RunningServer, serving
from tests.serve.toy_engine import INFO, ReversingEngine

KEY = "a key for both models"


class UppercaseEngine(ReversingEngine):
    """Writes the prompt in capitals."""

    def generate(self, request: Request) -> Any:
        return super().generate(replace(request, prompt=[self._upper(token) for token in reversed(request.prompt)]))

    @staticmethod
    def _upper(token: int) -> int:
        return ord(chr(token).upper())


@dataclass(frozen=True, slots=True)
class TwoModels:
    server: RunningServer
    reverse: ReversingEngine
    upper: ReversingEngine


@pytest.fixture(scope="module")
def two() -> Iterator[TwoModels]:
    reverse, upper = ReversingEngine(), UppercaseEngine()
    upper.info = replace(INFO, name="upper", max_seq_len=32)
    network, limits = NetworkConfig(api_keys=(KEY,)), RequestLimits(max_body_bytes=4096)
    shared: dict[str, Any] = {"network": network, "limits": limits}
    other = ModelToServe(upper, ServerConfig(("upper", "big"), **shared, max_num_seqs=2))
    with serving(reverse, ServerConfig(("reverse", "small"), **shared), others=[other]) as server:
        yield TwoModels(server, reverse, upper)
    assert reverse.is_closed and upper.is_closed, "closing the server closes every engine"


def http(two: TwoModels) -> Any:
    return two.server.http(Authorization=f"Bearer {KEY}")


@pytest.mark.parametrize("field", ["model", "name"])
def test_ollamas_description_is_that_of_the_model_it_names(two: TwoModels, field: str) -> None:
    document = http(two).post("/api/show", json={field: "big:latest"}).json()
    assert document["details"]["family"] == "upper"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), [("reverse", "cba"), ("small", "cba"), ("upper", "ABC"), ("big", "ABC")])
def test_a_request_goes_to_the_model_it_names(two: TwoModels, name: str, text: str) -> None:
    client = two.server.client(KEY)
    assert client.completions.create(model=name, prompt="abc").choices[0].text == text
    chunks = client.completions.create(model=name, prompt="abc", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    messages = [{"role": "user", "content": "abc"}]
    chat = client.chat.completions.create(model=name, messages=messages)  # type: ignore[arg-type]
    assert chat.choices[0].message.content == text
    tokens = http(two).post("/tokenize", json={"model": name, "prompt": "ab"}).json()
    assert tokens["max_model_len"] == (64 if text == "cba" else 32)


def test_a_request_without_a_model_goes_to_the_first(two: TwoModels) -> None:
    assert http(two).post(COMPLETIONS, json={"prompt": "abc"}).json()["choices"][0]["text"] == "cba"


@pytest.mark.slow
def test_models_lists_all_under_all_their_names(two: TwoModels) -> None:
    client = two.server.client(KEY)
    assert [model.id for model in client.models.list()] == ["reverse", "small", "upper", "big"]
    assert client.models.retrieve("big").id == "big"
    details = http(two).get("/v1/models/upper").json()["x_paceline"]
    assert details["max_model_len"] == 32


def test_a_model_that_does_not_exist_is_404_and_those_that_do_are_named(two: TwoModels) -> None:
    with pytest.raises(openai.NotFoundError, match="there is reverse, small, upper, big"):
        two.server.client(KEY).completions.create(model="none", prompt="abc")
    assert http(two).get("/v1/models/none").status_code == 404


def test_what_is_wrong_with_a_body_is_said_as_with_one_model(two: TwoModels) -> None:
    client = http(two)
    json_type = {"Content-Type": "application/json"}
    assert client.post(COMPLETIONS, content=b"{", headers=json_type).status_code == 400
    assert client.post(COMPLETIONS, content=b"[1]", headers=json_type).status_code == 400
    assert client.post(CHAT, json={"model": 7, "messages": []}).status_code == 400
    assert client.post(COMPLETIONS, json={"model": "upper", "prompt": "a" * 5000}).status_code == 413
    refused = client.post(COMPLETIONS, json={"model": "upper", "prompt": "a" * 40})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert two.server.http().post(COMPLETIONS, json={"model": "upper", "prompt": "a"}).status_code == 401


@pytest.mark.slow
def test_metrics_and_health_are_by_model(two: TwoModels) -> None:
    http(two).post(COMPLETIONS, json={"model": "big", "prompt": "abcd"})
    text = http(two).get("/metrics").text
    for model in ("reverse", "upper"):
        assert re.search(rf'paceline_generation_tokens_total{{method="reverse",model="{model}"}} [1-9]', text)
        assert re.search(rf'paceline_time_to_first_token_seconds_count{{model="{model}"}} [1-9]', text)
    assert f'paceline_http_requests_total{{route="{COMPLETIONS}",status="200"}}' in text
    health = two.server.http().get("/health").json()
    assert health["status"] == "ok" and set(health["models"]) == {"reverse", "upper"}


@pytest.mark.slow
def test_one_failed_engine_shows_and_the_other_model_goes_on(two: TwoModels, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise EngineFailed("the worker is gone")

    monkeypatch.setattr(two.upper, "check_health", fail)
    health = two.server.http().get("/health")
    assert health.status_code == 503 and health.json()["status"] == "failed"
    assert health.json()["models"]["upper"]["reason"] == "the worker is gone"
    assert health.json()["models"]["reverse"]["status"] == "ok"
    assert two.server.http().get("/health/live").status_code == 503
    assert http(two).post(COMPLETIONS, json={"model": "reverse", "prompt": "abc"}).status_code == 200


@pytest.mark.slow
def test_other_apis_choose_by_name_too(two: TwoModels) -> None:
    client = two.server.client(KEY)
    first = client.responses.create(model="upper", input="abc")
    assert first.output_text == "ABC" and client.responses.retrieve(first.id).output_text == "ABC"
    assert client.responses.create(model="reverse", input="d", previous_response_id=first.id).output_text == "dCBAcba"
    with http(two) as web:
        message = {"model": "big", "max_tokens": 8, "messages": [{"role": "user", "content": "abc"}]}
        assert web.post("/v1/messages", json=message).json()["content"][0]["text"] == "ABC"
        answer = web.post("/api/generate", json={"model": "big:latest", "prompt": "abc", "stream": False}).json()
        assert answer["response"] == "ABC"
        names = [model["name"] for model in web.get("/api/tags").json()["models"]]
        assert names == ["reverse", "small", "upper", "big"]
        assert web.post("/v1/messages", json={**message, "model": "none"}).json()["error"]["type"] == "not_found_error"
