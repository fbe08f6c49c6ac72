"""Outputs of several sequences to one client: merging, deadlines, server-sent events, clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.core.types import RequestOutput
from paceline.serve.api_shape import ApiShape
from paceline.serve.errors import CLIENT_GONE, ApiError, as_api_error, log_failure
from paceline.serve.responses import ChoiceDelta

Result = TypeVar("Result")
Observer = Callable[[RequestOutput], None]
Event = ChoiceDelta | Exception | None  # None: one stream has ended


async def merge_outputs(
    streams: list[AsyncIterator[RequestOutput]], observers: list[Observer], timeout: float
) -> AsyncGenerator[ChoiceDelta, None]:
    """The outputs of several sequences as they arrive; each observer sees those of its sequence.

    Closing the generator, an error in one stream and the timeout abort all of them. Raises ApiError 408.
    """
    events: asyncio.Queue[Event] = asyncio.Queue()
    pairs = enumerate(zip(streams, observers))
    tasks = [asyncio.create_task(_forward(index, *pair, events)) for index, pair in pairs]
    deadline, num_running = asyncio.get_running_loop().time() + timeout, len(tasks)
    try:
        while num_running:
            async with asyncio.timeout_at(deadline):  # around the wait alone: a timeout must not span a yield
                event = await events.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                num_running -= 1
            else:
                yield event
    except TimeoutError:
        raise ApiError(408, f"the request took longer than {timeout:g} seconds", code="timeout") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    index: int, stream: AsyncIterator[RequestOutput], observer: Observer, events: asyncio.Queue[Event]
) -> None:
    try:
        async with aclosing(stream) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                observer(output)
                events.put_nowait(ChoiceDelta(index, output))
        events.put_nowait(None)
    except Exception as error:  # merge_outputs raises it
        events.put_nowait(error)


async def while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """The result of the work. Cancels it and raises ApiError when the client disconnects."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _client_gone()
        return task.result()
    finally:
        for pending in (task, disconnect):
            pending.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _client_gone() -> ApiError:
    return ApiError(CLIENT_GONE, "the client has disconnected", code="client_gone")


async def first_chunk(request: Request, chunks: AsyncIterator[Any], ping_interval: float) -> asyncio.Future[Any]:
    """The first chunk of a stream, awaited for so long: an error before it is then a response with its own status.

    One that takes longer is awaited by the stream, which pings meanwhile. ping_interval 0: it is awaited here.
    """
    chunk = asyncio.ensure_future(anext(chunks))
    try:
        await while_connected(request, asyncio.wait({chunk}, timeout=ping_interval or None))
        if chunk.done():
            chunk.result()  # raises its error
        return chunk
    except BaseException:
        chunk.cancel()
        await asyncio.gather(chunk, return_exceptions=True)
        raise


class EventStream(Response):
    """The events of a stream. The generation is aborted when the client disconnects or stalls.

    first          the first chunk; the status does not wait for it
    chunks         those that follow
    shape          how an event is written
    on_finish      called once at the end, with the error that cut the stream short or None
    ping_interval  seconds of silence after which what clients skip is sent; 0: never
    """

    def __init__(
        self,
        first: asyncio.Future[Any],
        chunks: AsyncGenerator[Any, None],
        shape: ApiShape,
        stall_timeout: float,
        on_finish: Callable[[ApiError | None], None],
        ping_interval: float = 0.0,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=shape.media_type)
        del self.headers["content-length"]
        self._first, self._chunks, self._shape = first, chunks, shape
        self._stall_timeout, self._on_finish = stall_timeout, on_finish
        self._ping_interval, self._num_sent = ping_interval, 0
        self._error: ApiError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(self._write(send))
        disconnect = asyncio.create_task(_disconnected(receive))
        pinger = asyncio.create_task(self._ping(send))
        try:
            await asyncio.wait({writer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not writer.done():
                self._error = _client_gone()
            for task in (writer, disconnect, pinger):
                task.cancel()
            await asyncio.gather(writer, disconnect, pinger, return_exceptions=True)
            self._on_finish(self._error)

    async def _write(self, send: Send) -> None:
        """Send every event. A client that does not receive, or is gone, ends the generation."""
        try:
            async with aclosing(self._chunks), aclosing(self._events()) as events:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                self._num_sent = 1
                async for event in events:
                    await self._send(send, event)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):
            self._error = _client_gone()

    async def _ping(self, send: Send) -> None:
        """Send a ping after every interval in which nothing was sent, so that no proxy cuts the stream."""
        while self._ping_interval and self._shape.ping:
            num_sent = self._num_sent
            await asyncio.sleep(self._ping_interval)
            if num_sent and num_sent == self._num_sent:
                await self._send(send, self._shape.ping)

    async def _events(self) -> AsyncGenerator[str, None]:
        """Each event as it is sent. An error on the way is the last event."""
        try:
            yield self._shape.frame(await self._first)
            async for chunk in self._chunks:
                yield self._shape.frame(chunk)
            yield self._shape.last_frame()
        except Exception as error:  # the status has been sent, so the client gets the error as an event
            self._error = as_api_error(error)
            log_failure(self._error, error)
            yield self._shape.frame(self._shape.error(self._error))

    async def _send(self, send: Send, event: str) -> None:
        self._num_sent += 1
        async with asyncio.timeout(self._stall_timeout):
            await send({"type": "http.response.body", "body": event.encode("utf-8", "replace"), "more_body": True})
