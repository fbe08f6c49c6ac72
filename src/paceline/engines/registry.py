"""Engines by name. An engine is one module with a SPEC; what the engine needs is imported when it is opened."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
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


def _same_model(name: str) -> str | None:
    return name


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine: its name, a line for --help, and how it is opened.

    max_gpus     GPUs that it can divide one model over
    packs_gguf   weights of a GGUF file stay packed in memory
    gguf_kinds   kinds of GGUF blocks that stay packed on a GPU, where not all do, for architectures of gguf_types
    bounds_windows  layers with a sliding window keep no more of a sequence than the window
    rounded_kv    it takes kv_cache_dtype lossy-fp8
    options      what `engine_options` may hold
    distributed  names of DistributedConfig's fields that it takes
    per_request  a request may choose its method and number of draft tokens; False: both are fixed at the start
    coupled_seeds  a seed gives the same output with every method; False: only with the same configuration
    drafts_with_logprobs  log-probabilities come with speculation too; False: a request for both is refused
    lora         it runs LoRA adapters, and requests choose one
    remote       a server that is already running has the model; nothing is loaded

    What commands ask before they open it:

    packages        that must be installed; none: it always is
    reads_files     it runs the Hugging Face directory that hub/locate finds; False: it opens the model itself
    methods         names of the methods it has; None: those of drafting/registry
    model_for       the name of the model it runs where the user names another; None: it cannot run that one
    server_command  the line that starts the engine's own server with a configuration; None: it has no such server
    k_by_load       `engine_options` for k by the sequences at a time, [[first, last, k], …]; None: it takes one k
    """

    name: str
    summary: str
    open: Callable[[EngineConfig, BuildLocal], Engine]
    max_gpus: int = 1
    packs_gguf: bool = False
    gguf_kinds: frozenset[str] = frozenset()
    gguf_types: frozenset[str] = frozenset()
    bounds_windows: bool = False
    rounded_kv: bool = False
    options: tuple[EngineOption, ...] = ()
    distributed: frozenset[str] = frozenset()
    per_request: bool = True
    coupled_seeds: bool = True
    drafts_with_logprobs: bool = True
    lora: bool = False
    remote: bool = False
    packages: tuple[str, ...] = ()
    reads_files: bool = True
    methods: tuple[str, ...] | None = None
    model_for: Callable[[str], str | None] = _same_model
    server_command: Callable[[EngineConfig], str] | None = None
    k_by_load: Callable[[list[list[int]]], dict[str, Any]] | None = None

    @property
    def installed(self) -> bool:
        return all(find_spec(package) is not None for package in self.packages)


_MODULES = {
    "local": "paceline.engines.local",
    "llama_cpp": "paceline.engines.llama_cpp",
    "http": "paceline.engines.http",
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
    if config.model.lora and not chosen.lora:
        raise OptionError(f"the engine {chosen.name} takes no LoRA adapters here; use engine local")
    if config.cache.rounded_kv and not chosen.rounded_kv:
        raise OptionError(f"the engine {chosen.name} takes no kv_cache_dtype here; use engine local, or its own option")
    _check_options(chosen, config)
    return chosen.open(config, build)


def option_names() -> list[str]:
    """`engine: name (what it is)` of every engine option, for --help."""
    return [f"{name}: {option.name} ({option.help})" for name in names() for option in spec(name).options]


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
