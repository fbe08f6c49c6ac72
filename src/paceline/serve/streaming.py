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


class EventStream(Response):
    """The events of a stream. The generation is aborted when the client disconnects or stalls.

    first      the first event, awaited before the status is sent
    chunks     those that follow
    shape      how an event is written
    on_finish  called once at the end, with the error that cut the stream short or None
    """

    def __init__(
        self,
        first: Any,
        chunks: AsyncGenerator[Any, None],
        shape: ApiShape,
        stall_timeout: float,
        on_finish: Callable[[ApiError | None], None],
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=shape.media_type)
        del self.headers["content-length"]
        self._first, self._chunks, self._shape = first, chunks, shape
        self._stall_timeout, self._on_finish = stall_timeout, on_finish
        self._error: ApiError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(self._write(send))
        disconnect = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({writer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not writer.done():
                self._error = _client_gone()
            for task in (writer, disconnect):
                task.cancel()
            await asyncio.gather(writer, disconnect, return_exceptions=True)
            self._on_finish(self._error)

    async def _write(self, send: Send) -> None:
        """Send every event. A client that does not receive, or is gone, ends the generation."""
        try:
            async with aclosing(self._chunks), aclosing(self._events()) as events:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for event in events:
                    await self._send(send, event)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):
            self._error = _client_gone()

    async def _events(self) -> AsyncGenerator[str, None]:
        """Each event as it is sent. An error on the way is the last event."""
        try:
            yield self._shape.frame(self._first)
            async for chunk in self._chunks:
                yield self._shape.frame(chunk)
            yield self._shape.last_frame()
        except Exception as error:  # the status has been sent, so the client gets the error as an event
            self._error = as_api_error(error)
            log_failure(self._error, error)
            yield self._shape.frame(self._shape.error(self._error))

    async def _send(self, send: Send, event: str) -> None:
        body = event.encode("utf-8", "replace")
        async with asyncio.timeout(self._stall_timeout):
            await send({"type": "http.response.body", "body": body, "more_body": True})
