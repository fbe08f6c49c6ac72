"""An engine whose worker dies: its requests fail, /health says so, and the engine is restarted or the server ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.build import open_engine
from paceline.config import EngineConfig
from paceline.core.cost_model import CostModel
from paceline.core.protocols import Engine
from paceline.engines.local.async_engine import AsyncEngine
from paceline.errors import EngineClosed, EngineFailed, EngineRestarting
from paceline.serve import supervisor
from paceline.serve.config import FailurePolicy, ServerConfig
from paceline.serve.supervisor import SupervisedEngine
from tests.serve.mortal_engine import SILENT, MortalEngine
from tests.serve.running import COMPLETIONS, NAME, RunningServer, serving
from tests.serve.toy_engine import ReversingEngine
from tests.support.build import toy_engine
from tests.support.engines import ONE_THREAD, ascii_gguf
from tests.support.tiny import byte_tokenizer, tiny_llama

ROOT = Path(__file__).parents[2]
PATIENCE = 60  # seconds, on a busy machine
EXIT = FailurePolicy(on_engine_failure="exit")


@dataclass
class Opener:
    """Opens engines, waits with the next one until it may, and keeps them all."""

    engines: list[MortalEngine] = field(default_factory=list)
    may_open: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None

    def __call__(self) -> Engine:
        if self.engines:
            assert self.may_open.wait(PATIENCE)
        if self.failure is not None:
            raise self.failure
        self.engines.append(MortalEngine())
        return self.engines[-1]


@contextmanager
def supervised(opener: Opener) -> Iterator[RunningServer]:
    engine = SupervisedEngine(opener, FailurePolicy())
    with serving(engine, ServerConfig((NAME,)), background=[engine.watch]) as server:
        yield server
    opener.may_open.set()


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.01)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def post(server: RunningServer, prompt: str, **fields: Any) -> httpx.Response:
    return server.http().post(COMPLETIONS, json={"prompt": prompt, **fields})


def status_of(server: RunningServer, path: str = "/health") -> int:
    return server.http().get(path).status_code


# --- a killed process -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_worker_fails_its_requests_and_is_replaced() -> None:
    opener = Opener()
    with supervised(opener) as server, ThreadPoolExecutor(4) as pool:
        assert post(server, "abc").json()["choices"][0]["text"] == "cba"
        assert status_of(server, "/health/ready") == status_of(server, "/health/live") == 200
        whole = [pool.submit(post, server, SILENT) for _ in range(2)]
        streams = [pool.submit(post, server, SILENT, stream=True) for _ in range(2)]
        eventually(lambda: opener.engines[0].num_silent == 4)
        opener.engines[0].kill()

        for reply in whole:
            response = reply.result(PATIENCE)
            assert response.status_code == 503 and response.json()["error"]["code"] == "engine_failed"
            assert "worker process has ended" in response.json()["error"]["message"]
            assert int(response.headers["Retry-After"]) > 0
        for reply in streams:
            assert "engine_failed" in reply.result(PATIENCE).text and "[DONE]" not in reply.result().text

        health = server.http().get("/health")
        assert health.status_code == 503 and health.json()["status"] == "restarting"
        assert "ended with status -9" in health.json()["reason"] and health.json()["running"] == 0
        assert status_of(server, "/health/ready") == 503 and status_of(server, "/health/live") == 200
        assert post(server, "abc").status_code == 503
        metrics = server.http().get("/metrics").text
        assert f'paceline_engine_up{{model="{NAME}"}} 0.0' in metrics

        opener.may_open.set()
        eventually(lambda: status_of(server) == 200)
        assert post(server, "abc").json()["choices"][0]["text"] == "cba"
        metrics = server.http().get("/metrics").text
        assert f'paceline_engine_restarts_total{{model="{NAME}"}} 1.0' in metrics
        assert f'paceline_engine_up{{model="{NAME}"}} 1.0' in metrics
    assert [engine.is_closed for engine in opener.engines] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("first_seen_by", ["request", "probe"])
def test_a_request_or_a_probe_that_meets_the_dead_worker_first_is_answered_too(
    monkeypatch: pytest.MonkeyPatch, first_seen_by: str
) -> None:
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 3600.0)
    opener = Opener()
    with supervised(opener) as server:
        opener.engines[0].kill()
        if first_seen_by == "request":
            assert post(server, "abc").status_code == 503, "the request itself reports the failure"
        health = server.http().get("/health")
        assert health.status_code == 503 and health.json()["status"] == "restarting"
        assert status_of(server, "/health/live") == 200 and status_of(server, "/health/ready") == 503
        opener.may_open.set()
        eventually(lambda: post(server, "abc").status_code == 200)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [EXIT, FailurePolicy(max_engine_restarts=0)])
def test_without_restarts_the_server_learns_that_it_must_end(policy: FailurePolicy) -> None:
    opener = Opener()
    engine = SupervisedEngine(opener, policy)

    async def work() -> None:
        opener.engines[0].kill()
        with pytest.raises(EngineFailed, match="ended with status -9"):
            await asyncio.wait_for(engine.watch(), PATIENCE)
        with pytest.raises(EngineFailed) as caught:
            engine.check_health()
        assert not isinstance(caught.value, EngineRestarting)

    asyncio.run(work())
    assert len(opener.engines) == 1


@pytest.mark.slow
def test_restarts_that_do_not_help_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        delays.append(seconds)
        await sleep(0)

    monkeypatch.setattr(supervisor, "FIRST_DELAY", 1.0)
    monkeypatch.setattr("paceline.serve.supervisor.asyncio.sleep", noted)
    opener = Opener()
    engine = SupervisedEngine(opener, FailurePolicy(max_engine_restarts=3))
    opener.may_open.set()
    opener.failure = OSError("no space left on the device")
    opener.engines[0].kill()
    with pytest.raises(EngineFailed, match="no space left on the device; 3 restarts in a row did not help"):
        asyncio.run(asyncio.wait_for(engine.watch(), PATIENCE))
    restarts = [seconds for seconds in delays if seconds >= 1]  # the others are looks at an engine that is well
    assert restarts == [1, 2, 4] and engine.stats().restarts == 3


@pytest.mark.slow
def test_an_engine_that_has_closed_by_itself_has_failed() -> None:
    """Engines that do not know of health checks say it with EngineClosed."""
    engines = [ReversingEngine(), ReversingEngine()]
    opened = iter(engines)
    engine = SupervisedEngine(lambda: next(opened), FailurePolicy())

    async def work() -> None:
        watch = asyncio.create_task(engine.watch())
        await engines[0].close()
        with pytest.raises(EngineRestarting):
            engine.generate(None)  # type: ignore[arg-type]
        while engine.stats().restarts < 1 or not _is_healthy(engine):
            await asyncio.sleep(0.01)
        watch.cancel()
        await engine.close()
        with pytest.raises((EngineClosed, EngineFailed)):
            engine.generate(None)  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(work(), PATIENCE))
    assert engines[1].is_closed


def _is_healthy(engine: Engine) -> bool:
    try:
        engine.check_health()
    except EngineFailed:
        return False
    return True


# --- our own engine ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_thread_that_dies_is_replaced_under_a_running_server() -> None:
    """The scheduler raises, as a bug of ours would: outside the passes, whose errors cost only their sequences."""
    model, tokenizer, opened = tiny_llama(), byte_tokenizer(), []

    def open_local() -> Engine:
        options: dict[str, Any] = {"method": "ngram", "tuned": CostModel(), "per_request": True}
        opened.append(open_engine(EngineConfig.create(model, tokenizer=tokenizer, **options)))
        return opened[-1]

    def raise_a_bug() -> None:
        raise ZeroDivisionError("a bug")

    engine = SupervisedEngine(open_local, FailurePolicy())
    body = {"prompt": "to be or not", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with serving(engine, ServerConfig((NAME,)), background=[engine.watch]) as server:
        before = server.http().post(COMPLETIONS, json=body).json()["choices"][0]["text"]
        opened[0].engine._scheduler.schedule = raise_a_bug
        response = server.http().post(COMPLETIONS, json=body)
        assert response.status_code == 503 and "ZeroDivisionError: a bug" in response.json()["error"]["message"]
        eventually(lambda: status_of(server) == 200)
        assert server.http().post(COMPLETIONS, json=body).json()["choices"][0]["text"] == before
    assert len(opened) == 2


@pytest.mark.slow
def test_the_process_of_llama_cpp_is_replaced_when_it_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    config = EngineConfig.create(
        str(ascii_gguf(tmp_path)), engine="llama_cpp", engine_options=ONE_THREAD, method="none", per_request=True
    )
    opened: list[Any] = []

    def open_llama_cpp() -> Engine:
        opened.append(open_engine(config))
        return opened[-1]

    engine = SupervisedEngine(open_llama_cpp, FailurePolicy())
    body = {"prompt": "to be or not", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with serving(engine, ServerConfig((NAME,)), background=[engine.watch]) as server:
        before = server.http().post(COMPLETIONS, json=body).json()["choices"][0]["text"]
        os.kill(opened[0]._parts.on_close.__self__.pid, signal.SIGKILL)
        eventually(lambda: len(opened) == 2 and status_of(server) == 200)
        assert server.http().post(COMPLETIONS, json=body).json()["choices"][0]["text"] == before
        assert 'paceline_engine_restarts_total{model="model"} 1.0' in server.http().get("/metrics").text


@pytest.mark.slow
def test_a_connection_that_is_lost_costs_its_request_and_not_the_engine() -> None:
    """As with an engine whose server is elsewhere: the others go on."""
    opener = Opener()
    with supervised(opener) as server:
        opener.engines[0].failure = EngineClosed("the connection to it was lost")
        response = post(server, "lost")
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_failed"
        assert post(server, "abc").json()["choices"][0]["text"] == "cba" and status_of(server) == 200
    assert len(opener.engines) == 1


# --- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MortalServer:
    """`paceline serve --engine mortal`."""

    popen: subprocess.Popen[str]
    worker: int
    url: str


@contextmanager
def mortal_server(*flags: str) -> Iterator[MortalServer]:
    command = [sys.executable, "-m", "tests.serve.mortal_engine", "--engine", "mortal", "--port", "0", *flags]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    popen = subprocess.Popen([*command, "--generation-config", "none"], cwd=ROOT, env=environment, **pipes)
    try:
        assert popen.stdout is not None
        lines = [popen.stdout.readline(), popen.stdout.readline()]
        worker, url = re.search(r"worker (\d+)", lines[0]), re.search(r"(http://127\.0\.0\.1:\d+)/v1", lines[1])
        assert worker and url, lines
        yield MortalServer(popen, int(worker[1]), url[1])
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.communicate()


@pytest.mark.slow
def test_serve_exits_with_an_error_where_it_is_asked_to() -> None:
    with mortal_server("--on-engine-failure", "exit") as server:
        assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
        os.kill(server.worker, signal.SIGKILL)
        _, log = server.popen.communicate(timeout=PATIENCE)
        assert server.popen.returncode == 2
    assert "paceline: error: the worker process has ended with status -9" in log and "Traceback" not in log


@pytest.mark.slow
def test_serve_restarts_the_engine_by_itself() -> None:
    with mortal_server() as server:
        os.kill(server.worker, signal.SIGKILL)
        assert server.popen.stdout is not None
        assert re.match(r"worker \d+", server.popen.stdout.readline()), "the restarted engine's worker"
        eventually(lambda: httpx.get(f"{server.url}/health").status_code == 200)
        reply = httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "abc"}, timeout=PATIENCE)
        assert reply.json()["choices"][0]["text"] == "cba"
        server.popen.send_signal(signal.SIGTERM)
        server.popen.communicate(timeout=PATIENCE)
        assert server.popen.returncode in (0, -signal.SIGTERM)


def test_a_supervised_engine_gives_the_embeddings_of_its_engine() -> None:
    async def work() -> None:
        engine = SupervisedEngine(lambda: AsyncEngine(toy_engine()), FailurePolicy())
        vector = await engine.embed([1, 2, 3], "mean")
        assert len(vector) == engine.info.hidden_size
        await engine.close()

    asyncio.run(work())
