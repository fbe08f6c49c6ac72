"""The engine of this process: schedule, propose, forward, verify, postprocess."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.config import EngineConfig
from paceline.engines.registry import BuildLocal, EngineSpec
from paceline.hub.gguf_architectures import PACKED_ON_GPUS

if TYPE_CHECKING:  # planning reads the SPEC and must not wait for torch
    from paceline.core.protocols import Engine


def _open(config: EngineConfig, build: BuildLocal) -> Engine:
    from paceline.engines.local.async_engine import AsyncEngine

    return AsyncEngine(build(config))


SPEC = EngineSpec(
    "local",
    "paceline's own engine: one process, one GPU or CPU",
    _open,
    gguf_kinds=frozenset(
        {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    ),
    gguf_types=PACKED_ON_GPUS,
    rounded_kv=True,
    lora=True,
)
