"""Engines for tests: over the toy, or over a tiny model through the package's own build.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.build import build_engine, open_engine
from paceline.config import NONE, EngineConfig
from paceline.core.cost_model import CostModel
from paceline.core.draft_length import DraftLengthPolicy, FixedDraftLength
from paceline.core.protocols import Drafter, Engine, Runner
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence, SequenceParams
from paceline.core.stopping import StopRules
from paceline.core.types import Request, RequestOutput
from paceline.core.verify import RULES
from paceline.drafting.ngram import Ngram
from paceline.engines.local.engine import EngineParts, LocalEngine
from paceline.engines.local.request_state import RequestState
from paceline.engines.local.verifier import Verifier
from paceline.errors import PacelineError
from paceline.kv.prefix_cache import TARGET, PrefixCache
from tests.support.toy import ToyRunner, letter_tokenizer


def toy_engine(
    runner: Runner | None = None,
    drafter: Drafter | None = None,
    draft_length: DraftLengthPolicy | None = None,
    methods: tuple[str, ...] = (NONE,),
    **options: Any,
) -> LocalEngine:
    """An engine over the toy, with 3 draft tokens a step unless a draft length is given. options: of EngineConfig."""
    runner = runner or ToyRunner()
    config = EngineConfig.create("toy", **options)
    tokens = config.cache.prefix_cache_tokens
    prefix_cache = PrefixCache(runner.blocks.block_size, {} if tokens is None else {TARGET: tokens})
    parts = EngineParts(runner, drafter or Ngram(), draft_length or FixedDraftLength(3), Verifier(), prefix_cache)
    return LocalEngine(parts, letter_tokenizer(), config, methods)


def tiny_engine(folder: Path, **options: Any) -> LocalEngine:
    """An engine over a tiny model, as the library builds it, with costs that no clock decides."""
    return build_engine(EngineConfig.create(folder, **{"method": "ngram", "tuned": CostModel(), **options}))


def open_for_tests(folder: Any, **options: Any) -> Engine:
    """An engine as the server opens it, with n-gram drafts unless options say otherwise."""
    defaults = {"method": "ngram", "tuned": CostModel(), "per_request": True}
    return open_engine(EngineConfig.create(folder, **{**defaults, **options}))


def with_engine(folder: Any, work: Callable[[Any], Awaitable[None]], **options: Any) -> None:
    """Run `work` with an engine over a tiny model, opened as the server opens it, and close it."""

    async def open_work_close() -> None:
        engine = open_for_tests(folder, **options)
        try:
            await work(engine)
        finally:
            await engine.close()

    asyncio.run(open_work_close())


def sequence(
    prompt: list[int],
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    *,
    rule: str = "token",
    **params: Any,
) -> Sequence:
    """A sequence that ends by its length alone, unless params name `stopping`."""
    params.setdefault("stopping", StopRules(max_new_tokens))
    return Sequence(prompt, SequenceParams(sampling or SamplingParams(), rule=RULES[rule], **params))


def plain_tokens(prompt: list[int], max_new_tokens: int) -> list[int]:
    """What plain decoding of one sequence on the toy generates."""
    [seq] = toy_engine(ToyRunner(), draft_length=FixedDraftLength(0)).run([sequence(prompt, max_new_tokens)])
    return seq.generated


@dataclass
class Recorder:
    """A request in an engine, and everything its reader is handed."""

    state: RequestState
    outputs: list[RequestOutput] = field(default_factory=list)
    errors: list[PacelineError] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[-1].finish_reason if self.outputs else None


def add(engine: LocalEngine, request: Sequence | Request) -> Recorder:
    """Queue a request and record its outputs."""
    outputs: list[RequestOutput] = []
    errors: list[PacelineError] = []

    def record(output: RequestOutput | PacelineError) -> None:
        if isinstance(output, PacelineError):
            errors.append(output)
        else:
            outputs.append(output)

    return Recorder(engine.add(request, record), outputs, errors)


def finish(engine: LocalEngine, limit: int = 2000) -> int:
    """Steps until no work is left."""
    for count in range(limit):
        if not engine.has_work:
            return count
        engine.step()
    raise AssertionError("the engine never came to an end")


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def ids_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def text_request(engine: Engine, prompt: str, max_new_tokens: int = 24, **settings: Any) -> Request:
    sampling = settings.pop("sampling", SamplingParams())
    return Request(engine.tokenizer.encode(prompt), sampling, max_new_tokens, **settings)
