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
from paceline.build import engine
from paceline.config import DecoderOptions
from paceline.core.cost_model import CostModel
from paceline.core.protocols import Engine
from paceline.core.sampling import SamplingParams
from paceline.core.types import Request, RequestOutput
from paceline.engines.local.async_engine import LocalEngine
from paceline.engines.local.settings import EngineSettings
from paceline.errors import EngineClosed, OptionError, PromptError, StepFailed

PROMPTS = [f"Count to {seq_id} and back again, and again, and again." for seq_id in range(3, 15)]
METHODS = ("none", "ngram", "suffix", "lookahead", None)


def with_engine(folder: Path, work: Callable[[LocalEngine], Coroutine[Any, Any, None]], **settings: int) -> None:
    """Run `work` with an engine over the tiny model, and close it."""

    async def around() -> None:
        made = engine(DecoderOptions(str(folder), method="ngram", profile=CostModel()), EngineSettings(**settings))
        try:
            await work(made)
        finally:
            await made.close()

    asyncio.run(around())


async def whole(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def ids(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def request(made: LocalEngine, prompt: str, **changes: Any) -> Request:
    sampling = changes.pop("sampling", SamplingParams())
    return Request(made.tokenizer.encode(prompt), sampling, changes.pop("max_new_tokens", 24), **changes)


def test_it_is_an_engine(tiny_folder: Path) -> None:
    async def work(made: LocalEngine) -> None:
        assert isinstance(made, Engine)

    with_engine(tiny_folder, work)


def test_many_methods_and_ks_in_one_batch_write_what_the_decoder_writes(tiny_folder: Path) -> None:
    decoder = SpeculativeDecoder(str(tiny_folder))
    expected = [result.token_ids for result in decoder.generate(PROMPTS, max_new_tokens=24)]

    async def work(made: LocalEngine) -> None:
        asked = [
            request(made, prompt, method=METHODS[place % 5], num_draft_tokens=place % 6 or None)
            for place, prompt in enumerate(PROMPTS)
        ]
        found = await asyncio.gather(*(whole(made.generate(one)) for one in asked))
        assert [ids(outputs) for outputs in found] == expected
        for outputs in found:
            assert outputs[-1].finish_reason == "length" and outputs[-1].stats is not None
            assert outputs[-1].stats.new_tokens == 24
            assert sum(len(output.token_ids) for output in outputs if output.from_draft) == outputs[-1].stats.accepted

    with_engine(tiny_folder, work, kv_cache_tokens=640, max_num_seqs=8)


def test_the_same_seed_gives_the_same_text_whatever_the_batch_the_method_and_k(tiny_folder: Path) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=11)

    async def work(made: LocalEngine) -> None:
        first = ids(await whole(made.generate(request(made, PROMPTS[0], sampling=sampling))))
        crowd = [request(made, prompt, sampling=SamplingParams(temperature=1.0)) for prompt in PROMPTS[1:5]]
        same = [request(made, PROMPTS[0], sampling=sampling, method=word, num_draft_tokens=5) for word in METHODS]
        found = await asyncio.gather(*(whole(made.generate(one)) for one in [*crowd, *same]))
        assert [ids(outputs) for outputs in found[4:]] == [first] * 5
        other = SamplingParams(temperature=1.0, top_p=0.95, seed=12)
        assert ids(await whole(made.generate(request(made, PROMPTS[0], sampling=other)))) != first

    with_engine(tiny_folder, work)


def test_a_prediction_that_comes_true_is_accepted(tiny_folder: Path) -> None:
    async def work(made: LocalEngine) -> None:
        plain = ids(await whole(made.generate(request(made, PROMPTS[0], method="none"))))
        asked = request(made, PROMPTS[0], prediction=plain, num_draft_tokens=6)
        outputs = await whole(made.generate(asked))
        assert ids(outputs) == plain
        assert outputs[-1].stats is not None and outputs[-1].stats.accepted >= 18
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
        total = made.load().blocks_free
        async with aclosing(made.generate(request(made, PROMPTS[0], max_new_tokens=400))) as outputs:  # type: ignore[type-var]
            async for _ in outputs:
                break
        for _ in range(2000):
            load = made.load()
            if not load.running and not load.waiting and not load.blocks_used:
                break
            await asyncio.sleep(0.01)
        assert not load.running and not load.blocks_used
        assert load.blocks_free + load.blocks_cached == total
        assert made.stats().new_tokens < 100, "the text must have been dropped, not written to its end"

    with_engine(tiny_folder, work)


def test_stop_strings_and_logprobs(tiny_folder: Path) -> None:
    async def work(made: LocalEngine) -> None:
        outputs = await whole(made.generate(request(made, PROMPTS[1], logprobs=2, num_draft_tokens=4)))
        seq = "".join(output.text for output in outputs)
        assert all(output.logprobs is not None and len(output.logprobs) == len(output.token_ids) for output in outputs)
        stop = seq[5:7]
        cut = await whole(made.generate(request(made, PROMPTS[1], stop=(stop,), num_draft_tokens=4)))
        assert "".join(output.text for output in cut) == seq[: seq.index(stop)]
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

    with_engine(tiny_folder, work, kv_cache_tokens=256)


def test_a_broken_pass_is_told_to_its_reader_and_the_engine_goes_on(tiny_folder: Path) -> None:
    async def work(made: LocalEngine) -> None:
        target: Any = made._scheduler._with.target
        whole_pass = target.forward

        def broken(*args: Any, **kwargs: Any) -> Any:
            target.forward = whole_pass
            raise RuntimeError("injected")

        target.forward = broken
        with pytest.raises(StepFailed, match="injected"):
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
        assert made.load().blocks_used == 0

    with_engine(tiny_folder, work)
