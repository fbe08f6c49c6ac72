"""llama.cpp behind the doors that users open: the library, the command line and the server, over a tiny GGUF file."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.build import open_engine
from paceline.cli import main
from paceline.config import EngineConfig
from paceline.core.sampling import SamplingParams, distribution
from paceline.core.types import Request, StructuredOutput
from paceline.errors import (
    ContextLengthExceeded,
    EngineClosed,
    EngineFailed,
    MissingExtra,
    ModelError,
    ModelNotFound,
    OptionError,
    OutOfMemory,
    PromptError,
)
from tests.support.build import collect, text_request
from tests.support.engines import ONE_THREAD, ascii_gguf, gguf_llama
from tests.support.gguf import write_gguf
from tests.support.served import serving_flags

pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow
LONG = 32768
PROMPT = "to be or not to be, to be or not to be"
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def model() -> Any:
    return gguf_llama()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(ascii_gguf(tmp_path_factory.mktemp("gguf")))


@pytest.fixture(scope="module")
def long_gguf(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with a context that no busy machine fills before a test has acted."""
    return str(ascii_gguf(tmp_path_factory.mktemp("long"), max_position_embeddings=LONG))


Opener = Callable[..., SpeculativeDecoder]


@pytest.fixture(scope="module")
def opened(gguf: str) -> Iterator[Opener]:
    """Opens decoders over the tiny file, each setting once."""
    decoders: dict[str, SpeculativeDecoder] = {}

    def opener(**options: Any) -> SpeculativeDecoder:
        key = json.dumps(options, sort_keys=True)
        if key not in decoders:
            own = {**ONE_THREAD, **options.pop("engine_options", {})}
            decoders[key] = SpeculativeDecoder(gguf, engine="llama_cpp", engine_options=own, **options)
        return decoders[key]

    yield opener
    for decoder in decoders.values():
        decoder.close()


@pytest.fixture
def plain(opened: Opener) -> SpeculativeDecoder:
    return opened()


@pytest.fixture
def ngram(opened: Opener) -> SpeculativeDecoder:
    return opened(method="ngram", num_draft_tokens=4, engine_options={"ngram_size": 1})


def own_tokens(model: Any, decoder: SpeculativeDecoder, prompt: str, number: int, **settings: Any) -> list[int]:
    """What transformers generates greedily."""
    ids = torch.tensor([decoder.tokenizer.encode(prompt)])
    output = model.generate(ids, max_new_tokens=number, do_sample=False, eos_token_id=None, pad_token_id=0, **settings)
    return [int(token) for token in output[0, ids.shape[1] :]]


def with_engine(gguf: str, work: Callable[[Any], Any], **options: Any) -> None:
    """Run `work` with an engine of its own, and close it."""

    async def open_work_close() -> None:
        engine = open_engine(EngineConfig.create(gguf, engine="llama_cpp", engine_options=ONE_THREAD, **options))
        try:
            await work(engine)
        finally:
            await engine.close()

    asyncio.run(open_work_close())


# --- text -------------------------------------------------------------------------------------------------------------


def test_it_describes_the_file(plain: SpeculativeDecoder) -> None:
    info = plain.info
    assert (info.vocab_size, info.max_seq_len, info.num_layers, info.hidden_size) == (259, 512, 3, 32)
    assert info.eos_token_ids == {258} and info.device == "cpu" and "F32" in info.dtype
    assert plain.methods == ("none",)


def test_greedy_text_is_the_models_own_with_speculation_and_without(
    plain: SpeculativeDecoder, ngram: SpeculativeDecoder, model: Any
) -> None:
    expected = own_tokens(model, plain, PROMPT, 40)
    for decoder in (plain, ngram):
        result = decoder.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
        assert result.token_ids == expected and result.text == decoder.tokenizer.decode(expected)
        assert result.finish_reason == "length" and result.stats.new_tokens == 40 and result.stats.seconds > 0


def test_draft_tokens_are_counted_step_by_step(ngram: SpeculativeDecoder) -> None:
    before = ngram.stats()
    outputs = list(ngram.stream(PROMPT, max_new_tokens=40, ignore_eos=True))
    stats = outputs[-1].stats
    assert stats is not None and 0 < stats.accepted < stats.drafted
    assert sum(len(output.token_ids) for output in outputs if output.from_draft) == stats.accepted
    assert stats.steps + stats.accepted == stats.new_tokens == 40
    assert sum(stats.accepted_at) == stats.accepted and sum(stats.offered_at) == stats.drafted
    assert sum(output.num_drafted or 0 for output in outputs) >= stats.drafted
    after = ngram.stats()
    assert after.by_method["ngram"].new_tokens - before.spec.new_tokens == 40
    assert sum(after.draft_lengths.values()) == after.spec.steps
    assert after.prompt_tokens - before.prompt_tokens == len(PROMPT)


def test_a_draft_model_that_is_the_target_is_always_accepted(opened: Opener, gguf: str, model: Any) -> None:
    decoder = opened(draft_model=gguf, num_draft_tokens=3)
    result = decoder.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    assert decoder.methods == ("draft_model",) and result.token_ids == own_tokens(model, decoder, PROMPT, 24)
    assert result.stats.acceptance_rate == 1.0 and result.stats.tokens_per_step > 2.5


def test_a_batch_gives_what_each_sequence_gives_alone(plain: SpeculativeDecoder) -> None:
    prompts = [PROMPT[start:] for start in range(6)]
    alone = [plain.generate(prompt, max_new_tokens=16).token_ids for prompt in prompts]
    assert [result.token_ids for result in plain.generate(prompts, max_new_tokens=16)] == alone


def test_a_stop_string_ends_a_sequence_and_is_not_shown(ngram: SpeculativeDecoder) -> None:
    text = ngram.generate(PROMPT, max_new_tokens=24, ignore_eos=True).text
    stop = text[6:8]
    result = ngram.generate(PROMPT, max_new_tokens=24, ignore_eos=True, stop=[stop])
    assert result.text == text[: text.index(stop)] and result.finish_reason == "stop"
    outputs = list(ngram.stream(PROMPT, max_new_tokens=24, stop=[stop], ignore_eos=True))
    assert "".join(output.text for output in outputs) == result.text and outputs[-1].stop_reason == stop


def test_an_end_token_ends_a_sequence(plain: SpeculativeDecoder) -> None:
    for skips in (True, False):
        result = plain.generate(PROMPT, max_new_tokens=24, logit_bias={258: 100.0}, skip_special_tokens=skips)
        assert (result.token_ids, result.text, result.finish_reason) == ([258], "", "stop")
    shown = plain.generate(PROMPT, max_new_tokens=1, logit_bias={257: 100.0}, skip_special_tokens=False)
    assert shown.text == plain.tokenizer.decode_with_special([257]) != ""


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_a_seed_decides_a_sampled_sequence_with_every_method(
    plain: SpeculativeDecoder, ngram: SpeculativeDecoder
) -> None:
    settings = {"max_new_tokens": 24, "temperature": 1.0, "top_p": 0.95, "ignore_eos": True}
    first = plain.generate(PROMPT, seed=3, **settings).token_ids
    assert plain.generate(PROMPT, seed=3, **settings).token_ids == first
    assert ngram.generate(PROMPT, seed=3, **settings).token_ids == first
    assert plain.generate(PROMPT, seed=4, **settings).token_ids != first


def test_tokens_are_drawn_from_the_distribution_of_the_settings(plain: SpeculativeDecoder, model: Any) -> None:
    """chi² over 600 draws; a right engine fails with probability 0.001, and the seeds are fixed."""
    from scipy.stats import chisquare

    settings = {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02}
    with torch.no_grad():
        logits = model(torch.tensor([plain.tokenizer.encode(PROMPT)])).logits[0, -1]
    expected = distribution(logits, SamplingParams(**settings)).double().numpy()  # sums are checked
    results = plain.generate([PROMPT] * 600, max_new_tokens=1, seed=0, **settings)
    counts = torch.bincount(torch.tensor([result.token_ids[0] for result in results]), minlength=259).numpy()
    kept = expected > 0
    assert not counts[~kept].any()
    assert chisquare(counts[kept], 600 * expected[kept] / expected[kept].sum()).pvalue > 0.001


def test_a_repetition_penalty_is_transformers_own(plain: SpeculativeDecoder, model: Any) -> None:
    expected = own_tokens(model, plain, PROMPT, 12, repetition_penalty=1.5)
    result = plain.generate(PROMPT, max_new_tokens=12, repetition_penalty=1.5, ignore_eos=True)
    assert result.token_ids == expected != own_tokens(model, plain, PROMPT, 12)


def test_logprobs_are_the_models_own(opened: Opener, model: Any) -> None:
    plain = opened(engine_options={"kv_cache_type": "f32"})
    result = plain.generate(PROMPT, max_new_tokens=8, logprobs=2, ignore_eos=True)
    ids = plain.tokenizer.encode(PROMPT) + result.token_ids
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)[-len(result.token_ids) - 1 : -1]
    assert result.logprobs is not None and [entry.token for entry in result.logprobs] == result.token_ids
    for row, entry in zip(rows, result.logprobs):
        best = row.topk(2)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=0.05)
        assert entry.logprob == entry.top[0][1]


# --- structured output ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_a_json_schema_a_regex_and_a_grammar_are_kept_to(opened: Opener, gguf: str, method: str) -> None:
    async def work(engine: Any) -> None:
        async def text(kind: str, value: str) -> str:
            output = StructuredOutput(kind, value)
            outputs = await collect(engine.generate(text_request(engine, PROMPT, 60, structured_output=output)))
            return "".join(output.text for output in outputs)

        jsonschema.validate(json.loads(await text("json_schema", json.dumps(SCHEMA))), SCHEMA)
        assert (await text("regex", "a/b[0-9]{3}")).startswith("a/b")
        assert await text("grammar", 'start: "yes" | "no"') in ("yes", "no")
        assert await text("grammar", 'root ::= "yes" | "no"') in ("yes", "no")
        assert await text("choice", '["left", "right"]') in ("left", "right")

    with_engine(gguf, work, method=method)


@pytest.mark.parametrize("value", ["{", '{"type": "nonsense"}'])
def test_a_schema_that_llama_cpp_would_ignore_is_refused(gguf: str, value: str) -> None:
    async def work(engine: Any) -> None:
        with pytest.raises(OptionError):
            engine.generate(text_request(engine, PROMPT, structured_output=StructuredOutput("json_schema", value)))

    with_engine(gguf, work)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"prompt": []}, PromptError),
        ({"prompt": [999]}, PromptError),
        ({"prompt": [1] * 600}, ContextLengthExceeded),
        ({"max_new_tokens": 0}, OptionError),
        ({"method": "magic"}, OptionError),
        ({"method": "ngram"}, OptionError),
        ({"stop": 5}, OptionError),
        ({"logprobs": -1}, OptionError),
        ({"num_draft_tokens": 500}, OptionError),
        ({"min_new_tokens": 3}, OptionError),
        ({"bad_words": ("x",)}, OptionError),
        ({"sampling": SamplingParams(presence_penalty=1.0)}, OptionError),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_request_is_refused_at_once(
    plain: SpeculativeDecoder, settings: dict[str, Any], error: type[Exception]
) -> None:
    engine = plain._engine
    with pytest.raises(error):
        engine.generate(Request(**{"prompt": [1, 2], "sampling": SamplingParams(), "max_new_tokens": 4, **settings}))


def test_what_needs_another_start_is_refused_with_the_request(ngram: SpeculativeDecoder) -> None:
    with pytest.raises(OptionError, match="method none"):
        ngram.generate(PROMPT, logprobs=1)
    with pytest.raises(OptionError, match="when it starts"):
        ngram.generate(PROMPT, num_draft_tokens=2)
    assert ngram.generate(PROMPT, max_new_tokens=4, num_draft_tokens=4).token_ids


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "medusa"}, "does not have method medusa"),
        ({"method": "suffix"}, "does not have method suffix"),
        ({"method": "eagle"}, "needs a draft model"),
        ({"dtype": "int4"}, "does not take dtype"),
        ({"acceptance": "block"}, "does not take acceptance"),
        ({"draft_options": {"nodes": 3}}, "does not take draft_options"),
        ({"engine_options": {"threads": 0}}, "threads must be 1 or more"),
        ({"engine_options": {"kv_cache_type": "f8"}}, "kv_cache_type must be one of"),
        ({"engine_options": {"magic": 1}}, "has no option 'magic'"),
        ({"tensor_parallel_size": 2}, "does not take tensor_parallel_size"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_option_that_it_does_not_have_is_refused_by_name(gguf: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        SpeculativeDecoder(gguf, engine="llama_cpp", **options)


def test_only_gguf_files_are_opened(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="not a GGUF file"):
        SpeculativeDecoder(tiny_folder, engine="llama_cpp")
    with pytest.raises(ModelNotFound):
        SpeculativeDecoder(tmp_path / "missing.gguf", engine="llama_cpp")


def test_a_file_that_llama_cpp_cannot_load_is_one_line(
    gguf: str, tmp_path: Path, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = write_gguf(tmp_path / "damaged.gguf", model, without=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelError, match=r"llama\.cpp cannot load .*damaged\.gguf"):
        SpeculativeDecoder(damaged, engine="llama_cpp", engine_options=ONE_THREAD)
    assert main(["generate", "hello", "-m", str(damaged), "--engine", "llama_cpp"]) != 0
    errors = capsys.readouterr().err
    assert "llama.cpp cannot load" in errors and "Traceback" not in errors


def test_the_missing_package_is_named_with_its_extra(gguf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xllamacpp" else found(name))
    with pytest.raises(MissingExtra, match=r"pip install '\.\[llama-cpp\]'"):
        SpeculativeDecoder(gguf, engine="llama_cpp")


def test_a_full_kv_cache_names_the_flag_and_the_engine_goes_on(gguf: str) -> None:
    options = {**ONE_THREAD, "context_size": 256}
    with SpeculativeDecoder(gguf, engine="llama_cpp", engine_options=options, max_num_seqs=4) as decoder:
        assert decoder.info.max_seq_len == 256
        with pytest.raises(OutOfMemory, match="--kv-cache-tokens"):
            decoder.generate([f"{PROMPT} {number}" for number in range(4)], max_new_tokens=60, ignore_eos=True)
        assert len(decoder.generate(PROMPT, max_new_tokens=5, ignore_eos=True).token_ids) == 5


def test_proxies_of_the_environment_do_not_come_between(gguf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with SpeculativeDecoder(gguf, engine="llama_cpp", engine_options=ONE_THREAD) as decoder:
        assert decoder.generate(PROMPT, max_new_tokens=2).token_ids


# --- ends -------------------------------------------------------------------------------------------------------------


def test_closing_the_iterator_frees_the_sequence_in_llama_cpp(long_gguf: str) -> None:
    async def work(engine: Any) -> None:
        request = text_request(engine, PROMPT, LONG - 100, ignore_eos=True)
        async with aclosing(engine.generate(request)) as outputs:
            async for _ in outputs:
                break
        assert not engine.stats().running and engine.stats().spec.new_tokens < LONG - 100
        states: list[dict[str, Any]] = [{"is_processing": True}]
        deadline = time.monotonic() + 60
        while any(state["is_processing"] for state in states) and time.monotonic() < deadline:
            states = json.loads(await engine._client.text("/slots"))
            await asyncio.sleep(0.01)
        assert not any(state["is_processing"] for state in states)
        metrics = await engine._client.text("/metrics")
        [predicted] = [line.split()[1] for line in metrics.splitlines() if line.startswith("llamacpp:n_tokens_max ")]
        assert float(predicted) < LONG - 100

    with_engine(long_gguf, work, max_model_len=LONG, kv_cache_tokens=LONG)


def test_a_closed_engine_refuses_requests_and_closing_twice_is_harmless(gguf: str) -> None:
    async def work(engine: Any) -> None:
        request = text_request(engine, PROMPT, 450, ignore_eos=True)
        running = asyncio.create_task(collect(engine.generate(request)))
        while not engine.stats().running and not running.done():
            await asyncio.sleep(0.001)
        await engine.close()
        assert (await running)[-1].finish_reason in ("abort", "length")
        with pytest.raises(EngineClosed):
            engine.generate(request)
        await engine.close()

    with_engine(gguf, work)


def test_a_process_that_dies_fails_its_requests_with_the_reason(gguf: str) -> None:
    with SpeculativeDecoder(gguf, engine="llama_cpp", engine_options=ONE_THREAD) as decoder:
        engine: Any = decoder._engine
        pid = engine._parts.on_close.__self__.pid
        engine.check_health()
        os.kill(pid, signal.SIGSTOP)  # so that the request is under way for as long as the test needs
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(decoder.generate, PROMPT)
            while not decoder.stats().running and not running.done():
                time.sleep(0.01)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineFailed, match=r"llama\.cpp's process has ended \(signal 9\)"):
                running.result(120)
        for ask in (lambda: decoder.generate(PROMPT), engine.check_health):
            with pytest.raises(EngineFailed, match="has ended"):
                ask()
        assert decoder.stats().failures == 1 and not decoder.stats().running


def test_the_process_ends_with_the_program_that_opened_it(gguf: str) -> None:
    program = (
        "import os, sys; from paceline import SpeculativeDecoder\n"
        f"decoder = SpeculativeDecoder({gguf!r}, engine='llama_cpp', engine_options={ONE_THREAD!r})\n"
        "print(decoder._engine._parts.on_close.__self__.pid, flush=True); os._exit(1)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    pid, deadline = int(result.stdout.split()[-1]), time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


# --- doors ------------------------------------------------------------------------------------------------------------


def test_the_command_line_generates_with_it(gguf: str, capsys: pytest.CaptureFixture[str], model: Any) -> None:
    arguments = ["--engine", "llama_cpp", "--engine-option", "threads=1", "--engine-option", "ngram_size=1"]
    arguments += ["-m", gguf, "--method", "ngram", "-k", "4", "--max-new-tokens", "24", "--ignore-eos", "--json"]
    assert main(["generate", PROMPT, *arguments]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["method"] == "ngram" and document["new_tokens"] == 24 and document["drafted"] > 0
    with SpeculativeDecoder(gguf, engine="llama_cpp", engine_options=ONE_THREAD) as decoder:
        assert document["token_ids"] == own_tokens(model, decoder, PROMPT, 24)
    assert main(["generate", "--help"]) == 0
    assert "llama_cpp" in (shown := capsys.readouterr().out) and "llama_cpp: gpu_layers" in " ".join(shown.split())


def test_the_server_serves_it_and_a_client_that_leaves_aborts(long_gguf: str) -> None:
    gguf = long_gguf
    with serving_flags("-m", gguf, "--engine", "llama_cpp", "--engine-option", "threads=1") as server:
        client = server.client()
        whole = client.completions.create(model=gguf, prompt=PROMPT, max_tokens=16, temperature=0)
        parts = client.completions.create(model=gguf, prompt=PROMPT, max_tokens=16, temperature=0, stream=True)
        assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
        assert whole.usage is not None and whole.usage.prompt_tokens == len(PROMPT)
        body = {"model": gguf, "prompt": PROMPT, "max_tokens": 30000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            next(response.iter_lines())
        assert server.wait_until_idle(60).spec.new_tokens < 30000


def test_several_threads_share_a_decoder(plain: SpeculativeDecoder) -> None:
    expected = plain.generate(PROMPT, max_new_tokens=12).token_ids
    results: list[list[int]] = []
    work = lambda: results.append(plain.generate(PROMPT, max_new_tokens=12).token_ids)  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [expected] * 4


# --- the default model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_gguf() -> Iterator[SpeculativeDecoder]:
    with SpeculativeDecoder("default", engine="llama_cpp", engine_options=ONE_THREAD) as decoder:
        yield decoder


@pytest.mark.model
def test_the_default_model_answers_from_its_gguf_file(default_gguf: SpeculativeDecoder) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    result = default_gguf.generate(messages, max_new_tokens=12)
    assert "Paris" in result.text and default_gguf.info.dtype == "Q4_1"
    assert default_gguf.tokenizer.decode(result.token_ids) == result.text


@pytest.mark.model
def test_tokens_inside_a_character_are_found_again(default_gguf: SpeculativeDecoder) -> None:
    result = default_gguf.generate("Repeat: 🦜🦜🦜🦜🦜🦜🦜🦜", max_new_tokens=6)
    assert result.text == "🦜🦜" and len(result.token_ids) == 6
    assert default_gguf.tokenizer.decode(result.token_ids) == result.text


@pytest.mark.model
def test_the_default_model_does_what_the_tiny_one_does(default_gguf: SpeculativeDecoder) -> None:
    prompts = ["One, two, three,", "The capital of France is"]
    alone = [default_gguf.generate(prompt, max_new_tokens=6) for prompt in prompts]
    together = default_gguf.generate(prompts, max_new_tokens=6, logprobs=2)
    assert [result.text for result in together] == [result.text for result in alone]
    for result in together:
        assert result.logprobs is not None and [entry.token for entry in result.logprobs] == result.token_ids
        assert all(entry.logprob == entry.top[0][1] <= 0 for entry in result.logprobs)
    stop = alone[0].text[3:6]
    outputs = list(default_gguf.stream(prompts[0], max_new_tokens=6, stop=[stop]))
    assert "".join(output.text for output in outputs) == alone[0].text[: alone[0].text.index(stop)]
    sampled = [default_gguf.generate(prompts[1], max_new_tokens=6, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert sampled[0].token_ids == sampled[1].token_ids != sampled[2].token_ids
    schema = StructuredOutput("json_schema", json.dumps(SCHEMA))
    answer = default_gguf.generate(prompts[0], max_new_tokens=24, structured_output=schema)
    jsonschema.validate(json.loads(answer.text), SCHEMA)
