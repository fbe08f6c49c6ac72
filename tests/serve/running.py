"""A server that runs in a thread of the test, so that the test can also look behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn

from paceline.build import engine
from paceline.config import DecoderOptions
from paceline.core.cost_model import CostModel
from paceline.core.stats import EngineStats
from paceline.engines.local.async_engine import LocalEngine
from paceline.engines.local.settings import EngineSettings
from paceline.serve.app import create_app
from paceline.serve.run import open_socket, server_config
from paceline.serve.settings import ServerConfig

NAME = "model"


@dataclass(frozen=True, slots=True)
class Running:
    """A server one can talk to."""

    url: str
    engine: LocalEngine

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def http(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, headers=headers)

    def quiet(self, seconds: float = 20) -> EngineStats:
        """The engine's load once nothing is in progress any more."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            load = self.engine.stats()
            if not load.running and not load.waiting and not load.blocks_used:
                return load
            time.sleep(0.02)
        raise AssertionError(f"still busy: {load}")


@contextmanager
def running(target: Any, settings: ServerConfig, tokenizer: Any = None, **choices: Any) -> Iterator[Running]:
    """Serve a model. choices: the fields of EngineSettings, and method."""
    method = choices.pop("method", "ngram")
    stall = choices.pop("opening_seconds", 30.0)
    options = DecoderOptions(target, method=method, tokenizer=tokenizer, profile=CostModel())
    working = engine(options, EngineSettings(max_num_seqs=settings.batch, **choices))
    listening = open_socket("127.0.0.1", 0)
    app = create_app(working, working.tokenizer, settings)
    server = uvicorn.Server(server_config(app, drain_seconds=5, stall_seconds=stall))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Running(f"http://127.0.0.1:{listening.getsockname()[1]}", working)
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()


@contextmanager
def broken_pass(served: Running, error: Exception) -> Iterator[None]:
    """The next pass of the model raises `error`."""
    target: Any = served.engine._scheduler._with.target
    whole = target.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        target.forward = whole
        raise error

    target.forward = broken
    try:
        yield
    finally:
        target.forward = whole


@contextmanager
def slowed(served: Running, seconds: float) -> Iterator[None]:
    """Every pass takes at least so long: for tests that must come in time on any machine."""
    target: Any = served.engine._scheduler._with.target
    whole = target.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return whole(*args, **kwargs)

    target.forward = slow
    try:
        yield
    finally:
        target.forward = whole
