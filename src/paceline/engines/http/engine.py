"""An engine whose model runs behind HTTP: in a process of its own, or on a server that is already running."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from paceline.core.protocols import ExternalEngine
from paceline.core.stats import EngineStats
from paceline.core.types import ModelInfo, Request, RequestOutput
from paceline.engines.http.acceptance import DraftCounts, counts_in_metrics
from paceline.engines.http.client import HttpClient
from paceline.engines.http.request_checks import RequestChecks
from paceline.engines.http.request_tracker import RequestTracker, TrackedRequest
from paceline.engines.http.wire import ResponseReader, Wire
from paceline.errors import EngineClosed, EngineFailed, OptionError, PacelineError
from paceline.hub.tokenizer import Tokenizer

METRICS = "/metrics"
Explain = Callable[[PacelineError], PacelineError]  # a better reason for a failure, where the engine knows one


def _as_it_is(error: PacelineError) -> PacelineError:
    return error


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class RemoteParts:
    """What an engine over HTTP is made of.

    max_num_seqs   sequences that the server runs at a time, where that is known
    reads_metrics  answers do not tell their draft tokens, but the server's counters do
    explain        says why a request failed
    check_health   raises EngineFailed where it is known that no request can succeed any more
    on_close       gives back what the engine has opened
    """

    info: ModelInfo
    tokenizer: Tokenizer
    methods: tuple[str, ...]
    client: HttpClient
    wire: Wire
    checks: RequestChecks
    max_num_seqs: int | None = None
    reads_metrics: bool = False
    explain: Explain = _as_it_is
    check_health: Callable[[], None] = _nothing
    on_close: Callable[[], None] = _nothing


class RemoteEngine(ExternalEngine):
    """The Engine protocol over a server's completion route."""

    def __init__(self, parts: RemoteParts) -> None:
        self.info, self.methods = parts.info, parts.methods
        self.tokenizer: Any = parts.tokenizer
        self._parts, self._client, self._wire = parts, parts.client, parts.wire
        self._tracker = RequestTracker(parts.max_num_seqs)

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Raises OptionError, PromptError or EngineClosed at once."""
        if self._tracker.closed:
            raise EngineClosed("the engine has been closed")
        self._parts.check_health()
        self._parts.checks.check(request)
        self._wire.check(request)
        return self._stream(request)

    def stats(self) -> EngineStats:
        return self._tracker.snapshot()

    def check_health(self) -> None:
        """Raise EngineFailed where the process behind the engine has ended. Cheap; from any thread."""
        self._parts.check_health()

    async def close(self) -> None:
        """Sequences in progress end with finish_reason "abort"."""
        if not self._tracker.closed:
            self._tracker.close()
            await self._client.close()
            self._parts.on_close()

    async def _stream(self, request: Request) -> AsyncIterator[RequestOutput]:
        tracked, reader = self._tracker.begin(), self._wire.reader(request)
        started, rest = time.perf_counter(), ""
        try:
            before = await self._counters()
            call, started = self._wire.call(request), time.perf_counter()
            async with aclosing(tracked.events(self._client.events(call.path, call.body))) as events:  # type: ignore[type-var]
                async for event in events:
                    for output in reader.feed(event):
                        yield output
            self._check_complete(reader, tracked)
            await self._add_counters(reader, before)
        except PacelineError as error:
            if not isinstance(error, OptionError):  # a refusal is no failure of the engine
                self._tracker.count_failure()
            raise self._parts.explain(error) from error
        finally:
            rest = reader.end()
            self._count(request, reader, time.perf_counter() - started)
            self._tracker.end(tracked)
        yield RequestOutput(
            rest,
            finish_reason=reader.finish_reason or "abort",
            stats=reader.stats,
            stop_reason=reader.stop_reason,
            num_cached_tokens=reader.num_cached_tokens,
        )

    async def _counters(self) -> DraftCounts | None:
        """The server's counters of draft tokens, where they are needed and only one request can have moved them."""
        if not self._parts.reads_metrics or self._tracker.num_open != 1:
            return None
        return counts_in_metrics(await self._client.text(METRICS))

    async def _add_counters(self, reader: ResponseReader, before: DraftCounts | None) -> None:
        if before is not None and not reader.knows_drafts and (after := await self._counters()) is not None:
            reader.counts = after.minus(before)

    def _check_complete(self, reader: ResponseReader, tracked: TrackedRequest) -> None:
        if reader.finish_reason is None and not tracked.closed:
            raise EngineFailed(f"the connection to {self._client.subject} was lost: the answer ended too early")

    def _count(self, request: Request, reader: ResponseReader, seconds: float) -> None:
        reader.stats.seconds = seconds
        method = request.method or self.methods[0]
        prompt_tokens = len(request.prompt) if reader.prompt_tokens is None else reader.prompt_tokens
        self._tracker.count(method, prompt_tokens, reader.stats, reader.draft_lengths)
