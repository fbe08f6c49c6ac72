"""Engines that commands know only by the Engine protocol: configured when they start, or by each request.

`register_foreign` adds three of them to the registry. All run a real model, but nothing of it shows outside:
    foreign   takes its method and k when it is opened, as vLLM and llama.cpp do, and refuses others in a request
    roaming   takes them with each request
    running   drafts with n-grams whatever it is told, as a server does that is already running
Engine options of `foreign`, for what it gets wrong with speculation: broken=token changes one greedy token,
broken=sampling draws at a third of the temperature. delay=SECONDS makes each sequence seem slow to `clock`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.config import NONE, EngineConfig
from paceline.core.cost_model import CostModel
from paceline.core.protocols import Engine
from paceline.core.stats import EngineStats
from paceline.core.types import Request, RequestOutput
from paceline.engines import registry
from paceline.engines.local.async_engine import AsyncEngine
from paceline.engines.registry import BuildLocal, EngineOption, EngineSpec
from paceline.errors import OptionError

OPENED: list[EngineConfig] = []  # configurations of the engines opened since `register_foreign`
LOST: list[float] = []  # seconds of delay since `register_foreign`
METHODS = (NONE, "ngram", "suffix", "draft_model", "auto")


@dataclass
class Foreign(Engine):
    """Passes requests on to an engine that is not seen."""

    config: EngineConfig
    inner: AsyncEngine
    methods: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.info = self.inner.info
        self.methods = (self.config.speculative.method or NONE,)

    @property
    def tokenizer(self) -> Any:  # type: ignore[override]
        return self.inner.tokenizer

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        if request.method is not None or request.num_draft_tokens is not None:
            raise OptionError("the engine foreign takes its method when it is opened")
        broken = None if self.methods == (NONE,) else self.config.engine_options.get("broken")
        if broken == "sampling":
            cold = replace(request.sampling, temperature=request.sampling.temperature / 3)
            request = replace(request, sampling=cold)
        LOST.append(float(self.config.engine_options.get("delay", 0)))
        outputs = self.inner.generate(request)
        return _changed(outputs) if broken == "token" and request.sampling.temperature == 0 else outputs

    def stats(self) -> EngineStats:
        return self.inner.stats()

    async def close(self) -> None:
        await self.inner.close()


def clock() -> float:
    """The time, and what delayed sequences took beyond it: for tests whose outcome must not depend on the machine."""
    return time.perf_counter() + sum(LOST)


async def _changed(outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
    """The same with another first token."""
    first = True
    async for output in outputs:
        if first and output.token_ids:
            first = False
            output = replace(output, token_ids=((output.token_ids[0] + 1) % 256, *output.token_ids[1:]))
        yield output


def _inner(config: EngineConfig, build: BuildLocal, **options: Any) -> AsyncEngine:
    OPENED.append(config)
    return AsyncEngine(build(config.with_options(tuned=CostModel(), **options)))


def _open_foreign(config: EngineConfig, build: BuildLocal) -> Engine:
    if config.speculative.num_draft_tokens == "auto" and config.speculative.method not in (NONE, "auto"):
        raise OptionError("the engine foreign needs a number of draft tokens")
    return Foreign(config, _inner(config, build))


def _open_roaming(config: EngineConfig, build: BuildLocal) -> Engine:
    return _inner(config, build, per_request=True)


def _open_running(config: EngineConfig, build: BuildLocal) -> Engine:
    if config.speculative.method != NONE:
        raise OptionError("this server decides itself how it drafts")
    engine = Foreign(config, _inner(config, build, method="ngram", num_draft_tokens=3))
    engine.methods = ("server",)
    return engine


def server_command(config: EngineConfig) -> str:
    speculative, schedule = config.speculative, config.engine_options.get("schedule")
    return f"foreign-server --method {speculative.method} -k {speculative.num_draft_tokens} --schedule {schedule}"


@contextmanager
def register_foreign() -> Iterator[None]:
    """The registry with both engines, and as it was afterwards."""
    options = (
        EngineOption("broken", "token or sampling: what it gets wrong"),
        EngineOption("delay", "seconds"),
        EngineOption("schedule", "k by load"),
    )
    foreign = EngineSpec(
        "foreign",
        "configured at start",
        _open_foreign,
        options=options,
        methods=METHODS,
        server_command=server_command,
        k_by_load=lambda schedule: {"schedule": schedule},
    )
    OPENED.clear()
    LOST.clear()
    registry.register(foreign)
    registry.register(EngineSpec("roaming", "configured by requests", _open_roaming, methods=(NONE, "ngram")))
    registry.register(EngineSpec("running", "a server", _open_running, model_for=lambda name: None))
    try:
        yield
    finally:
        for name in ("foreign", "roaming", "running"):
            registry._REGISTERED.pop(name, None)
