"""Which pages a browser lets read responses: by the headers that the Fetch standard names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from paceline.serve.config import NetworkConfig, ServerConfig
from paceline.serve.cors import is_local
from tests.serve.running import CHAT, NAME, RunningServer, serving
from tests.serve.toy_engine import ReversingEngine

KEY, FRIEND, FOE = "first-secret", "http://friend.example", "http://foe.example"
ORIGIN, CREDENTIALS = "access-control-allow-origin", "access-control-allow-credentials"


@contextmanager
def serving_origins(*origins: str) -> Iterator[RunningServer]:
    network = NetworkConfig(api_keys=(KEY,), cors_origins=origins)
    with serving(ReversingEngine(), ServerConfig((NAME,), network=network)) as server:
        yield server


def preflight(server: RunningServer, origin: str) -> httpx.Response:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with server.http(Origin=origin, **asked) as client:
        return client.options(CHAT)


def test_a_named_origin_may_send_its_key_and_read_the_answer() -> None:
    with serving_origins(FRIEND) as server:
        answer = preflight(server, FRIEND)
        assert (answer.status_code, answer.headers[ORIGIN], answer.headers[CREDENTIALS]) == (200, FRIEND, "true")
        assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
        assert {"POST", "DELETE"} <= set(answer.headers["access-control-allow-methods"].split(", "))
        with server.http(Origin=FRIEND, Authorization=f"Bearer {KEY}") as client:
            models = client.get("/v1/models")
        assert models.status_code == 200 and models.headers[ORIGIN] == FRIEND and "Origin" in models.headers["vary"]
        refusal = server.http(Origin=FRIEND).get("/v1/models")
        assert refusal.status_code == 401 and refusal.headers[ORIGIN] == FRIEND, "the page can read why"


def test_another_origin_gets_no_header_that_allows_it() -> None:
    with serving_origins(FRIEND) as server:
        answer = preflight(server, FOE)
        assert ORIGIN not in answer.headers and "access-control-allow-methods" not in answer.headers
        assert ORIGIN not in server.http(Origin=FOE).get("/health").headers
        assert ORIGIN not in server.http().get("/health").headers


def test_any_origin_is_named_itself_and_sends_no_cookies() -> None:
    with serving_origins("*", FRIEND) as server:
        answer = preflight(server, FOE)
        assert answer.headers[ORIGIN] == FOE and CREDENTIALS not in answer.headers
        assert preflight(server, FRIEND).headers[CREDENTIALS] == "true"


def test_localhost_is_every_page_of_this_machine() -> None:
    with serving_origins("localhost") as server:
        assert preflight(server, "http://127.0.0.1:3000").headers[ORIGIN] == "http://127.0.0.1:3000"
        assert ORIGIN not in preflight(server, "http://localhost.foe.example").headers


@pytest.mark.parametrize(
    ("origin", "local"),
    [
        ("http://localhost", True),
        ("https://localhost:8080", True),
        ("http://[::1]:3000", True),
        ("http://notlocalhost", False),
        ("http://localhost.foe.example", False),
        ("file://localhost", False),
        ("http://[::1", False),
        ("null", False),
    ],
)
def test_what_is_local(origin: str, local: bool) -> None:
    assert is_local(origin) is local
