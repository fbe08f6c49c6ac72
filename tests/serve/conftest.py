"""Two servers a session: the tiny model where the text does not matter, the default model where it does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.serve.settings import Limits, ServerConfig
from tests.serve.running import NAME, Running, running


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Iterator[Running]:
    limits = Limits(body_bytes=1 << 20, choices=8, stall=2.0, seconds=60)
    with running(str(tiny_folder), ServerConfig((NAME, "alias"), limits=limits), opening_seconds=2.0) as served:
        yield served


@pytest.fixture(scope="session")
def default(default_model: Any, default_tokenizer: Any) -> Iterator[Running]:
    with running(default_model, ServerConfig((NAME,)), default_tokenizer) as served:
        yield served
