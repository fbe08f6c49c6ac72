"""llama.cpp's timings of a request, and chat completions that carry them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from paceline.serve.api_shape import ApiShape, Json
from paceline.serve.schema import ChatRequest

MILLISECONDS = 1000
LEAST_SECONDS = 1e-6  # a clock may not move between two readings


def timings(shape: ApiShape, started: float, usage: Json) -> Json:
    """The timings of a request up to now. usage: its token counts so far."""
    end = time.perf_counter()
    first = shape.first_token or end
    num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "cache_n": num_cached,
        **_part("prompt", shape.prompt_tokens - num_cached, first - started),
        **_part("predicted", usage.get("completion_tokens", 0), end - first),
    }


def _part(name: str, num_tokens: int, seconds: float) -> Json:
    seconds = max(seconds, LEAST_SECONDS)
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": seconds * MILLISECONDS,
        f"{name}_per_token_ms": seconds * MILLISECONDS / max(num_tokens, 1),
        f"{name}_per_second": num_tokens / seconds,
    }


class TimedChatShape(ApiShape):
    """A chat completion with llama.cpp's additions: timings, and the prompt as the model has read it."""

    def __init__(self, body: ChatRequest, decode: Callable[[list[int]], str]) -> None:
        self._is_timed, self._is_verbose, self._decode = bool(body.timings_per_token), bool(body.verbose), decode
        self._started = time.perf_counter()

    @classmethod
    def of(cls, body: ChatRequest, decode: Callable[[list[int]], str]) -> TimedChatShape | None:
        """The shape for a request that asks for additions; None: it asks for none."""
        return cls(body, decode) if body.timings_per_token or body.verbose else None

    def whole(self, document: Json) -> Json:
        return document | self._additions(document["usage"])

    async def chunks(self, chunks: AsyncGenerator[Json, None]) -> AsyncGenerator[Json, None]:
        async with aclosing(chunks):
            async for chunk in chunks:
                self.first_token = self.first_token or time.perf_counter()
                # the last chunk has the token counts and no choice
                yield chunk if chunk["choices"] else chunk | self._additions(chunk["usage"])

    def _additions(self, usage: Json) -> Json:
        additions: Json = {"timings": timings(self, self._started, usage)} if self._is_timed else {}
        if self._is_verbose:
            additions["__verbose"] = {"prompt": self._decode(list(self.prompt_ids))}
        return additions
