"""The engine http against running servers over real sockets: paceline's own, and llama.cpp's."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.build import open_engine
from paceline.cli import main
from paceline.config import EngineConfig
from paceline.core.sampling import SamplingParams
from paceline.core.types import Request, StructuredOutput
from paceline.errors import ContextLengthExceeded, EngineClosed, EngineFailed, OptionError, PromptError
from paceline.serve.config import ServerConfig
from tests.serve.running import RunningServer, serving_model, slowed
from tests.support.build import collect, ids_of, text_request
from tests.support.engines import ascii_gguf, ascii_llama
from tests.support.served import serving_flags
from tests.support.tiny import byte_tokenizer

pytestmark = pytest.mark.slow
PROMPT = "to be or not to be, to be or not to be"
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving_model(ascii_llama(), byte_tokenizer(), ServerConfig(("tiny",)), num_draft_tokens=3) as running:
        yield running


@pytest.fixture(scope="module")
def decoder(server: RunningServer) -> Iterator[SpeculativeDecoder]:
    """With the tokenizer of the served model."""
    with opened(server.url, tokenizer=byte_tokenizer()) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def text_decoder(server: RunningServer) -> Iterator[SpeculativeDecoder]:
    """Without a tokenizer: text in, text out."""
    with opened(server.url) as decoder:
        yield decoder


def opened(url: str, *, tokenizer: Any = None, **options: Any) -> SpeculativeDecoder:
    own = {"url": url, **options.pop("engine_options", {})}
    return SpeculativeDecoder("default", tokenizer=tokenizer, engine="http", engine_options=own, **options)


def with_engine(url: str, work: Callable[[Any], Any], **options: Any) -> None:
    config = EngineConfig.create("default", engine="http", engine_options={"url": url}, **options)

    async def open_work_close() -> None:
        engine = open_engine(config)
        try:
            await work(engine)
        finally:
            await engine.close()

    asyncio.run(open_work_close())


def own_tokens(server: RunningServer, prompt: str, number: int) -> list[int]:
    ids = torch.tensor([byte_tokenizer()(prompt).input_ids])
    output = server.model.generate(ids, max_new_tokens=number, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [int(token) for token in output[0, ids.shape[1] :]]


# --- paceline's own server --------------------------------------------------------------------------------------------


def test_it_describes_the_served_model(decoder: SpeculativeDecoder, server: RunningServer) -> None:
    info = decoder.info
    assert (info.name, info.vocab_size, info.max_seq_len, info.eos_token_ids) == ("tiny", 259, 512, {257})
    assert decoder.methods == server.engine.methods and decoder.methods[0] == "ngram"


def test_greedy_text_is_the_models_own_and_draft_tokens_are_marked(
    decoder: SpeculativeDecoder, server: RunningServer
) -> None:
    expected = own_tokens(server, PROMPT, 24)
    outputs = list(decoder.stream(PROMPT, max_new_tokens=24, ignore_eos=True))
    assert ids_of(outputs) == expected and len(outputs) > 2
    assert "".join(output.text for output in outputs) == decoder.tokenizer.decode(expected)
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
    stats = outputs[-1].stats
    assert stats is not None and stats.new_tokens == 24 and stats.drafted > 0 and stats.seconds > 0
    assert sum(len(output.token_ids) for output in outputs if output.from_draft) == stats.accepted
    assert sum(stats.accepted_at) == stats.accepted and len(stats.offered_at) == 3


def test_counts_agree_with_those_of_the_server(decoder: SpeculativeDecoder, server: RunningServer) -> None:
    server.wait_until_idle()
    ours, theirs = decoder.stats(), server.engine.stats()
    result = decoder.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    now, then = server.wait_until_idle(), decoder.stats()
    for name in ("new_tokens", "steps", "drafted", "accepted"):
        change = getattr(now.spec, name) - getattr(theirs.spec, name)
        assert change == getattr(result.stats, name) == getattr(then.spec, name) - getattr(ours.spec, name)
    assert then.prompt_tokens - ours.prompt_tokens == len(PROMPT)
    assert then.by_method["ngram"].new_tokens == then.spec.new_tokens
    assert sum(then.draft_lengths.values()) == then.spec.steps


def test_a_request_chooses_its_method_and_draft_length(decoder: SpeculativeDecoder, server: RunningServer) -> None:
    plain = decoder.generate(PROMPT, max_new_tokens=16, method="none")
    assert plain.stats.drafted == 0 and plain.stats.steps == 16
    with opened(server.url, tokenizer=byte_tokenizer(), method="suffix", num_draft_tokens=1) as suffix:
        assert suffix.methods[0] == "suffix"
        result = suffix.generate(PROMPT, max_new_tokens=16)
        assert result.token_ids == plain.token_ids and len(result.stats.offered_at) == 1


def test_a_batch_gives_what_each_sequence_gives_alone(decoder: SpeculativeDecoder) -> None:
    prompts = [PROMPT[start:] for start in range(4)]
    alone = [decoder.generate(prompt, max_new_tokens=12).token_ids for prompt in prompts]
    assert [result.token_ids for result in decoder.generate(prompts, max_new_tokens=12)] == alone


def test_a_seed_and_a_stop_string_reach_the_server(decoder: SpeculativeDecoder) -> None:
    settings = {"max_new_tokens": 16, "temperature": 1.0, "top_p": 0.95, "top_k": 20, "ignore_eos": True}
    first = decoder.generate(PROMPT, seed=3, **settings)
    assert decoder.generate(PROMPT, seed=3, **settings).token_ids == first.token_ids
    assert decoder.generate(PROMPT, seed=4, **settings).token_ids != first.token_ids
    stop = first.text[6:8]
    cut = decoder.generate(PROMPT, seed=3, stop=[stop], **settings)
    assert cut.text == first.text[: first.text.index(stop)] and cut.finish_reason == "stop"
    assert cut.token_ids == first.token_ids[: len(cut.token_ids)] and cut.stats.new_tokens == len(cut.token_ids)


def test_fields_of_paceline_and_vllm_reach_the_server(decoder: SpeculativeDecoder) -> None:
    letters = decoder.tokenizer.encode("abcd")
    result = decoder.generate(PROMPT, max_new_tokens=12, allowed_token_ids=letters, bad_words=["aa"], ignore_eos=True)
    assert set(result.text) <= set("abcd") and "aa" not in result.text and len(result.token_ids) == 12
    outputs = list(decoder.stream(PROMPT, max_new_tokens=12, stop_token_ids=result.token_ids[:1]))
    assert outputs[-1].finish_reason in ("stop", "length")
    with pytest.raises(OptionError, match="takes no prompt_logprobs"):
        decoder.generate(PROMPT, prompt_logprobs=1)


def test_logprobs_come_with_every_token(decoder: SpeculativeDecoder, server: RunningServer) -> None:
    result = decoder.generate(PROMPT, max_new_tokens=8, logprobs=2, ignore_eos=True)
    ids = decoder.tokenizer.encode(PROMPT) + result.token_ids
    with torch.no_grad():
        rows = torch.log_softmax(server.model(torch.tensor([ids])).logits[0], dim=-1)[-9:-1]
    assert result.logprobs is not None and [entry.token for entry in result.logprobs] == result.token_ids
    for row, entry in zip(rows, result.logprobs):
        assert [token for token, _ in entry.top] == row.topk(2).indices.tolist()
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-3)


def test_a_json_schema_is_kept_to(server: RunningServer) -> None:
    async def work(engine: Any) -> None:
        schema = StructuredOutput("json_schema", json.dumps(SCHEMA))
        outputs = await collect(engine.generate(text_request(engine, PROMPT, 60, structured_output=schema)))
        jsonschema.validate(json.loads("".join(output.text for output in outputs)), SCHEMA)

    with_engine(server.url, work)


def test_without_a_tokenizer_prompts_and_messages_travel_as_text(
    text_decoder: SpeculativeDecoder, decoder: SpeculativeDecoder, server: RunningServer
) -> None:
    result = text_decoder.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
    assert result.text == decoder.tokenizer.decode(own_tokens(server, PROMPT, 12))
    assert result.stats.new_tokens == 12 and result.stats.accepted + result.stats.steps == 12
    answer = text_decoder.generate(MESSAGES, max_new_tokens=12, ignore_eos=True)
    assert answer.text == decoder.generate(MESSAGES, max_new_tokens=12, ignore_eos=True).text
    with pytest.raises(OptionError, match="tokenizer"):
        text_decoder.generate(PROMPT, logprobs=1)


def test_closing_the_iterator_aborts_the_request_on_the_server(server: RunningServer) -> None:
    before = server.wait_until_idle().spec.new_tokens

    async def work(engine: Any) -> None:
        with slowed(server, 0.01):
            request = text_request(engine, PROMPT, 450, ignore_eos=True, method="none")
            async with aclosing(engine.generate(request)) as outputs:
                async for _ in outputs:
                    break
            assert not engine.stats().running
            stats = await asyncio.to_thread(server.wait_until_idle, 60)
        assert stats.spec.new_tokens - before < 450

    with_engine(server.url, work)


def test_a_closed_engine_ends_its_requests_and_refuses_others(server: RunningServer) -> None:
    async def work(engine: Any) -> None:
        with slowed(server, 0.01):
            request = text_request(engine, PROMPT, 450, ignore_eos=True, method="none")
            running = asyncio.create_task(collect(engine.generate(request)))
            while not engine.stats().running and not running.done():
                await asyncio.sleep(0.001)
            await engine.close()
            assert (await running)[-1].finish_reason == "abort"
        with pytest.raises(EngineClosed):
            engine.generate(request)
        await engine.close()

    with_engine(server.url, work)
    server.wait_until_idle(60)


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
def test_a_wrong_request_is_refused_at_once(
    decoder: SpeculativeDecoder, settings: dict[str, Any], error: type[Exception]
) -> None:
    request = Request(**{"prompt": [1, 2], "sampling": SamplingParams(), "max_new_tokens": 4, **settings})
    with pytest.raises(error):
        decoder._engine.generate(request)


def test_what_the_server_refuses_is_the_users_error(decoder: SpeculativeDecoder) -> None:
    with pytest.raises(OptionError, match="answered 400"):
        decoder.generate(PROMPT, temperature=5.0)
    assert decoder.stats().failures == 0


def test_the_command_line_generates_through_a_server(
    server: RunningServer, capsys: pytest.CaptureFixture[str], decoder: SpeculativeDecoder
) -> None:
    arguments = ["--engine", "http", "--engine-option", f"url={server.url}/v1", "-m", "tiny", "--json"]
    assert main(["generate", PROMPT, "--max-new-tokens", "12", "--ignore-eos", *arguments]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["text"] == decoder.generate(PROMPT, max_new_tokens=12, ignore_eos=True).text
    assert document["new_tokens"] == 12 and document["drafted"] > 0
    assert main(["generate", "hi", *arguments[:4], "-m", "other"]) != 0
    assert "has no model 'other'; it has tiny" in capsys.readouterr().err


def test_serve_puts_the_api_in_front_of_another_server(
    server: RunningServer, tiny_folder: Path, decoder: SpeculativeDecoder
) -> None:
    flags = ["--engine", "http", "--engine-option", f"url={server.url}", "-m", "tiny"]
    with serving_flags(*flags, "--engine-option", f"tokenizer={tiny_folder}") as front:
        whole = front.client().completions.create(
            model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
        )
    assert whole.choices[0].text == decoder.generate(PROMPT, max_new_tokens=12, ignore_eos=True).text
    assert whole.usage is not None and whole.usage.completion_tokens == 12


def test_the_default_model_is_served_with_its_own_tokenizer(default_model: Any, default_tokenizer: Any) -> None:
    serving = serving_model(default_model, default_tokenizer, ServerConfig(("default",)))
    with serving as running, opened(running.url) as decoder:
        result = decoder.generate([{"role": "user", "content": "Say hello."}], max_new_tokens=8)
        assert decoder.info.vocab_size == 49152 and result.token_ids
        assert decoder.tokenizer.decode(result.token_ids) == result.text
        counts = running.wait_until_idle(60).spec
        assert (counts.steps, counts.drafted) == (result.stats.steps, result.stats.drafted)


# --- llama.cpp's server -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("xllamacpp")
    from paceline.engines.llama_cpp.process import LlamaCppProcess

    path = ascii_gguf(tmp_path_factory.mktemp("gguf"))
    params = {
        "model.path": str(path), "cpuparams.n_threads": 1, "cpuparams_batch.n_threads": 1, "n_ctx": 512,
        "n_parallel": 2, "kv_unified": True, "api_keys": ["secret"], "endpoint_metrics": True,
    }  # fmt: skip
    ngram = {"types": ["NGRAM_SIMPLE"], "params": {"ngram_simple.size_n": 1, "ngram_simple.size_m": 3}}
    process = LlamaCppProcess({"params": params, "speculative": ngram}, "tiny")
    yield process
    process.close()


needs_llama_cpp = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp")


@needs_llama_cpp
@pytest.mark.parametrize("tokenizer", ["of the file", "none"])
def test_llama_server_is_read_with_its_draft_counts(llama_server: Any, server: RunningServer, tokenizer: str) -> None:
    own = {"api_key": "secret", **({} if tokenizer == "of the file" else {"server": "vllm"})}
    with opened(llama_server.url, engine_options=own) as decoder:
        result = decoder.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    expected = own_tokens(server, PROMPT, 24)
    assert result.text == byte_tokenizer().decode(expected)
    assert 0 < result.stats.accepted <= result.stats.drafted and result.stats.new_tokens == 24
    if tokenizer == "of the file":
        assert result.token_ids == expected and sum(result.stats.accepted_at) == result.stats.accepted


@needs_llama_cpp
def test_a_server_that_is_killed_fails_its_requests(llama_server: Any) -> None:
    with opened(llama_server.url, engine_options={"api_key": "secret"}) as decoder:
        llama_server._process.send_signal(signal.SIGSTOP)  # so that the request is under way
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(decoder.generate, PROMPT)
            while not decoder.stats().running and not running.done():
                time.sleep(0.01)
            llama_server._process.kill()
            with pytest.raises(EngineFailed, match="was lost"):
                running.result(120)
        llama_server._process.wait(60)
        with pytest.raises(EngineFailed, match="cannot be reached"):
            decoder.generate(PROMPT)
