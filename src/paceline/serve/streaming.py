"""Pieces of several texts to one client: server-sent events, deadlines, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.core.types import RequestOutput
from paceline.serve.errors import CLIENT_GONE, ApiError, as_api_error

LOG = logging.getLogger("paceline.serve")
DONE = "[DONE]"
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """A piece, and which of the texts it belongs to."""

    index: int
    piece: RequestOutput


async def together(streams: list[AsyncIterator[RequestOutput]], seconds: float) -> AsyncGenerator[ChoiceDelta, None]:
    """The pieces of several texts as they come. Closing it, an error or the deadline ends them all."""
    arrived: asyncio.Queue[ChoiceDelta | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_forward(index, stream, arrived)) for index, stream in enumerate(streams)]
    deadline, left = asyncio.get_running_loop().time() + seconds, len(tasks)
    try:
        while left:
            async with asyncio.timeout_at(deadline):
                found = await arrived.get()
            if isinstance(found, BaseException):
                raise found
            left -= found is None
            if found is not None:
                yield found
    except TimeoutError:
        raise ApiError(408, f"the request took longer than {seconds:g} seconds", code="timeout") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    index: int, stream: AsyncIterator[RequestOutput], arrived: asyncio.Queue[ChoiceDelta | BaseException | None]
) -> None:
    try:
        async with aclosing(stream) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                arrived.put_nowait(ChoiceDelta(index, output))
        arrived.put_nowait(None)
    except Exception as error:  # it is raised again by whoever reads the queue
        arrived.put_nowait(error)


async def while_wanted(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work as long as the client is there. Raises ApiError when it has left."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_GONE, "the client has left", code="client_gone")
        return task.result()
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. A client that leaves, or takes nothing for `stall` seconds, ends the work behind it.

    finished: called once at the end, with the error that cut the stream short or None
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[Any, None], stall: float, finished: Callable[[ApiError | None], None]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._stall, self._finished = events, stall, finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(self._write(send))
        watch = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({writer, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = not writer.done()
            for task in (writer, watch):
                task.cancel()
            found = (await asyncio.gather(writer, watch, return_exceptions=True))[0]
            self._finished(_ending(found, left))

    async def _write(self, send: Send) -> ApiError | None:
        """Send everything; returns the error that was sent as the last event, if any."""
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            error: ApiError | None = None
            try:
                async for event in events:
                    await self._send(send, json.dumps(event, ensure_ascii=False))
                await self._send(send, DONE)
            except ApiError as found:
                error = found
                await self._send(send, json.dumps(found.body, ensure_ascii=False))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return error

    async def _send(self, send: Send, data: str) -> None:
        body = f"data: {data}\n\n".encode("utf-8", "replace")
        async with asyncio.timeout(self._stall):
            await send({"type": "http.response.body", "body": body, "more_body": True})


def _ending(found: object, left: bool) -> ApiError | None:
    if left or isinstance(found, TimeoutError | OSError):
        return ApiError(CLIENT_GONE, "the client has left", code="client_gone")
    return as_api_error(found) if isinstance(found, BaseException) else found if isinstance(found, ApiError) else None
