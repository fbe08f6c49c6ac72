"""Engines by name. An engine is one module with a SPEC; what the engine needs is imported when it is opened."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.config import EngineConfig
from paceline.errors import OptionError

if TYPE_CHECKING:  # --help lists the engines and must not wait for torch
    from paceline.core.protocols import Engine

BuildLocal = Callable[[EngineConfig], Any]  # puts a LocalEngine together; engines that bring their own model ignore it


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine: its name, a line for --help, and how it is opened.

    max_gpus    GPUs that it can divide one model over
    packs_gguf  weights of a GGUF file stay packed in memory
    """

    name: str
    summary: str
    open: Callable[[EngineConfig, BuildLocal], Engine]
    max_gpus: int = 1
    packs_gguf: bool = False


_MODULES = {"local": "paceline.engines.local"}
_REGISTERED: dict[str, EngineSpec] = {}


def register(spec: EngineSpec) -> None:
    """Add an engine, or replace one, under its name."""
    _REGISTERED[spec.name] = spec


def names() -> list[str]:
    return sorted({*_MODULES, *_REGISTERED})


def spec(name: str) -> EngineSpec:
    """Raises OptionError for a name that does not exist."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name not in _MODULES:
        raise OptionError(f"engine must be one of {', '.join(names())}; not {name!r}")
    built_in: EngineSpec = importlib.import_module(_MODULES[name]).SPEC
    return built_in
