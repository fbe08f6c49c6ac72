"""The engine of this process: schedule, propose, forward, verify, postprocess."""

from __future__ import annotations

from paceline.config import EngineConfig
from paceline.core.protocols import Engine
from paceline.engines.local.async_engine import AsyncEngine
from paceline.engines.registry import BuildLocal, EngineSpec


def _open(config: EngineConfig, build: BuildLocal) -> Engine:
    return AsyncEngine(build(config))


SPEC = EngineSpec("local", "paceline's own engine: one process, one GPU or CPU", _open)
