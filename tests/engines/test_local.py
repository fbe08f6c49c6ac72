"""The engine at its edge: asynchronous readers, one worker, every request with its own settings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from paceline import SpeculativeDecoder
from paceline.assemble import engine
from paceline.core.costs import Costs
from paceline.core.distribution import SamplingParams
from paceline.core.protocols import Engine, Piece, Request
from paceline.engines.local import LocalEngine
from paceline.engines.settings import EngineSettings
from paceline.errors import EngineClosed, OptionError, PromptError, RoundFailed
from paceline.options import DecoderOptions

PROMPTS = [f"Count to {number} and back again, and again, and again." for number in range(3, 15)]
METHODS = ("none", "ngram", "suffix", "lookahead", None)


def with_engine(folder: Path, work: Callable[[LocalEngine], Coroutine[Any, Any, None]], **settings: int) -> None:
    """Run `work` with an engine over the tiny model, and close it."""

    async def around() -> None:
        made = engine(DecoderOptions(str(folder), method="ngram", profile=Costs()), EngineSettings(**settings))
        try:
            await work(made)
        finally:
            await made.close()

    asyncio.run(around())


async def whole(pieces: AsyncIterator[Piece]) -> list[Piece]:
    return [piece async for piece in pieces]


def ids(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def request(made: LocalEngine, prompt: str, **changes: Any) -> Request:
    sampling = changes.pop("sampling", SamplingParams())
    return Request(made.codec.encode(prompt), sampling, changes.pop("max_new_tokens", 24), **changes)


def test_it_is_an_engine(tiny_folder: Path) -> None:
    async def work(made: LocalEngine) -> None:
        assert isinstance(made, Engine)

    with_engine(tiny_folder, work)


def test_many_methods_and_ks_in_one_batch_write_what_the_decoder_writes(tiny_folder: Path) -> None:
    decoder = SpeculativeDecoder(str(tiny_folder))
    expected = [result.token_ids for result in decoder.generate(PROMPTS, max_new_tokens=24)]

    async def work(made: LocalEngine) -> None:
        asked = [
            request(made, prompt, method=METHODS[place % 5], draft_tokens=place % 6 or None)
            for place, prompt in enumerate(PROMPTS)
        ]
        found = await asyncio.gather(*(whole(made.generate(one)) for one in asked))
        assert [ids(pieces) for pieces in found] == expected
        for pieces in found:
            assert pieces[-1].finish_reason == "length" and pieces[-1].tally is not None
            assert pieces[-1].tally.new_tokens == 24
            assert sum(len(piece.token_ids) for piece in pieces if piece.guessed) == pieces[-1].tally.accepted

    with_engine(tiny_folder, work, cache_tokens=640, largest_batch=8)


def test_the_same_seed_gives_the_same_text_whatever_the_batch_the_method_and_k(tiny_folder: Path) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=11)

    async def work(made: LocalEngine) -> None:
        first = ids(await whole(made.generate(request(made, PROMPTS[0], sampling=sampling))))
        crowd = [request(made, prompt, sampling=SamplingParams(temperature=1.0)) for prompt in PROMPTS[1:5]]
        same = [request(made, PROMPTS[0], sampling=sampling, method=word, draft_tokens=5) for word in METHODS]
        found = await asyncio.gather(*(whole(made.generate(one)) for one in [*crowd, *same]))
        assert [ids(pieces) for pieces in found[4:]] == [first] * 5
        other = SamplingParams(temperature=1.0, top_p=0.95, seed=12)
        assert ids(await whole(made.generate(request(made, PROMPTS[0], sampling=other)))) != first

    with_engine(tiny_folder, work)


def test_a_prediction_that_comes_true_is_accepted(tiny_folder: Path) -> None:
    async def work(made: LocalEngine) -> None:
        plain = ids(await whole(made.generate(request(made, PROMPTS[0], method="none"))))
        asked = request(made, PROMPTS[0], prediction=plain, draft_tokens=6)
        pieces = await whole(made.generate(asked))
        assert ids(pieces) == plain
        assert pieces[-1].tally is not None and pieces[-1].tally.accepted >= 18
        assert made.load().by_method["prediction"].accepted >= 18

    with_engine(tiny_folder, work)


def slow_down(made: LocalEngine, seconds: float = 0.005) -> None:
    """Every pass takes at least so long: a long text is then still being written when the test comes to it."""
    target: Any = made._scheduler._with.target
    whole_pass = target.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return whole_pass(*args, **kwargs)

    target.forward = slow


def test_leaving_early_gives_everything_back(tiny_folder: Path) -> None:
    async def work(made: LocalEngine) -> None:
        slow_down(made)
        total = made.load().pages_free
        async with aclosing(made.generate(request(made, PROMPTS[0], max_new_tokens=400))) as pieces:  # type: ignore[type-var]
            async for _ in pieces:
                break
        for _ in range(2000):
            load = made.load()
            if not load.running and not load.waiting and not load.pages_used:
                break
            await asyncio.sleep(0.01)
        assert not load.running and not load.pages_used
        assert load.pages_free + load.pages_cached == total
        assert made.tally().new_tokens < 100, "the text must have been dropped, not written to its end"

    with_engine(tiny_folder, work)


def test_stop_strings_and_logprobs(tiny_folder: Path) -> None:
    async def work(made: LocalEngine) -> None:
        pieces = await whole(made.generate(request(made, PROMPTS[1], logprobs=2, draft_tokens=4)))
        text = "".join(piece.text for piece in pieces)
        assert all(piece.logprobs is not None and len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
        stop = text[5:7]
        cut = await whole(made.generate(request(made, PROMPTS[1], stop=(stop,), draft_tokens=4)))
        assert "".join(piece.text for piece in cut) == text[: text.index(stop)]
        assert cut[-1].finish_reason == "stop"

    with_engine(tiny_folder, work)


def test_what_cannot_be_done_is_said_at_once(tiny_folder: Path) -> None:
    async def work(made: LocalEngine) -> None:
        with pytest.raises(PromptError, match="cache holds"):
            made.generate(request(made, "x" * 300))
        with pytest.raises(PromptError, match="empty"):
            made.generate(Request([], SamplingParams(), 4))
        with pytest.raises(OptionError, match="method must be one of"):
            made.generate(request(made, "x", method="magic"))
        with pytest.raises(OptionError, match="max_new_tokens"):
            made.generate(request(made, "x", max_new_tokens=0))

    with_engine(tiny_folder, work, cache_tokens=256)


def test_a_broken_pass_is_told_to_its_reader_and_the_engine_goes_on(tiny_folder: Path) -> None:
    async def work(made: LocalEngine) -> None:
        target: Any = made._scheduler._with.target
        whole_pass = target.forward

        def broken(*args: Any, **kwargs: Any) -> Any:
            target.forward = whole_pass
            raise RuntimeError("injected")

        target.forward = broken
        with pytest.raises(RoundFailed, match="injected"):
            await whole(made.generate(request(made, PROMPTS[0])))
        assert len(ids(await whole(made.generate(request(made, PROMPTS[0]))))) == 24

    with_engine(tiny_folder, work)


def test_closing_ends_texts_in_progress_and_refuses_new_ones(tiny_folder: Path) -> None:
    async def work(made: LocalEngine) -> None:
        slow_down(made)
        writing = asyncio.create_task(whole(made.generate(request(made, PROMPTS[0], max_new_tokens=450))))
        while not made.load().running:
            await asyncio.sleep(0.005)
        await made.close()
        assert (await writing)[-1].finish_reason == "abort"
        with pytest.raises(EngineClosed):
            made.generate(request(made, "x"))
        assert made.load().pages_used == 0

    with_engine(tiny_folder, work)
