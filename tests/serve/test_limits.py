"""API keys, admission control, timeouts, headers, the access log, metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from fastapi import Request

from paceline.errors import OptionError
from paceline.serve.access_log import JsonLines
from paceline.serve.auth import KEY_SCOPE, NO_KEY, ApiKeys
from paceline.serve.config import NetworkConfig, RequestLimits, ServerConfig
from paceline.serve.context import ServerContext
from paceline.serve.errors import ApiError
from paceline.serve.limits import AdmissionControl, strict_json
from paceline.serve.routes import tokenized_for
from tests.serve.running import COMPLETIONS, NAME, RunningServer, serving, serving_model, slowed
from tests.serve.toy_engine import ReversingEngine
from tests.support.tiny import byte_tokenizer, tiny_llama

KEY, OTHER_KEY = "correct horse battery", "another key entirely"
LONG = {"prompt": "some text", "max_tokens": 450, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def limited_server() -> Iterator[RunningServer]:
    limits = RequestLimits(
        max_waiting=2,
        max_requests_per_key=2,
        request_timeout=5,  # a short request must not take this long on a busy machine either
        max_choices=4,
        max_prompt_tokens=64,
        max_new_tokens=460,
        drain_timeout=5,
    )
    network = NetworkConfig(api_keys=(KEY, OTHER_KEY), cors_origins=("http://friend.example",))
    config = ServerConfig((NAME,), log_prompts=True, network=network, limits=limits, max_num_seqs=1)
    with serving_model(tiny_llama(), byte_tokenizer(), config, kv_cache_tokens=1024) as server:
        yield server


def bearer(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- API keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json"])
def test_without_an_api_key_only_the_page_and_health_are_served(limited_server: RunningServer, path: str) -> None:
    for headers in ({}, bearer("wrong"), {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}):
        response = limited_server.http(**headers).get(path)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert limited_server.http(**bearer()).get(path).status_code == 200
    assert limited_server.http().get("/health").status_code == 200 and limited_server.http().get("/").status_code == 200


def test_a_body_without_an_api_key_is_not_read(limited_server: RunningServer) -> None:
    response = limited_server.http().post(COMPLETIONS, content=b"{" * 100, headers={"Content-Type": "application/json"})
    assert response.status_code == 401


def test_a_wrong_api_key_is_an_authentication_error(limited_server: RunningServer) -> None:
    with pytest.raises(openai.AuthenticationError):
        limited_server.client("wrong").models.list()
    assert limited_server.client(OTHER_KEY).models.list().data


def test_api_keys_are_kept_as_hashes() -> None:
    keys = ApiKeys((KEY, OTHER_KEY))
    assert keys.owner(f"Bearer {OTHER_KEY}") and keys.owner(f"bearer {KEY}") != keys.owner(f"bearer {OTHER_KEY}")
    assert keys.owner("Bearer \udcff") is None and keys.owner("") is None
    assert KEY not in repr(vars(keys))
    with pytest.raises(OptionError, match="is empty"):
        NetworkConfig(api_keys=(KEY, " "))


# --- admission control ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_requests_beyond_the_queue_get_429_with_retry_after(limited_server: RunningServer) -> None:
    def post(index: int) -> Any:
        key = KEY if index % 2 else OTHER_KEY
        return limited_server.http(**bearer(key)).post(COMPLETIONS, json={**LONG, "max_tokens": 60})

    with slowed(limited_server, 0.01), ThreadPoolExecutor(10) as pool:
        responses = list(pool.map(post, range(10)))
    statuses = {response.status_code for response in responses}
    assert statuses <= {200, 408, 429} and 429 in statuses
    refused = [response for response in responses if response.status_code == 429]
    assert all(int(response.headers["Retry-After"]) >= 1 for response in refused)
    assert {response.json()["error"]["code"] for response in refused} <= {"queue_full", "key_busy"}
    limited_server.wait_until_idle()


def test_admission_control_counts_sequences_and_keys() -> None:
    admission = AdmissionControl(RequestLimits(max_waiting=1, max_requests_per_key=2), max_num_seqs=2)
    with admission.admit("a", 2), pytest.raises(ApiError, match="waiting"), admission.admit("b", 2):
        pass
    with admission.admit("a", 1), admission.admit("a", 1):
        assert admission.in_flight == 2
        with pytest.raises(ApiError, match="in progress"), admission.admit("a", 1):
            pass
    assert admission.in_flight == 0
    admission.shutting_down = True
    with pytest.raises(ApiError, match="shutting down"), admission.admit("a", 1):
        pass


def test_nothing_is_tokenized_for_a_client_that_is_gone_or_refused() -> None:
    """It would delay the requests behind it: there is one thread for tokenizers."""
    context = ServerContext.of(ReversingEngine(), ServerConfig((NAME,)))
    tokenized: list[str] = []
    opened = threading.Event()

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def work() -> None:
        request = Request({"type": "http", KEY_SCOPE: NO_KEY}, gone)
        before = asyncio.create_task(context.tokenized(lambda seconds: opened.wait(seconds), 10))
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError, match="disconnected"):
            await tokenized_for(context, request, tokenized.append, "of a client that is gone")
        opened.set()
        await before
        context.admission.shutting_down = True
        with pytest.raises(ApiError, match="shutting down"):
            await tokenized_for(context, request, tokenized.append, "of a client that is refused")
        await context.close()

    asyncio.run(work())
    assert not tokenized


@pytest.mark.slow
def test_a_request_that_takes_too_long_is_aborted(limited_server: RunningServer) -> None:
    limited_server.wait_until_idle()
    with slowed(limited_server, 0.05):
        response = limited_server.http(**bearer()).post(COMPLETIONS, json=LONG)
        assert response.status_code == 408 and response.json()["error"]["code"] == "timeout"
        events = limited_server.http(**bearer()).post(COMPLETIONS, json={**LONG, "stream": True}).text.split("\n\n")
        assert "timeout" in [event for event in events if event][-1]
    limited_server.wait_until_idle()


@pytest.mark.parametrize("params", [{"prompt": "x" * 80}, {"max_tokens": 461}, {"n": 5}, {"prompt": ["a"] * 5}])
def test_a_request_beyond_its_limits_is_refused(limited_server: RunningServer, params: dict[str, Any]) -> None:
    response = limited_server.http(**bearer()).post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, **params})
    assert response.status_code == 400, response.text


@pytest.mark.parametrize("limits", [{"max_body_bytes": 0}, {"request_timeout": float("nan")}, {"max_waiting": -1}])
def test_impossible_limits_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        RequestLimits(**limits)


def test_strict_json_refuses_nan_infinity_and_depth() -> None:
    for body in (b"NaN", b'{"a": Infinity}', b"\xff", b"[" * 70 + b"]" * 70):
        with pytest.raises(ApiError, match="body"):
            strict_json(body)
    assert strict_json(b'{"a": [1, 2.5, null, "x"]}') == {"a": [1, 2.5, None, "x"]}


# --- headers, access log, metrics -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_only_configured_origins_may_call(limited_server: RunningServer, tiny_server: RunningServer) -> None:
    stranger = {"Origin": "http://foe.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in tiny_server.http(**stranger).options("/v1/models").headers
    assert "access-control-allow-origin" not in limited_server.http(**stranger).get("/health").headers
    friend = limited_server.http(Origin="http://friend.example").get("/health")
    assert friend.headers["access-control-allow-origin"] == "http://friend.example"


def test_responses_carry_an_id_and_security_headers(tiny_server: RunningServer) -> None:
    headers = tiny_server.http().get("/").headers
    assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
    assert "default-src 'self'" in headers["content-security-policy"] and "server" not in headers
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"


@pytest.mark.slow
def test_an_unexpected_failure_is_a_whole_response() -> None:
    """A bug of ours: the response has all headers, and the connection stays."""
    engine = ReversingEngine()
    network = NetworkConfig(cors_origins=("http://friend.example",))
    with serving(engine, ServerConfig((NAME,), network=network)) as server:
        client = server.http(Origin="http://friend.example")
        for _ in range(2):
            engine.failure = ZeroDivisionError("a bug")
            response = client.post(COMPLETIONS, json={"prompt": "abc"})
            assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"
            assert response.headers["x-request-id"] and response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["access-control-allow-origin"] == "http://friend.example"
            assert response.headers.get("connection") != "close"


class LineHandler(logging.Handler):
    """Collects log lines. It hangs on the logger itself, because a configured server does not propagate records."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(JsonLines())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    logger, handler = logging.getLogger("paceline.serve"), LineHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def request_line(lines: list[str]) -> dict[str, Any]:
    """The line of the last request; it is written after the response has been sent."""
    deadline = time.monotonic() + 10
    while not lines and time.monotonic() < deadline:
        time.sleep(0.01)
    line: dict[str, Any] = json.loads(lines[-1])
    return line


def test_the_access_log_is_json_without_prompts(tiny_server: RunningServer, log_lines: list[str]) -> None:
    tiny_server.http().post(COMPLETIONS, json={"prompt": "a very secret prompt", "max_tokens": 3, "ignore_eos": True})
    line = request_line(log_lines)
    assert "secret" not in "".join(log_lines)
    assert line["route"] == COMPLETIONS and line["status"] == 200
    assert line["new_tokens"] == 3 and line["prompt_tokens"] == 20


def test_prompts_are_logged_where_configured(limited_server: RunningServer, log_lines: list[str]) -> None:
    limited_server.http(**bearer()).post(COMPLETIONS, json={"prompt": "not so secret", "max_tokens": 3})
    assert request_line(log_lines)["prompts"] == ["not so secret"] and KEY not in "".join(log_lines)


def metric(text: str, name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}[{{ ]", line))


@pytest.mark.slow
def test_metrics_count_requests_tokens_and_steps(tiny_server: RunningServer) -> None:
    tiny_server.wait_until_idle()
    before = tiny_server.http().get("/metrics").text
    body = {"prompt": "again and again and again and", "max_tokens": 20, "temperature": 0}
    tiny_server.http().post(COMPLETIONS, json={**body, "speculative": {"method": "lookahead", "num_draft_tokens": 3}})
    tiny_server.wait_until_idle()
    after = tiny_server.http().get("/metrics").text

    def increase(name: str) -> float:
        return metric(after, name) - metric(before, name)

    assert increase("paceline_generation_tokens_total") == 20
    assert increase("paceline_spec_draft_tokens_total") > 0
    assert increase("paceline_time_to_first_token_seconds_count") == 1
    assert increase("paceline_spec_num_draft_tokens_count") == increase("paceline_steps_total") > 0
    assert increase("paceline_spec_draft_tokens_per_position_total") == increase("paceline_spec_draft_tokens_total")
    assert increase("paceline_prompt_tokens_total") == 29
    assert 'paceline_http_requests_total{route="/v1/completions",status="200"}' in after
    assert increase("paceline_kv_blocks") == 0 and metric(after, "paceline_requests_running") == 0


def test_kv_cache_tokens_bound_the_kv_blocks(limited_server: RunningServer) -> None:
    limited_server.wait_until_idle()
    text = limited_server.http(**bearer()).get("/metrics").text
    assert metric(text, "paceline_kv_blocks") * 64 <= 1024


@pytest.mark.slow
def test_unknown_paths_do_not_become_labels(tiny_server: RunningServer) -> None:
    tiny_server.http().get("/some/unknown/path")
    assert "unknown" not in tiny_server.http().get("/metrics").text
