"""LocalEngine behind the Engine protocol: asynchronous at the edge, one worker thread that owns the model.

Requests cross to the worker through a queue it empties before every step; outputs cross back through the event loop of
the reader. The worker never waits for a reader, and characters are made on the reader's side, while the worker is
already in its next step. Python runs one thread at a time, so a reader that wakes up delays the worker: it is woken
once for all outputs that lie ready, and of a sequence that is wanted whole only when it has ended.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from paceline.core.protocols import Tokenizer
from paceline.core.sequence import Sequence
from paceline.core.stats import EngineStats
from paceline.core.stopping import StopRules
from paceline.core.types import Request, RequestOutput
from paceline.device.properties import device_in_use
from paceline.engines.local.engine import LocalEngine
from paceline.engines.local.request_state import RequestState
from paceline.errors import EngineClosed, EngineFailed, PacelineError
from paceline.hub.tokenizer import StreamDetokenizer

LOG = logging.getLogger(__name__)
EXIT_SECONDS = 10.0  # that the end of a program waits for the step under way
CHECK_SECONDS = 1.0  # how long a task waits before it asks whether the worker lives
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Command:
    """What the worker should do before its next step."""

    run: Callable[[Any], None]
    request: RequestState | _Task


@dataclass(frozen=True, slots=True)
class _Task:
    """Work between two steps, and where its result goes."""

    work: Callable[[], Any]
    deliver: Callable[[Any], None]


class _Outbox:
    """Outputs of one request on their way from the worker to the reader's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, whole: bool) -> None:
        """whole: the reader is woken at the end of the sequence only."""
        self._loop, self._whole = loop, whole
        self._outputs: deque[RequestOutput | PacelineError] = deque()
        self._ready = asyncio.Event()
        self._woken = False  # the reader has been told and has not looked yet

    def deliver(self, output: RequestOutput | PacelineError) -> None:
        """In the worker's thread."""
        self._outputs.append(output)  # before the question whether the reader has looked: it looks after saying so
        ended = isinstance(output, PacelineError) or output.finish_reason is not None
        if self._woken or (self._whole and not ended):
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:  # the reader's loop has closed
            LOG.debug("a sequence ended after its reader")

    async def take(self) -> list[RequestOutput]:
        """In the reader's loop: what lies ready. Raises the error that ended the sequence, after its last output."""
        # By place: the worker may append at any moment, which an iterator does not survive.
        if not (self._outputs and isinstance(self._outputs[0], PacelineError)):
            await self._ready.wait()
            self._ready.clear()
            self._woken = False
        return self._until_error()

    def _until_error(self) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        while self._outputs:
            output = self._outputs.popleft()
            if isinstance(output, PacelineError):
                if not outputs:
                    raise output
                self._outputs.appendleft(output)
                break
            outputs.append(output)
        return outputs


class AsyncEngine:
    """Runs a LocalEngine in a thread of its own."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.info, self.methods = engine.info, engine.methods
        self.tokenizer: Tokenizer = engine.tokenizer
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        commands = self._commands
        engine.end_loops_if(lambda: not commands.empty())
        self._closing = threading.Event()
        self._failure: EngineFailed | None = None  # why the worker died
        self._requests: set[RequestState] = set()  # requests that have a reader
        self._compiler = ThreadPoolExecutor(1, "paceline-grammars")  # a second one would take a core from the worker
        self._thread = threading.Thread(target=self._work, name="paceline-worker", daemon=True)
        self._thread.start()
        # A program that ends without closing: its interpreter would end the thread inside an operation of torch, which
        # aborts the process.
        weakref.finalize(self, _end_worker, self._closing, self._commands, self._thread)

    # --- Engine -------------------------------------------------------------------------------------------------------

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        self._check_open()
        return self._stream(self.engine.sequence(request), whole=request.whole)

    async def prepare(self, request: Request) -> None:
        compilation = self.engine.compilation(request)
        if compilation is not None and not self._closing.is_set():
            await asyncio.get_running_loop().run_in_executor(self._compiler, self._unless_closed, compilation)

    def _unless_closed(self, work: Callable[[], None]) -> None:
        """What still waits when the engine is closed is left out; `generate` then says why."""
        if not self._closing.is_set():
            work()

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        return await self._between_steps(lambda: self.engine.embed(token_ids, pooling))

    async def update_head(self, folder: str) -> None:
        update = await asyncio.to_thread(self.engine.head_update, folder)
        await self._between_steps(update)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def check_health(self) -> None:
        if self._failure is not None:
            raise EngineFailed(str(self._failure))

    async def close(self) -> None:
        self._closing.set()
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        self._compiler.shutdown(wait=False)

    def _check_open(self) -> None:
        self.check_health()
        if self._closing.is_set():
            raise EngineClosed("the engine has been closed")

    # --- the reader's side --------------------------------------------------------------------------------------------

    async def _stream(self, seq: Sequence, *, whole: bool) -> AsyncIterator[RequestOutput]:
        outbox = _Outbox(asyncio.get_running_loop(), whole=whole)
        state = RequestState(seq, outbox.deliver)
        stopping = seq.params.stopping
        detokenizer = self.engine.tokenizer.stream(
            stopping.stop_strings,
            skip_special_tokens=seq.params.skip_special_tokens,
            include_stop=stopping.include_stop,
        )
        self._requests.add(state)
        self._commands.put(_Command(self.engine.enqueue, state))
        try:
            self._check_open()  # the worker may have taken its last command
            while True:
                outputs = await outbox.take()
                for output in _with_text(outputs, detokenizer, stopping, whole=whole):
                    yield output
                    if output.finish_reason is not None:
                        return
        finally:
            self._requests.discard(state)
            self._commands.put(_Command(self.engine.abort, state))

    async def _between_steps(self, work: Callable[[], Result]) -> Result:
        """Let the worker do something between two steps, and return its result or raise its error."""
        loop = asyncio.get_running_loop()
        results: asyncio.Queue[Result | Exception] = asyncio.Queue()

        def deliver(result: Result | Exception) -> None:
            try:
                loop.call_soon_threadsafe(results.put_nowait, result)
            except RuntimeError:  # the reader's loop has closed
                LOG.debug("a task ended after its reader")

        self._commands.put(_Command(_run_task, _Task(work, deliver)))
        while True:
            self._check_open()  # the worker may have taken its last command, or have died
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    result = await results.get()
            except TimeoutError:
                continue
            if isinstance(result, Exception):
                raise result
            return result

    # --- the worker's side --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Step until the engine is closed. Whatever ends the worker, no reader waits for it in vain."""
        try:
            with device_in_use(self.info.device):
                self._work_until_closed()
        except BaseException as error:  # nothing above catches it: the thread ends here
            self._die(error)

    def _work_until_closed(self) -> None:
        while not self._closing.is_set():
            self._take_commands(wait=not self.engine.has_work)
            if self.engine.has_work:
                self.engine.step()
        self._take_commands(wait=False)
        self.engine.abort_all()

    def _die(self, error: BaseException) -> None:
        """Fail every request. Nothing of the engine is called: its state is unknown."""
        LOG.error("the worker has died", exc_info=error)
        self._failure = EngineFailed(f"the engine's worker has died ({type(error).__name__}: {error})")
        self._closing.set()
        for state in tuple(self._requests):
            state.fail(self._failure)

    def _take_commands(self, wait: bool) -> None:
        """Run the commands since the last step; without work, sleep until one comes."""
        while wait or not self._commands.empty():
            command = self._commands.get()
            wait = False
            if command is not None:
                command.run(command.request)


def _run_task(task: _Task) -> None:
    try:
        task.deliver(task.work())
    except Exception as error:  # a model or a driver may raise anything at all
        task.deliver(error)


def _with_text(
    outputs: list[RequestOutput], detokenizer: StreamDetokenizer, stopping: StopRules, *, whole: bool
) -> Iterator[RequestOutput]:
    """The characters that the tokens complete; on the last output also those held back, of a whole sequence all."""
    if whole:
        tokens = [token for output in outputs for token in output.token_ids]
        yield from outputs[:-1]
        outputs = outputs[-1:]
    for output in outputs:
        token_ids = tokens if whole else list(output.token_ids)
        text = detokenizer.feed(stopping.text_tokens(token_ids, output.finish_reason))
        if output.finish_reason is not None:
            text += detokenizer.flush()
        yield replace(output, text=text)


def _end_worker(
    closing: threading.Event, commands: queue.SimpleQueue[_Command | None], thread: threading.Thread
) -> None:
    closing.set()
    commands.put(None)
    thread.join(EXIT_SECONDS)
