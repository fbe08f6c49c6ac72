"""The engine at its edge: asynchronous readers, one worker, every request with its own settings."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from paceline import SpeculativeDecoder
from paceline.core.protocols import Engine
from paceline.core.sampling import SamplingParams
from paceline.core.types import Request, RequestOutput, StructuredOutput
from paceline.engines.local.async_engine import AsyncEngine, _Outbox
from paceline.engines.local.structured_output import GrammarCompiler
from paceline.errors import ContextLengthExceeded, EngineClosed, EngineFailed, OptionError, PromptError, StepFailed
from tests.support.build import collect, ids_of, text_request, toy_engine, with_engine
from tests.support.toy import ToyRunner

PROMPTS = [f"Count to {number} and back again, and again, and again." for number in range(3, 15)]
METHODS = ("none", "ngram", "suffix", "lookahead", None)


def test_it_is_an_engine(tiny_folder: Path) -> None:
    async def work(engine: AsyncEngine) -> None:
        assert isinstance(engine, Engine)

    with_engine(tiny_folder, work)


@pytest.mark.slow
def test_many_methods_and_ks_in_one_batch_generate_what_the_decoder_generates(tiny_folder: Path) -> None:
    with SpeculativeDecoder(tiny_folder) as decoder:
        expected = [result.token_ids for result in decoder.generate(PROMPTS, max_new_tokens=24)]

    async def work(engine: AsyncEngine) -> None:
        requests = [
            text_request(engine, prompt, method=METHODS[place % 5], num_draft_tokens=place % 6 or None)
            for place, prompt in enumerate(PROMPTS)
        ]
        results = await asyncio.gather(*(collect(engine.generate(request)) for request in requests))
        assert [ids_of(outputs) for outputs in results] == expected
        for outputs in results:
            assert outputs[-1].finish_reason == "length" and outputs[-1].stats is not None
            assert outputs[-1].stats.new_tokens == 24
            assert sum(len(output.token_ids) for output in outputs if output.from_draft) == outputs[-1].stats.accepted

    with_engine(tiny_folder, work, kv_cache_tokens=640, max_num_seqs=8)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_tokens_whatever_the_batch_the_method_and_k(tiny_folder: Path) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=11)

    async def work(engine: AsyncEngine) -> None:
        first = ids_of(await collect(engine.generate(text_request(engine, PROMPTS[0], sampling=sampling))))
        crowd = [text_request(engine, prompt, sampling=SamplingParams(temperature=1.0)) for prompt in PROMPTS[1:5]]
        same = [
            text_request(engine, PROMPTS[0], sampling=sampling, method=method, num_draft_tokens=5) for method in METHODS
        ]
        results = await asyncio.gather(*(collect(engine.generate(request)) for request in [*crowd, *same]))
        assert [ids_of(outputs) for outputs in results[4:]] == [first] * 5
        other = SamplingParams(temperature=1.0, top_p=0.95, seed=12)
        assert ids_of(await collect(engine.generate(text_request(engine, PROMPTS[0], sampling=other)))) != first

    with_engine(tiny_folder, work)


@pytest.mark.slow
def test_a_prediction_that_comes_true_is_accepted(tiny_folder: Path) -> None:
    async def work(engine: AsyncEngine) -> None:
        plain = ids_of(await collect(engine.generate(text_request(engine, PROMPTS[0], method="none"))))
        request = text_request(engine, PROMPTS[0], prediction=plain, num_draft_tokens=6)
        outputs = await collect(engine.generate(request))
        assert ids_of(outputs) == plain
        assert outputs[-1].stats is not None and outputs[-1].stats.accepted >= 18
        assert engine.stats().by_method["prediction"].accepted >= 18

    with_engine(tiny_folder, work)


def slow_down(engine: AsyncEngine, seconds: float = 0.005) -> None:
    """Every pass takes at least this long: a long sequence is then still running when the test looks at it."""
    target: Any = engine.engine.parts.target
    forward = target.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return forward(*args, **kwargs)

    target.forward = slow


def test_leaving_early_gives_everything_back(tiny_folder: Path) -> None:
    async def work(engine: AsyncEngine) -> None:
        slow_down(engine)
        total = engine.stats().blocks_free
        async with aclosing(engine.generate(text_request(engine, PROMPTS[0], max_new_tokens=400))) as outputs:  # type: ignore[type-var]
            async for _ in outputs:
                break
        for _ in range(2000):
            stats = engine.stats()
            if not stats.running and not stats.waiting and not stats.blocks_used:
                break
            await asyncio.sleep(0.01)
        assert not stats.running and not stats.blocks_used
        assert stats.blocks_free + stats.blocks_cached == total
        assert engine.stats().spec.new_tokens < 100, "the sequence must have been aborted, not generated to its end"

    with_engine(tiny_folder, work)


@pytest.mark.slow
def test_stop_strings_and_logprobs(tiny_folder: Path) -> None:
    async def work(engine: AsyncEngine) -> None:
        outputs = await collect(engine.generate(text_request(engine, PROMPTS[1], logprobs=2, num_draft_tokens=4)))
        text = "".join(output.text for output in outputs)
        assert all(output.logprobs is not None and len(output.logprobs) == len(output.token_ids) for output in outputs)
        stop = text[5:7]
        cut = await collect(engine.generate(text_request(engine, PROMPTS[1], stop=(stop,), num_draft_tokens=4)))
        assert "".join(output.text for output in cut) == text[: text.index(stop)]
        assert cut[-1].finish_reason == "stop"

    with_engine(tiny_folder, work)


def test_a_wrong_request_is_refused_at_once(tiny_folder: Path) -> None:
    async def work(engine: AsyncEngine) -> None:
        with pytest.raises(ContextLengthExceeded, match="cache holds"):
            engine.generate(text_request(engine, "x" * 300))
        with pytest.raises(PromptError, match="empty"):
            engine.generate(Request([], SamplingParams(), 4))
        with pytest.raises(OptionError, match="method must be one of"):
            engine.generate(text_request(engine, "x", method="magic"))
        with pytest.raises(OptionError, match="max_new_tokens"):
            engine.generate(text_request(engine, "x", max_new_tokens=0))

    with_engine(tiny_folder, work, kv_cache_tokens=256)


def test_a_pass_that_raises_fails_its_reader_and_the_engine_goes_on(tiny_folder: Path) -> None:
    async def work(engine: AsyncEngine) -> None:
        target: Any = engine.engine.parts.target
        forward = target.forward

        def broken(*args: Any, **kwargs: Any) -> Any:
            target.forward = forward
            raise RuntimeError("injected")

        target.forward = broken
        with pytest.raises(StepFailed, match="injected"):
            await collect(engine.generate(text_request(engine, PROMPTS[0])))
        assert len(ids_of(await collect(engine.generate(text_request(engine, PROMPTS[0]))))) == 24

    with_engine(tiny_folder, work)


def test_closing_ends_running_sequences_and_refuses_new_ones(tiny_folder: Path) -> None:
    async def work(engine: AsyncEngine) -> None:
        slow_down(engine)
        running = asyncio.create_task(collect(engine.generate(text_request(engine, PROMPTS[0], max_new_tokens=450))))
        while not engine.stats().running:
            await asyncio.sleep(0.005)
        await engine.close()
        assert (await running)[-1].finish_reason == "abort"
        with pytest.raises(EngineClosed):
            engine.generate(text_request(engine, "x"))
        assert engine.stats().blocks_used == 0

    with_engine(tiny_folder, work)


# --- the worker -------------------------------------------------------------------------------------------------------


def toy_request(**settings: Any) -> Request:
    return Request([0, 1, 2, 0, 1], SamplingParams(), 30, ignore_eos=True, **settings)


def test_a_request_opened_before_the_close_and_read_after_it_does_not_wait_for_ever() -> None:
    async def work() -> None:
        engine = AsyncEngine(toy_engine())
        outputs = engine.generate(toy_request())
        await engine.close()
        with pytest.raises(EngineClosed):
            await asyncio.wait_for(collect(outputs), 10)
        await engine.close()  # twice is harmless

    asyncio.run(work())


def test_a_worker_that_dies_fails_its_readers_and_the_health_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours in the scheduler, say: no reader waits for ever, and new requests are refused."""

    async def work() -> None:
        local = toy_engine()
        engine = AsyncEngine(local)
        engine.check_health()

        def raise_a_bug() -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(local._scheduler, "schedule", raise_a_bug)
        readers = [collect(engine.generate(toy_request())) for _ in range(3)]
        for outcome in await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), 60):
            assert isinstance(outcome, EngineFailed) and "ZeroDivisionError: a bug" in str(outcome)
        for refused in (engine.check_health, lambda: engine.generate(toy_request())):
            with pytest.raises(EngineFailed, match="worker has died"):
                refused()
        await engine.close()

    asyncio.run(work())


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set while a grammar is compiled, which ends when a test clears it."""
    under_way = threading.Event()
    compile_matcher = GrammarCompiler._matcher

    def slow(compiler: GrammarCompiler, output: StructuredOutput) -> Any:
        under_way.set()
        deadline = time.monotonic() + 10
        while under_way.is_set() and time.monotonic() < deadline:
            time.sleep(0.001)
        return compile_matcher(compiler, output)

    monkeypatch.setattr(GrammarCompiler, "_matcher", slow)
    return under_way


def constrained(engine: AsyncEngine, pattern: str) -> Request:
    return text_request(engine, "x", structured_output=StructuredOutput("regex", pattern))


@pytest.mark.slow
def test_a_grammar_is_compiled_beside_the_event_loop(tiny_folder: Path, compiling: threading.Event) -> None:
    async def work(engine: AsyncEngine) -> None:
        request = constrained(engine, "ab")
        preparing = asyncio.create_task(engine.prepare(request))
        while not compiling.is_set():
            await asyncio.sleep(0.001)
        assert ids_of(await collect(engine.generate(text_request(engine, "x", max_new_tokens=2)))), "others go on"
        compiling.clear()
        await preparing
        assert "".join(output.text for output in await collect(engine.generate(request))) == "ab"
        await engine.prepare(request)
        assert not compiling.is_set(), "it has been compiled"

    with_engine(tiny_folder, work)


@pytest.mark.slow
def test_what_waits_to_be_compiled_is_left_out_when_its_reader_or_the_engine_is_gone(
    tiny_folder: Path, compiling: threading.Event
) -> None:
    async def work(engine: AsyncEngine) -> None:
        requests = [constrained(engine, pattern) for pattern in ("ab", "cd", "ef")]
        first, second, third = (asyncio.create_task(engine.prepare(request)) for request in requests)
        while not compiling.is_set():
            await asyncio.sleep(0.001)
        second.cancel()
        await engine.close()
        compiling.clear()
        await asyncio.gather(first, third)
        assert [engine.engine.compilation(request) is None for request in requests] == [True, False, False]
        await engine.prepare(requests[2])
        with pytest.raises(EngineClosed):
            engine.generate(requests[2])

    with_engine(tiny_folder, work)


@pytest.mark.slow
def test_an_embedding_does_not_wait_for_a_dead_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        local = toy_engine()
        engine = AsyncEngine(local)
        assert len(await engine.embed([1, 2, 3], "mean")) == local.info.hidden_size

        def end_the_thread(token_ids: list[int], pooling: str) -> list[float]:
            raise SystemExit

        monkeypatch.setattr(local, "embed", end_the_thread)
        with pytest.raises(EngineFailed, match="worker has died"):
            await asyncio.wait_for(engine.embed([1, 2, 3], "mean"), 60)
        await engine.close()

    asyncio.run(work())


def test_text_is_made_from_tokens_on_the_readers_side() -> None:
    async def work() -> None:
        engine = AsyncEngine(toy_engine(ToyRunner(decode_steps=4)))
        outputs = await collect(engine.generate(toy_request()))
        assert "".join(output.text for output in outputs) == engine.tokenizer.decode(ids_of(outputs))
        await engine.close()

    asyncio.run(work())


def test_outputs_of_a_whole_sequence_come_at_its_end() -> None:
    """The reader sleeps until the sequence has ended, and the worker is left alone."""

    async def work() -> None:
        outbox = _Outbox(asyncio.get_running_loop(), whole=True)
        outbox.deliver(RequestOutput("", (1,)))
        taking = asyncio.ensure_future(outbox.take())
        await asyncio.sleep(0.01)
        assert not taking.done()
        outbox.deliver(RequestOutput("", (2,), finish_reason="length"))
        assert [output.token_ids for output in await taking] == [(1,), (2,)]

    asyncio.run(work())


@pytest.mark.slow
def test_a_whole_sequence_has_the_tokens_and_the_text_of_a_streamed_one(tiny_folder: Path) -> None:
    with SpeculativeDecoder(tiny_folder, method="ngram") as decoder:
        for settings in ({}, {"stop": ("a",)}, {"temperature": 1.0, "seed": 3}):
            whole = decoder.generate(PROMPTS[0], max_new_tokens=24, **settings)
            parts = list(decoder.stream(PROMPTS[0], max_new_tokens=24, **settings))
            assert whole.token_ids == ids_of(parts)
            assert whole.text == "".join(part.text for part in parts)


def test_an_error_is_raised_after_the_outputs_before_it() -> None:
    async def work() -> None:
        outbox = _Outbox(asyncio.get_running_loop(), whole=False)
        outbox.deliver(RequestOutput("", (1,)))
        outbox.deliver(EngineFailed("no more"))
        assert [output.token_ids for output in await outbox.take()] == [(1,)]
        with pytest.raises(EngineFailed, match="no more"):
            await outbox.take()

    asyncio.run(work())


class Appended(deque[Any]):
    """A deque that another thread appends to whenever somebody goes over it."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("deque mutated during iteration")


def test_a_reader_looks_at_outputs_while_the_worker_appends_more() -> None:
    async def read() -> list[RequestOutput]:
        outbox = _Outbox(asyncio.get_running_loop(), whole=False)
        outbox._outputs = Appended()
        outbox.deliver(RequestOutput("", (1,)))
        return await outbox.take()

    assert [output.token_ids for output in asyncio.run(read())] == [(1,)]
