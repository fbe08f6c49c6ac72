"""An engine that outlives its worker: where the worker dies, its requests fail and the engine is opened again.

The server speaks to a SupervisedEngine as to any engine. `watch` runs beside the server: it looks after the engine's
health, ends the requests that wait for a dead worker, and opens the engine again a bounded number of times, waiting
longer each time. Where that does not help, or is not asked for, it raises EngineFailed, which ends the server.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

from paceline.core.protocols import Engine, Tokenizer
from paceline.core.stats import EngineStats
from paceline.core.types import Request, RequestOutput
from paceline.errors import EngineClosed, EngineFailed, EngineRestarting, PacelineError
from paceline.serve.config import FailurePolicy

LOG = logging.getLogger("paceline.serve")
OpenEngine = Callable[[], Engine]
POLL_SECONDS = 1.0  # between two health checks; a request that fails causes one at once
CLOSE_SECONDS = 10.0  # for a failed engine to close; what it still holds after that is lost
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # before the first restart and, doubled each time, before a later one
STABLE_SECONDS = 600.0  # an engine that lives so long is healthy: its next restart is a first one


class SupervisedEngine(Engine):
    """The engine of the moment, behind one object. While there is none, requests are refused with EngineRestarting."""

    def __init__(self, open_engine: OpenEngine, policy: FailurePolicy) -> None:
        self._open_engine, self._policy = open_engine, policy
        self._engine: Engine | None = open_engine()
        self.info, self.methods = self._engine.info, self._engine.methods
        self._tokenizer, self._last_stats = self._engine.tokenizer, self._engine.stats()
        self._reason = ""  # why the engine has failed; no exception, because its traceback would keep the engine alive
        self._suspected = asyncio.Event()
        self._waiting: set[asyncio.Timeout] = set()  # readers that wait for their next output
        self._num_restarts = self._in_a_row = 0

    # --- Engine -------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        engine = self._running()
        try:
            return self._outputs(engine, engine.generate(request))
        except (EngineClosed, EngineFailed) as error:
            raise self._reported(engine, str(error)) from error

    async def prepare(self, request: Request) -> None:
        await self._running().prepare(request)

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        return await self._running().embed(token_ids, pooling)

    async def update_head(self, folder: str) -> None:
        await self._running().update_head(folder)

    def stats(self) -> EngineStats:
        if self._engine is not None:
            self._last_stats = self._engine.stats()
        return replace(self._last_stats, restarts=self._num_restarts)

    def check_health(self) -> None:
        engine = self._running()
        try:
            engine.check_health()
        except EngineFailed as error:
            raise self._reported(engine, str(error)) from None

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _running(self) -> Engine:
        if self._engine is None or self._reason:
            raise self._failure()
        return self._engine

    def _failure(self) -> EngineFailed:
        """The error that clients see while there is no engine."""
        if self._policy.restarts:
            return EngineRestarting(f"{self._reason}; the engine is being restarted, retry soon")
        return EngineFailed(self._reason)

    async def _outputs(self, engine: Engine, stream: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
        try:
            async with aclosing(stream) as outputs:  # type: ignore[type-var]
                while (output := await self._next(outputs)) is not None:
                    yield output
        except (EngineClosed, EngineFailed) as error:
            raise self._examined(engine, str(error)) from error
        except PacelineError:
            self._suspected.set()
            raise

    async def _next(self, outputs: AsyncIterator[RequestOutput]) -> RequestOutput | None:
        """The next output; None at the end. A reader of a dead worker does not wait for it."""
        try:
            async with asyncio.timeout(None) as wait:
                self._waiting.add(wait)
                try:
                    return await anext(outputs, None)
                finally:
                    self._waiting.discard(wait)
        except TimeoutError:
            raise self._failure() from None

    def _examined(self, engine: Engine, reason: str) -> EngineFailed:
        """The error of one request as its reader sees it. A connection may be lost while the engine is well."""
        try:
            engine.check_health()
        except EngineFailed:
            return self._reported(engine, reason)
        return self._failure() if self._reason else EngineFailed(reason)

    def _reported(self, engine: Engine, reason: str) -> EngineFailed:
        """Write down that the engine has failed; the error as a reader sees it."""
        if engine is self._engine and not self._reason:
            self._reason = reason
            self._suspected.set()
        return self._failure() if self._reason else EngineRestarting(f"{reason}; the engine was restarted, retry")

    # --- restarts -----------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Look after the engine until cancelled. Raises EngineFailed where it cannot or must not be opened again."""
        loop = asyncio.get_running_loop()
        while True:
            opened = loop.time()
            self._reason = await self._failed()
            if loop.time() - opened > STABLE_SECONDS:
                self._in_a_row = 0
            LOG.error("the engine has failed", extra={"fields": {"reason": self._reason}})
            await self._discard()
            while self._engine is None:
                await self._restart()

    async def _failed(self) -> str:
        """Wait until the engine fails, and return why."""
        while not self._reason:
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self._suspected.wait()
            except TimeoutError:
                pass
            self._suspected.clear()
            try:
                self.check_health()
            except EngineFailed:
                break  # it has written down the reason
        return self._reason

    async def _discard(self) -> None:
        """End the requests of a failed engine and free what it holds, so that the next one has room."""
        self._last_stats = replace(self.stats(), running=0, waiting=0, blocks_used=0)
        for wait in tuple(self._waiting):
            wait.reschedule(asyncio.get_running_loop().time())
        engine, self._engine = self._engine, None
        assert engine is not None
        try:
            await asyncio.wait_for(engine.close(), CLOSE_SECONDS)
        except Exception as error:  # it is broken, and may raise anything
            LOG.warning("the failed engine did not close", exc_info=error)
        del engine
        gc.collect()

    async def _restart(self) -> None:
        """Open the engine again. Leaves the reason behind where that fails."""
        if not self._policy.restarts:
            raise EngineFailed(self._reason)
        if self._in_a_row >= self._policy.max_engine_restarts:
            self._policy = replace(self._policy, on_engine_failure="exit")  # what clients read until the server ends
            raise EngineFailed(f"{self._reason}; {self._in_a_row} restarts in a row did not help")
        await asyncio.sleep(min(LONGEST_DELAY, FIRST_DELAY * 2**self._in_a_row))
        self._in_a_row += 1
        self._num_restarts += 1
        try:
            self._engine = await _in_daemon_thread(self._open_engine)
        except Exception as error:  # a model or a driver may raise anything at all
            LOG.error("the engine cannot be opened again", exc_info=error)
            self._reason = f"the engine cannot be opened again: {error}"
            return
        self._reason = ""
        LOG.warning("the engine has been restarted", extra={"fields": {"restarts": self._num_restarts}})


def _in_daemon_thread(open_engine: OpenEngine) -> asyncio.Future[Engine]:
    """A thread that nothing waits for: a model takes minutes to load, and the server may be told to stop meanwhile."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Engine] = loop.create_future()

    def finish(engine: Engine | None, error: BaseException | None) -> None:
        if not future.cancelled() and engine is not None:
            future.set_result(engine)
        elif not future.cancelled() and error is not None:
            future.set_exception(error)

    def work() -> None:
        engine, problem = None, None
        try:
            engine = open_engine()
        except Exception as error:
            problem = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, engine, problem)

    threading.Thread(target=work, name="paceline-restart", daemon=True).start()
    return future
