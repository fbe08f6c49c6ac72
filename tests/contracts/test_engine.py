"""What every engine promises, over a tiny model. A new engine is held to it by its name in the registry."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from paceline.core.protocols import Engine
from paceline.core.sampling import SamplingParams
from paceline.core.types import Request, StructuredOutput
from paceline.engines import registry
from paceline.errors import ContextLengthExceeded, EngineClosed, OptionError, PromptError
from tests.support.build import collect, ids_of, text_request, with_engine

PROMPT = "to be or not to be, to be or not to be"
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False}
Run = Callable[[Callable[[Any], Awaitable[None]]], None]


@pytest.fixture(params=registry.names())
def run(request: pytest.FixtureRequest, tiny_folder: Path) -> Run:
    """Runs a coroutine with an engine, and closes it."""
    return lambda work: with_engine(tiny_folder, work, engine=request.param)


def test_it_is_an_engine_and_describes_itself(run: Run) -> None:
    async def work(engine: Any) -> None:
        assert isinstance(engine, Engine)
        assert engine.info.vocab_size == 259 and engine.info.eos_token_ids == {257}
        assert engine.methods[0] == "ngram" and "none" in engine.methods
        assert engine.tokenizer.decode(engine.tokenizer.encode("héllo")) == "héllo"

    run(work)


def test_greedy_text_is_the_models_own(run: Run, tiny_model: Any) -> None:
    async def work(engine: Any) -> None:
        request = text_request(engine, PROMPT)
        ids = torch.tensor([request.prompt])
        expected = tiny_model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
        outputs = await collect(engine.generate(request))
        assert ids_of(outputs) == expected
        assert "".join(output.text for output in outputs) == engine.tokenizer.decode(expected)

    run(work)


def test_a_stream_ends_once_with_reason_and_stats(run: Run) -> None:
    async def work(engine: Any) -> None:
        outputs = await collect(engine.generate(text_request(engine, PROMPT, ignore_eos=True)))
        assert len(outputs) > 1
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
        stats = outputs[-1].stats
        assert stats is not None and stats.new_tokens == 24 and stats.seconds > 0
        assert sum(len(output.token_ids) for output in outputs if output.from_draft) == stats.accepted

    run(work)


def test_a_batch_gives_what_each_sequence_gives_alone(run: Run) -> None:
    async def work(engine: Any) -> None:
        prompts = [PROMPT[start:] for start in range(6)]
        alone = [ids_of(await collect(engine.generate(text_request(engine, prompt)))) for prompt in prompts]
        requests = [text_request(engine, prompt) for prompt in prompts]
        together = await asyncio.gather(*(collect(engine.generate(request)) for request in requests))
        assert [ids_of(outputs) for outputs in together] == alone

    run(work)


def test_a_stop_string_ends_a_sequence_and_is_not_shown(run: Run) -> None:
    async def work(engine: Any) -> None:
        outputs = await collect(engine.generate(text_request(engine, PROMPT, ignore_eos=True)))
        text = "".join(output.text for output in outputs)
        stop = text[6:8]
        cut = await collect(engine.generate(text_request(engine, PROMPT, ignore_eos=True, stop=(stop,))))
        assert "".join(output.text for output in cut) == text[: text.index(stop)]
        assert cut[-1].finish_reason == "stop"

    run(work)


def test_a_seed_decides_a_sampled_sequence_whatever_the_method(run: Run) -> None:
    async def work(engine: Any) -> None:
        async def generated(seed: int, **settings: Any) -> list[int]:
            sampling = SamplingParams(1.0, top_p=0.95, seed=seed)
            return ids_of(await collect(engine.generate(text_request(engine, PROMPT, sampling=sampling, **settings))))

        first = await generated(3)
        assert await generated(3) == first == await generated(3, method="none")
        assert await generated(3, num_draft_tokens=5) == first
        assert await generated(4) != first

    run(work)


def test_logprobs_come_with_every_token(run: Run) -> None:
    async def work(engine: Any) -> None:
        outputs = await collect(engine.generate(text_request(engine, PROMPT, logprobs=2)))
        logprobs = [logprob for output in outputs for logprob in output.logprobs or ()]
        assert [logprob.token for logprob in logprobs] == ids_of(outputs)
        assert all(len(logprob.top) == 2 and logprob.logprob == logprob.top[0][1] <= 0 for logprob in logprobs)
        plain = await collect(engine.generate(text_request(engine, PROMPT)))
        assert all(output.logprobs is None for output in plain)

    run(work)


def test_a_json_schema_is_kept_to(run: Run) -> None:
    async def work(engine: Any) -> None:
        schema = StructuredOutput("json_schema", json.dumps(SCHEMA))
        outputs = await collect(engine.generate(text_request(engine, PROMPT, 60, structured_output=schema)))
        jsonschema.validate(json.loads("".join(output.text for output in outputs)), SCHEMA)

    run(work)


def test_closing_the_iterator_aborts_the_request(run: Run) -> None:
    async def work(engine: Any) -> None:
        request = text_request(engine, PROMPT, 450, ignore_eos=True, method="none")
        async with aclosing(engine.generate(request)) as outputs:
            async for _ in outputs:
                break
        deadline = time.monotonic() + 20
        while engine.stats().running and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        stats = engine.stats()
        assert not stats.running and not stats.blocks_used and stats.spec.new_tokens < 450

    run(work)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"prompt": []}, PromptError),
        ({"prompt": [999]}, PromptError),
        ({"prompt": [1] * 600}, ContextLengthExceeded),
        ({"max_new_tokens": 0}, OptionError),
        ({"method": "magic"}, OptionError),
        ({"stop": 5}, OptionError),
        ({"logprobs": -1}, OptionError),
        ({"num_draft_tokens": 500}, OptionError),
        ({"structured_output": StructuredOutput("json_schema", "{")}, OptionError),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_request_is_refused_at_once(run: Run, settings: dict[str, Any], error: type[Exception]) -> None:
    async def work(engine: Any) -> None:
        with pytest.raises(error):
            engine.generate(
                Request(**{"prompt": [1, 2], "sampling": SamplingParams(), "max_new_tokens": 4, **settings})
            )
        assert engine.stats().spec.new_tokens == 0

    run(work)


def test_stats_count_what_was_done(run: Run) -> None:
    async def work(engine: Any) -> None:
        assert engine.stats().spec.new_tokens == 0
        for _ in range(2):
            await collect(engine.generate(text_request(engine, PROMPT, ignore_eos=True, num_draft_tokens=3)))
        stats = engine.stats()
        assert (stats.spec.new_tokens, stats.waiting, stats.running, stats.failures) == (48, 0, 0, 0)
        assert stats.prompt_tokens == 2 * len(engine.tokenizer.encode(PROMPT))
        assert stats.by_method["ngram"].new_tokens == 48
        assert sum(stats.draft_lengths.values()) == stats.spec.steps

    run(work)


def test_a_closed_engine_refuses_requests_and_closing_twice_is_harmless(run: Run) -> None:
    async def work(engine: Any) -> None:
        running = asyncio.create_task(collect(engine.generate(text_request(engine, PROMPT, 450, ignore_eos=True))))
        while not engine.stats().running and not running.done():
            await asyncio.sleep(0.001)
        await engine.close()
        assert (await running)[-1].finish_reason in ("abort", "length")
        with pytest.raises(EngineClosed):
            engine.generate(text_request(engine, PROMPT))
        await engine.close()

    run(work)
