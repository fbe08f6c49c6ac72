"""What every engine promises, over a tiny model or the default one. An engine is held to it by its name in the
registry; one whose packages are not installed is skipped, and counted."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import pytest
import torch

from paceline.core.protocols import Engine
from paceline.core.sampling import SamplingParams
from paceline.core.types import Request, StructuredOutput
from paceline.engines import registry
from paceline.errors import ContextLengthExceeded, EngineClosed, OptionError, PromptError
from paceline.runners.loading import eos_token_ids_of
from paceline.serve.config import ServerConfig
from tests.serve.running import serving_model
from tests.support.build import collect, ids_of, open_for_tests, text_request, with_engine
from tests.support.engines import ONE_THREAD, ascii_gguf, ascii_llama, gguf_llama
from tests.support.tiny import byte_tokenizer

PROMPT = "to be or not to be, to be or not to be"
NEAR_TIE = 0.02  # between log-probabilities, in float32
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False}
Work = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine is opened with in this suite.

    model      a name or directory
    reference  the same model in transformers, which says what is right
    options    of EngineConfig
    shared     all tests use one engine, because opening one takes long
    """

    model: Any
    reference: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    shared: bool = False


def tiny(request: pytest.FixtureRequest) -> Setup:
    return Setup(request.getfixturevalue("tiny_folder"), lambda: request.getfixturevalue("tiny_model"))


def vllm(request: pytest.FixtureRequest) -> Setup:
    """The default model: the heads of the tiny one are too small for vLLM's kernels."""
    options = {"max_model_len": 512, "engine_options": {"enforce_eager": True, "kv_cache_gib": 0.5}}
    folder = request.getfixturevalue("default_folder")
    return Setup(folder, lambda: request.getfixturevalue("default_model"), options, shared=True)


def llama_cpp(request: pytest.FixtureRequest) -> Setup:
    folder = request.getfixturevalue("tmp_path_factory").mktemp("gguf")
    options = {"engine_options": {**ONE_THREAD, "ngram_size": 1}}
    return Setup(str(ascii_gguf(folder)), gguf_llama, options)


def http(request: pytest.FixtureRequest) -> Setup:
    """Our own server, with the tokenizer of its model."""
    model = ascii_llama()
    running = serving_model(model, byte_tokenizer(), ServerConfig(("tiny",)), num_draft_tokens=3)
    server = request.getfixturevalue("exit_stack").enter_context(running)
    options = {"tokenizer": byte_tokenizer(), "engine_options": {"url": server.url}}
    return Setup("tiny", lambda: model, options)


SETUPS = {"vllm": vllm, "llama_cpp": llama_cpp, "http": http}  # of engines that cannot open the tiny model's directory


class Subject:
    """One engine under test."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.spec, self.setup = registry.spec(name), setup
        self._options = {"engine": name, "num_draft_tokens": 3, **setup.options}
        self._engine: Any = None

    def run(self, work: Work) -> None:
        """Run a coroutine with an engine: its own, or the one that all tests share."""
        if not self.setup.shared:
            with_engine(self.setup.model, work, **self._options)
            return
        self._engine = self._engine or open_for_tests(self.setup.model, **self._options)
        asyncio.run(work(self._engine))  # type: ignore[arg-type]

    def close(self) -> None:
        if self._engine is not None:
            asyncio.run(self._engine.close())


@pytest.fixture(scope="module")
def exit_stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module", params=registry.names())
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    spec = registry.spec(request.param)
    if not spec.installed:
        pytest.skip(f"the engine {spec.name} needs {', '.join(spec.packages)}: make test-engines")
    engine = Subject(spec.name, SETUPS.get(spec.name, tiny)(request))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(subject: Subject) -> Any:
    """The model in transformers."""
    return subject.setup.reference()


def test_it_is_an_engine_and_describes_itself(subject: Subject, reference: Any) -> None:
    async def work(engine: Any) -> None:
        assert isinstance(engine, Engine)
        assert engine.info.vocab_size == reference.config.vocab_size
        assert engine.info.eos_token_ids == eos_token_ids_of(reference)
        assert engine.info.hidden_size in (reference.config.hidden_size, 0)  # 0: the engine cannot know
        assert engine.methods[0] == "ngram"
        assert "none" in engine.methods or not subject.spec.per_request
        assert engine.tokenizer.decode(engine.tokenizer.encode("héllo")) == "héllo"

    subject.run(work)


def test_greedy_text_is_the_models_own(subject: Subject, reference: Any) -> None:
    async def work(engine: Any) -> None:
        request = text_request(engine, PROMPT)
        ids = torch.tensor([request.prompt])
        expected = reference.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
        outputs = await collect(engine.generate(request))
        assert ids_of(outputs) == expected
        assert "".join(output.text for output in outputs) == engine.tokenizer.decode(expected)

    subject.run(work)


def test_a_stream_ends_once_with_reason_and_stats(subject: Subject) -> None:
    async def work(engine: Any) -> None:
        outputs = await collect(engine.generate(text_request(engine, PROMPT, ignore_eos=True)))
        assert len(outputs) > 1
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
        stats = outputs[-1].stats
        assert stats is not None and stats.new_tokens == 24 and stats.seconds > 0
        assert sum(len(output.token_ids) for output in outputs if output.from_draft) == stats.accepted
        assert stats.steps + stats.accepted >= 24 and stats.accepted <= stats.drafted

    subject.run(work)


@pytest.mark.slow
def test_a_batch_gives_what_each_sequence_gives_alone(subject: Subject, reference: Any) -> None:
    async def work(engine: Any) -> None:
        requests = [text_request(engine, PROMPT[start:]) for start in range(6)]
        alone = [ids_of(await collect(engine.generate(request))) for request in requests]
        together = await asyncio.gather(*(collect(engine.generate(request)) for request in requests))
        for request, one, other in zip(requests, alone, map(ids_of, together)):
            assert one == other or _parts_at_a_near_tie(reference, list(request.prompt), one, other)

    subject.run(work)


def _parts_at_a_near_tie(reference: Any, prompt: list[int], one: list[int], other: list[int]) -> bool:
    """Whether the first tokens that differ are equally likely but for rounding: a batch adds products up otherwise."""
    place = next(index for index, pair in enumerate(zip(one, other)) if pair[0] != pair[1])
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *one[:place]]])).logits[0, -1]
    return abs(float(logits[one[place]] - logits[other[place]])) < NEAR_TIE


@pytest.mark.slow
def test_a_stop_string_ends_a_sequence_and_is_not_shown(subject: Subject) -> None:
    async def work(engine: Any) -> None:
        outputs = await collect(engine.generate(text_request(engine, PROMPT, ignore_eos=True)))
        text = "".join(output.text for output in outputs)
        stop = text[6:8]
        cut = await collect(engine.generate(text_request(engine, PROMPT, ignore_eos=True, stop=(stop,))))
        assert "".join(output.text for output in cut) == text[: text.index(stop)]
        assert cut[-1].finish_reason == "stop"
        stats = cut[-1].stats
        assert stats is not None and stats.new_tokens == len(ids_of(cut)) < 24

    subject.run(work)


@pytest.mark.slow
def test_a_seed_decides_a_sampled_sequence(subject: Subject) -> None:
    """Whatever the method, unless the engine says that its seeds are not coupled."""

    async def work(engine: Any) -> None:
        async def generated(seed: int, **settings: Any) -> list[int]:
            sampling = SamplingParams(1.0, top_p=0.95, seed=seed)
            return ids_of(await collect(engine.generate(text_request(engine, PROMPT, sampling=sampling, **settings))))

        first = await generated(3)
        assert await generated(3) == first
        assert await generated(4) != first
        if subject.spec.per_request and subject.spec.coupled_seeds:
            assert first == await generated(3, method="none") == await generated(3, num_draft_tokens=5)

    subject.run(work)


def test_what_a_request_may_not_choose_is_refused_by_name(subject: Subject) -> None:
    async def work(engine: Any) -> None:
        for settings in ({"method": "none"}, {"num_draft_tokens": 5}):
            request = text_request(engine, PROMPT, 2, **settings)
            if subject.spec.per_request:
                assert len(ids_of(await collect(engine.generate(request)))) == 2
            else:
                with pytest.raises(OptionError, match=next(iter(settings))):
                    engine.generate(request)

    subject.run(work)


def test_logprobs_come_with_every_token(subject: Subject) -> None:
    async def work(engine: Any) -> None:
        if not subject.spec.drafts_with_logprobs:
            with pytest.raises(OptionError, match="log"):
                engine.generate(text_request(engine, PROMPT, logprobs=2))
            return
        outputs = await collect(engine.generate(text_request(engine, PROMPT, logprobs=2)))
        logprobs = [logprob for output in outputs for logprob in output.logprobs or ()]
        assert [logprob.token for logprob in logprobs] == ids_of(outputs)
        assert all(len(logprob.top) == 2 and logprob.logprob == logprob.top[0][1] <= 0 for logprob in logprobs)
        plain = await collect(engine.generate(text_request(engine, PROMPT)))
        assert all(output.logprobs is None for output in plain)

    subject.run(work)


def test_a_json_schema_is_kept_to(subject: Subject) -> None:
    async def work(engine: Any) -> None:
        schema = StructuredOutput("json_schema", json.dumps(SCHEMA))
        outputs = await collect(engine.generate(text_request(engine, PROMPT, 60, structured_output=schema)))
        jsonschema.validate(json.loads("".join(output.text for output in outputs)), SCHEMA)

    subject.run(work)


def test_closing_the_iterator_aborts_the_request(subject: Subject) -> None:
    async def work(engine: Any) -> None:
        before = engine.stats().spec.new_tokens
        request = text_request(engine, PROMPT, 450, ignore_eos=True)
        async with aclosing(engine.generate(request)) as outputs:
            async for _ in outputs:
                break
        deadline = time.monotonic() + 60
        while engine.stats().running and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        stats = engine.stats()
        assert not stats.running and not stats.blocks_used and stats.spec.new_tokens - before < 450

    subject.run(work)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"prompt": []}, PromptError),
        ({"prompt": [1 << 20]}, PromptError),
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
def test_a_wrong_request_is_refused_at_once(subject: Subject, settings: dict[str, Any], error: type[Exception]) -> None:
    async def work(engine: Any) -> None:
        before = engine.stats().spec.new_tokens
        with pytest.raises(error):
            engine.generate(
                Request(**{"prompt": [1, 2], "sampling": SamplingParams(), "max_new_tokens": 4, **settings})
            )
        assert engine.stats().spec.new_tokens == before

    subject.run(work)


@pytest.mark.slow
def test_stats_count_what_was_done(subject: Subject) -> None:
    async def work(engine: Any) -> None:
        before = engine.stats()
        for _ in range(2):
            await collect(engine.generate(text_request(engine, PROMPT, ignore_eos=True, num_draft_tokens=3)))
        stats = engine.stats()
        assert stats.spec.new_tokens - before.spec.new_tokens == 48
        assert (stats.waiting, stats.running, stats.failures) == (0, 0, 0)
        assert stats.prompt_tokens - before.prompt_tokens == 2 * len(engine.tokenizer.encode(PROMPT))
        earlier = before.by_method["ngram"].new_tokens if "ngram" in before.by_method else 0
        assert stats.by_method["ngram"].new_tokens - earlier == 48
        lengths = sum(stats.draft_lengths.values()) - sum(before.draft_lengths.values())
        assert lengths == stats.spec.steps - before.spec.steps > 0

    subject.run(work)


def test_a_closed_engine_refuses_requests_and_closing_twice_is_harmless(subject: Subject) -> None:
    """The last test of this file: it closes the engine that the others share."""

    async def work(engine: Any) -> None:
        running = asyncio.create_task(collect(engine.generate(text_request(engine, PROMPT, 450, ignore_eos=True))))
        while not engine.stats().running and not running.done():
            await asyncio.sleep(0.001)
        await engine.close()
        assert (await running)[-1].finish_reason in ("abort", "length")
        with pytest.raises(EngineClosed):
            engine.generate(text_request(engine, PROMPT))
        await engine.close()

    subject.run(work)
