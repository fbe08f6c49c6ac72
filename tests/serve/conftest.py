"""Two servers a session: the tiny model where the output does not matter, the default model where it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.serve.config import RequestLimits, ServerConfig
from tests.serve.running import NAME, RunningServer, serving_model
from tests.support.tiny import byte_tokenizer, tiny_llama


@pytest.fixture(scope="session")
def tiny_server() -> Iterator[RunningServer]:
    limits = RequestLimits(
        max_body_bytes=1 << 20, max_choices=8, stall_timeout=2.0, request_timeout=60, drain_timeout=5
    )
    with serving_model(tiny_llama(), byte_tokenizer(), ServerConfig((NAME, "alias"), limits=limits)) as server:
        yield server


@pytest.fixture(scope="session")
def default_server(default_model: Any, default_tokenizer: Any) -> Iterator[RunningServer]:
    with serving_model(default_model, default_tokenizer, ServerConfig((NAME,))) as server:
        yield server
