"""Routes about the server, aliases, the documentation page, and what a text model does not do."""

from __future__ import annotations

import re

import httpx
import openai
import pytest

from paceline import __version__
from paceline.serve.config import NetworkConfig, ServerConfig
from paceline.serve.errors import LOG, ApiError, log_failure
from tests.serve.running import NAME, RunningServer, serving
from tests.serve.toy_engine import ReversingEngine

KEY = "first-secret"


def test_version_ping_and_load(tiny_server: RunningServer) -> None:
    with tiny_server.http() as client:
        assert client.get("/version").json() == {"version": __version__}
        assert client.get("/ping").status_code == client.post("/ping", json={}).status_code == 200
        assert client.get("/load").json() == {"server_load": 0}


def test_a_client_may_ask_whether_the_server_is_there(tiny_server: RunningServer) -> None:
    answer = tiny_server.http().head("/")  # as Claude Code does first
    assert answer.status_code == 200 and not answer.content


@pytest.mark.slow
def test_routes_without_their_prefix(tiny_server: RunningServer) -> None:
    client = openai.OpenAI(base_url=tiny_server.url, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "hi"}]
    assert client.chat.completions.create(model=NAME, messages=messages, max_tokens=2).choices  # type: ignore[arg-type]
    assert client.completions.create(model=NAME, prompt="hi", max_tokens=2).choices
    assert client.responses.create(model=NAME, input="hi", max_output_tokens=2).id
    assert client.embeddings.create(model=NAME, input="hi").data
    assert [model.id for model in client.models.list()] == [NAME, "alias"]


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/v1/audio/speech", "speaks"),
        ("/v1/images/generations", "images"),
        ("/v1/rerank", "embeddings"),
        ("/v1/moderations", "scores"),
        ("/v1/batches", "batches"),
        ("/v1/fine_tuning/jobs", "paceline train"),
    ],
)
def test_what_a_text_model_cannot_do_is_told(tiny_server: RunningServer, path: str, word: str) -> None:
    response = tiny_server.http().post(path, json={})
    assert response.status_code == 501 and word in response.json()["error"]["message"]


def test_only_a_failure_is_logged_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server says it does not do needs no trace in the log of its owner."""
    logged: list[str] = []
    monkeypatch.setattr(LOG, "error", lambda message, exc_info: logged.append(str(exc_info)))
    for status in (501, 500, 503, 400):
        error = ApiError(status, "words")
        log_failure(error, error)
    assert [line[:3] for line in logged] == ["500", "503"]


def test_an_upload_is_told_the_same(tiny_server: RunningServer) -> None:
    response = tiny_server.http().post("/v1/audio/transcriptions", files={"file": b"RIFF"})
    assert response.status_code == 501 and "hears" in response.json()["error"]["message"]


@pytest.mark.slow
def test_every_route_but_the_open_ones_needs_the_key() -> None:
    with serving(ReversingEngine(), ServerConfig((NAME,), network=NetworkConfig(api_keys=(KEY,)))) as server:
        paths = httpx.get(f"{server.url}/openapi.json", headers={"x-api-key": KEY}).json()["paths"]
        open_paths = {"/health", "/health/live", "/health/ready", "/ping"}
        with server.http() as client:
            for path, operations in paths.items():
                for method in operations:
                    response = client.request(method, path, json={} if method == "post" else None)
                    assert (response.status_code == 401) != (path in open_paths), path
            assert client.get("/docs").status_code == 200


@pytest.mark.slow
def test_the_documentation_loads_nothing_from_elsewhere(tiny_server: RunningServer) -> None:
    with tiny_server.http() as client:
        page = client.get("/docs")
        assert page.headers["content-security-policy"].startswith("default-src 'self'")
        links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert all(link.startswith("/") for link in links) and "/page/docs.js" in links
        assert all(client.get(link).status_code == 200 for link in links)
