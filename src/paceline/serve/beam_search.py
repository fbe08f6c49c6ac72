"""Beam search over any engine: the likeliest whole continuations instead of one drawn token by token.

Each step asks the engine for one token after every beam, with the log-probabilities of its best alternatives. The
prefix cache holds what the beams have in common.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from paceline.core.stats import SpecStats
from paceline.core.types import Request, RequestOutput, TokenLogprob
from paceline.errors import OptionError
from paceline.serve.errors import ApiError
from paceline.serve.requests import BeamParams
from paceline.serve.responses import ChoiceDelta
from paceline.serve.token_text import TokenText

Generate = Callable[[Request], AsyncIterator[RequestOutput]]
ALTERNATIVES = 2  # for each beam: as many may end at one step as go on


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation. logprob: the sum over its tokens, the end token included."""

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    is_finished: bool = False

    def score(self, length_penalty: float) -> float:
        return self.logprob / max(len(self.tokens), 1) ** length_penalty


class BeamSearch:
    """Finds the continuations of prompts. generate: the outputs of one request, as the engine gives them."""

    def __init__(self, generate: Generate, token_text: TokenText, eos_token_ids: frozenset[int]) -> None:
        self._generate, self._token_text, self._eos_token_ids = generate, token_text, eos_token_ids

    async def deltas(
        self, requests: list[Request], params: BeamParams, timeout: float
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """The finished choices. requests: `width` copies for each prompt, which take the beams in their order.

        Raises ApiError 408 where a prompt takes longer than the timeout.
        """
        for start in range(0, len(requests), params.width):
            try:
                beams = await asyncio.wait_for(self._search(requests[start], params), timeout)
            except TimeoutError:
                message = f"the request took longer than {timeout:g} seconds"
                raise ApiError(408, message, code="timeout") from None
            for index, beam in enumerate(beams):
                yield ChoiceDelta(start + index, self._output(beam, requests[start]))

    async def _search(self, request: Request, params: BeamParams) -> list[Beam]:
        running, finished = [Beam()], list[Beam]()
        for _ in range(request.max_new_tokens):
            steps = await asyncio.gather(*(self._next(request, beam, params.width) for beam in running))
            grown = [self._grown(request, beam, *pair) for beam, step in zip(running, steps) for pair in step.top]
            grown.sort(key=lambda beam: -beam.logprob)
            finished += [beam for beam in grown[: ALTERNATIVES * params.width] if beam.is_finished]
            running = [beam for beam in grown if not beam.is_finished][: params.width]
            if not running:
                break
        ranked = sorted(finished + running, key=lambda beam: -beam.score(params.length_penalty))
        return ranked[: params.width]

    async def _next(self, request: Request, beam: Beam, width: int) -> TokenLogprob:
        """The likeliest tokens after a beam."""
        sampling = replace(request.sampling, temperature=0.0, seed=None)
        prompt, top = [*request.prompt, *beam.tokens], ALTERNATIVES * width
        step = replace(
            request, prompt=prompt, sampling=sampling, max_new_tokens=1, logprobs=top, num_draft_tokens=0, stop=()
        )
        async with aclosing(self._generate(step)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                if output.logprobs:
                    return output.logprobs[0]
        raise OptionError("this engine gives no log-probabilities, which beam search needs; leave out use_beam_search")

    def _grown(self, request: Request, beam: Beam, token: int, logprob: float) -> Beam:
        ends = token in request.stop_token_ids or (token in self._eos_token_ids and not request.ignore_eos)
        return Beam((*beam.tokens, token), beam.logprob + logprob, ends)

    def _output(self, beam: Beam, request: Request) -> RequestOutput:
        shown = beam.tokens[:-1] if beam.is_finished else beam.tokens
        stats = SpecStats(new_tokens=len(beam.tokens), steps=len(beam.tokens))
        reason = "stop" if beam.is_finished else "length"
        detokenizer = self._token_text.stream(skip_special_tokens=request.skip_special_tokens)
        text = detokenizer.feed(list(shown)) + detokenizer.flush()
        return RequestOutput(text, beam.tokens, finish_reason=reason, stats=stats)
