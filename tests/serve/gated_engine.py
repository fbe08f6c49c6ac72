"""The reversing engine behind a gate: no output comes before a test opens it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

from paceline.core.types import Request, RequestOutput
from tests.serve.toy_engine import ReversingEngine


class GatedEngine(ReversingEngine):
    """opened: the gate. late_failure: what the next sequence raises once it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.late_failure: Exception | None = None

    @property
    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(request.prompt) for request in self.requests]

    async def _outputs(self, request: Request) -> AsyncIterator[RequestOutput]:
        while not self.opened.is_set():
            await asyncio.sleep(0.005)
        self.failure, self.late_failure = self.late_failure, None
        async for output in super()._outputs(request):
            yield output
