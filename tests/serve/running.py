"""A server that runs in a thread of the test, so that the test can also look at its engine."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import openai
import uvicorn

from paceline.build import open_engine
from paceline.config import EngineConfig
from paceline.core.cost_model import CostModel
from paceline.core.protocols import Engine
from paceline.core.stats import EngineStats
from paceline.serve.app import create_app
from paceline.serve.config import ServerConfig
from paceline.serve.run import bind_socket, uvicorn_config

NAME = "model"
CLIENT_SECONDS = 600  # a busy machine took more than 120 for one answer of the default model
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@cache
def no_certificates() -> ssl.SSLContext:
    """What a client of `http://` needs: to read a machine's certificates takes longer than most requests of tests."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def http_client(**options: Any) -> httpx.Client:
    """options: those of httpx.Client."""
    return httpx.Client(verify=no_certificates(), **options)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server to send requests to. model: the transformers model its engine runs, if any."""

    url: str
    engine: Engine
    model: Any = None

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def client(self, key: str = "none") -> openai.OpenAI:
        url, client = f"{self.url}/v1", http_client(timeout=CLIENT_SECONDS)
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=CLIENT_SECONDS, http_client=client)

    def http(self, **headers: str) -> httpx.Client:
        return http_client(base_url=self.url, timeout=60, headers=headers)

    def wait_until_idle(self, seconds: float = 20) -> EngineStats:
        """The engine's stats once no sequence waits, runs or holds blocks."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stats = self.engine.stats()
            if not stats.running and not stats.waiting and not stats.blocks_used:
                return stats
            time.sleep(0.02)
        raise AssertionError(f"still busy: {stats}")


@contextmanager
def serving(engine: Engine, config: ServerConfig, model: Any = None, **more: Any) -> Iterator[RunningServer]:
    """Serve any engine. more: further arguments of create_app."""
    bound_socket = bind_socket("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(create_app(engine, config, **more), config.limits))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound_socket]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield RunningServer(f"http://127.0.0.1:{bound_socket.getsockname()[1]}", engine, model)
    finally:
        server.should_exit = True
        thread.join(20)
        bound_socket.close()


@contextmanager
def serving_model(model: Any, tokenizer: Any, config: ServerConfig, **options: Any) -> Iterator[RunningServer]:
    """Serve a loaded transformers model. options: those of EngineConfig.create."""
    options = {"method": "ngram", "tuned": CostModel(), "max_num_seqs": config.max_num_seqs, **options}
    engine = open_engine(EngineConfig.create(model, tokenizer=tokenizer, per_request=True, **options))
    with serving(engine, config, model) as server:
        yield server


@contextmanager
def failing_pass(server: RunningServer, error: Exception, *, again: bool = False) -> Iterator[None]:
    """The next forward pass of the model raises `error`; again: every one does, as the engine may try once more."""
    forward = server.model.forward

    def fail(*args: Any, **kwargs: Any) -> Any:
        if not again:
            server.model.forward = forward
        raise error

    server.model.forward = fail
    try:
        yield
    finally:
        server.model.forward = forward


@contextmanager
def slowed(server: RunningServer, seconds: float) -> Iterator[None]:
    """Every forward pass takes at least so long, so that a test can act before a sequence has finished."""
    forward = server.model.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return forward(*args, **kwargs)

    server.model.forward = slow
    try:
        yield
    finally:
        server.model.forward = forward
