"""An engine that shares no code with LocalEngine: it implements the Engine protocol and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from paceline.core.protocols import Engine
from paceline.core.stats import EngineStats, SpecStats
from paceline.core.types import ModelInfo, Request, RequestOutput, TokenLogprob
from paceline.errors import EngineClosed

EOS = 0
INFO = ModelInfo(
    name="toy",
    vocab_size=128,
    eos_token_ids=frozenset({EOS}),
    max_seq_len=64,
    num_layers=1,
    hidden_size=1,
    device="cpu",
    dtype="fp32",
)


class AsciiTokenizer:
    """One token a character. Implements encode and decode, as the protocol asks, and has no vocabulary to look into."""

    def encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return [ord(character) for character in prompt]
        if prompt and isinstance(prompt[0], dict):
            return self.encode("".join(message["content"] for message in prompt))
        return list(prompt)

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(token) for token in ids if token != EOS)


class ReversingEngine(Engine):
    """Writes the prompt backwards. The first half is emitted as accepted draft tokens of one step.

    failure   what the next request raises
    prepared  requests that it was told of ahead
    """

    tokenizer = AsciiTokenizer()

    def __init__(self) -> None:
        self.info, self.methods = INFO, ("reverse",)
        self.requests: list[Request] = []
        self.prepared: list[Request] = []
        self.failure: Exception | None = None
        self.is_closed = False
        self._spec = SpecStats()

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        if self.is_closed:
            raise EngineClosed("the toy engine is closed")
        self.requests.append(request)
        return self._outputs(request)

    async def prepare(self, request: Request) -> None:
        self.prepared.append(request)

    def stats(self) -> EngineStats:
        return EngineStats(spec=self._spec)

    async def close(self) -> None:
        self.is_closed = True

    async def _outputs(self, request: Request) -> AsyncIterator[RequestOutput]:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        tokens = tuple(reversed(request.prompt))[: request.max_new_tokens]
        half = len(tokens) // 2
        stats = SpecStats(new_tokens=len(tokens), steps=len(tokens) - half, drafted=half, accepted=half)
        self._spec.add(stats)
        if half:
            yield self._output(request, tokens[:half], from_draft=True, prompt_logprobs=self._prompt_logprobs(request))
        for token in tokens[half:-1]:
            yield self._output(request, (token,), num_drafted=half)
        last: dict[str, Any] = {"finish_reason": "length", "stats": stats}
        if len(tokens) == 1:
            last["prompt_logprobs"] = self._prompt_logprobs(request)
        yield self._output(request, tokens[-1:], **last)

    def _prompt_logprobs(self, request: Request) -> tuple[TokenLogprob, ...] | None:
        if request.prompt_logprobs is None:
            return None
        return tuple(TokenLogprob(token, -1.0, ((token, -1.0),), 1) for token in request.prompt[1:])

    def _output(self, request: Request, tokens: tuple[int, ...], **fields: Any) -> RequestOutput:
        logprobs = None if request.logprobs is None else tuple(TokenLogprob(token, -0.5) for token in tokens)
        return RequestOutput(self.tokenizer.decode(list(tokens)), tokens, logprobs=logprobs, **fields)
