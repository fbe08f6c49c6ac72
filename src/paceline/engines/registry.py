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
class EngineOption:
    """A name that `engine_options` (--engine-option NAME=VALUE) may hold for one engine."""

    name: str
    help: str


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine: its name, a line for --help, and how it is opened.

    max_gpus     GPUs that it can divide one model over
    packs_gguf   weights of a GGUF file stay packed in memory
    options      what `engine_options` may hold
    distributed  names of DistributedConfig's fields that it takes
    per_request  a request may choose its method and number of draft tokens; False: both are fixed at the start
    coupled_seeds  a seed gives the same output with every method; False: only with the same configuration
    """

    name: str
    summary: str
    open: Callable[[EngineConfig, BuildLocal], Engine]
    max_gpus: int = 1
    packs_gguf: bool = False
    options: tuple[EngineOption, ...] = ()
    distributed: frozenset[str] = frozenset()
    per_request: bool = True
    coupled_seeds: bool = True


_MODULES = {
    "local": "paceline.engines.local",
    "vllm": "paceline.engines.vllm",
}
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


def open_engine(config: EngineConfig, build: BuildLocal) -> Engine:
    """The engine that the configuration names. Raises OptionError for options that it does not take."""
    chosen = spec(config.engine)
    _check_options(chosen, config)
    return chosen.open(config, build)


def option_names() -> list[str]:
    """`engine: name` of every engine option, for --help."""
    return [f"{name}: {option.name}" for name in names() for option in spec(name).options]


def _check_options(chosen: EngineSpec, config: EngineConfig) -> None:
    known = {option.name for option in chosen.options}
    unknown = sorted(set(config.engine_options) - known)
    if unknown:
        hint = f"it has {', '.join(sorted(known))}" if known else "it has none"
        raise OptionError(f"the engine {chosen.name} has no option {unknown[0]!r}; {hint}")
    for name in config.distributed.chosen:
        if name not in chosen.distributed:
            others = [other for other in names() if name in spec(other).distributed]
            hint = f"; use engine {' or '.join(others)}" if others else ""
            raise OptionError(f"the engine {chosen.name} does not take {name}{hint}")
