"""SpeculativeDecoder, as a tutorial: open it, generate, stream, batch, sample; then everything that can be wrong."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import SamplingParams, SpeculativeDecoder
from paceline.core.types import StructuredOutput
from paceline.errors import EngineClosed, OptionError, PacelineError, PairError, PromptError
from tests.support.tiny import byte_tokenizer, tiny_llama, write_tiny_model

PROMPTS = ["abcabcabc", "to be or not to be", "x", "12 12 12 12"]
DRAFTING: list[dict[str, Any]] = [
    {},
    {"method": "ngram", "num_draft_tokens": 4},
    {"method": "ngram", "num_draft_tokens": 6, "draft_options": {"branches": 3, "shortest": 1}},
    {"draft_model": tiny_llama(seed=9), "num_draft_tokens": 3},
    {"method": "ngram", "num_draft_tokens": "auto"},
]


@pytest.fixture(params=DRAFTING, ids=["none", "ngram", "ngram-tree", "draft-model", "auto"])
def decoder(request: pytest.FixtureRequest, tiny_folder: Path) -> Iterator[SpeculativeDecoder]:
    with SpeculativeDecoder(tiny_folder, **request.param) as opened:
        yield opened


@pytest.fixture
def plain(tiny_folder: Path) -> Iterator[SpeculativeDecoder]:
    with SpeculativeDecoder(tiny_folder) as opened:
        yield opened


def generated_by_transformers(model: Any, decoder: SpeculativeDecoder, prompt: str, new_tokens: int = 30) -> list[int]:
    ids = torch.tensor([decoder.tokenizer.encode(prompt)])
    tokens: list[int] = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)[0, ids.shape[1] :].tolist()
    return tokens


# --- open and close ---------------------------------------------------------------------------------------------------


def test_a_decoder_is_a_context_manager_and_says_what_it_is(tiny_folder: Path) -> None:
    with SpeculativeDecoder(tiny_folder, method="ngram", num_draft_tokens=4) as decoder:
        assert decoder.generate("abcabc", max_new_tokens=4).stats.new_tokens == 4
        assert repr(decoder) == (
            f"SpeculativeDecoder(model={str(tiny_folder)!r}, method='ngram', device='cpu', dtype='float32')"
        )
        assert decoder.info.vocab_size == 259 and decoder.stats().spec.new_tokens == 4
    with pytest.raises(EngineClosed, match="closed"):
        decoder.generate("abcabc")


def test_closing_twice_is_harmless_and_use_after_close_is_a_typed_error(tiny_folder: Path) -> None:
    decoder = SpeculativeDecoder(tiny_folder)
    decoder.close()
    decoder.close()
    for use in (
        lambda: decoder.generate("x"),
        lambda: next(decoder.stream("x")),
        lambda: decoder.decode([1, 2]),
        lambda: decoder.generate(["x", "y"]),
    ):
        with pytest.raises(EngineClosed):
            use()
    assert repr(decoder).startswith("SpeculativeDecoder(")


def test_a_stream_that_is_first_read_after_close_is_a_typed_error(tiny_folder: Path) -> None:
    with SpeculativeDecoder(tiny_folder) as decoder:
        stream = decoder.stream("x")
    with pytest.raises(EngineClosed, match="the decoder has been closed"):
        next(stream)


def test_closing_ends_a_stream_in_progress(tiny_folder: Path) -> None:
    with SpeculativeDecoder(tiny_folder) as decoder:
        stream = decoder.stream("abc", max_new_tokens=450, ignore_eos=True)
        next(stream)
    outputs = list(stream)
    assert not outputs or outputs[-1].finish_reason in ("abort", "length")


def test_no_thread_waits_for_a_decoder_that_another_one_closes(tiny_folder: Path) -> None:
    """A call that comes while the event loop stops would never run: a race, so it is run often."""
    for _ in range(8):
        decoder, reasons = SpeculativeDecoder(tiny_folder), list[str]()
        threads = [threading.Thread(target=generate_until_closed, args=(decoder, reasons), daemon=True) for _ in "four"]
        for thread in threads:
            thread.start()
        while not reasons:
            time.sleep(0.001)
        decoder.close()
        for thread in threads:
            thread.join(timeout=10)
        assert not any(thread.is_alive() for thread in threads)
        assert reasons.count("closed") == len(threads)


def generate_until_closed(decoder: SpeculativeDecoder, reasons: list[str]) -> None:
    try:
        while True:
            results = decoder.generate(["abc"] * 3, max_new_tokens=20, ignore_eos=True)
            reasons.extend(result.finish_reason for result in results)
    except EngineClosed:
        reasons.append("closed")


def test_a_decoder_that_is_dropped_gives_its_model_and_its_threads_back(tiny_folder: Path) -> None:
    num_threads = threading.active_count()
    decoder = SpeculativeDecoder(tiny_folder, method="ngram", num_draft_tokens=3)
    decoder.generate("abc", max_new_tokens=4)
    engine = weakref.ref(decoder._engine)
    del decoder
    deadline = time.monotonic() + 10
    while (engine() is not None or threading.active_count() > num_threads) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert engine() is None and threading.active_count() <= num_threads


def test_a_stream_keeps_its_decoder_open(tiny_folder: Path) -> None:
    outputs = list(SpeculativeDecoder(tiny_folder).stream("abc", max_new_tokens=40, ignore_eos=True))
    assert outputs[-1].finish_reason == "length" and sum(len(output.token_ids) for output in outputs) == 40


# --- text in, text out ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_greedy_text_is_the_models_own(decoder: SpeculativeDecoder, tiny_model: Any) -> None:
    for result, prompt in zip(decoder.generate(PROMPTS, max_new_tokens=30), PROMPTS):
        assert result.token_ids == generated_by_transformers(tiny_model, decoder, prompt)
        assert result.text == decoder.tokenizer.decode(result.token_ids)
        assert len(result.from_draft) == len(result.token_ids) and sum(result.from_draft) == result.stats.accepted
        assert result.prompt_tokens == len(prompt)


@pytest.mark.slow
def test_a_stream_is_the_same_text_in_parts(decoder: SpeculativeDecoder) -> None:
    result = decoder.generate(PROMPTS[0], max_new_tokens=20)
    outputs = list(decoder.stream(PROMPTS[0], max_new_tokens=20))
    assert "".join(output.text for output in outputs) == result.text
    assert [token for output in outputs for token in output.token_ids] == result.token_ids
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason == result.finish_reason
    assert outputs[-1].stats is not None and outputs[-1].stats.new_tokens == result.stats.new_tokens


def test_leaving_a_stream_early_gives_its_cache_back(decoder: SpeculativeDecoder) -> None:
    stream = decoder.stream(PROMPTS[0], max_new_tokens=200)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert decoder.generate(PROMPTS[0], max_new_tokens=5).stats.new_tokens == 5
    assert not decoder.stats().running and not decoder.stats().blocks_used


@pytest.mark.slow
def test_a_conversation_reads_only_what_is_new(tiny_folder: Path, plain: SpeculativeDecoder) -> None:
    messages: list[dict[str, Any]] = []
    with SpeculativeDecoder(tiny_folder, method="ngram", num_draft_tokens=3) as decoder:
        for question in ("hello, how are you doing today, my friend? tell me all", "go on", "and then?"):
            messages.append({"role": "user", "content": question})
            answer = "".join(output.text for output in decoder.stream(messages, max_new_tokens=12))
            assert answer == plain.generate(messages, max_new_tokens=12).text
            messages.append({"role": "assistant", "content": answer})
        assert decoder.stats().prefix_hits == 2 and decoder.stats().prefix_tokens > 100


def test_stop_strings_and_logprobs(tiny_folder: Path, tiny_model: Any) -> None:
    with SpeculativeDecoder(tiny_folder, method="ngram", num_draft_tokens=4) as decoder:
        result = decoder.generate(PROMPTS[0], max_new_tokens=15, logprobs=2)
        prompt = decoder.tokenizer.encode(PROMPTS[0])
        stop = result.text[4:6]
        cut = decoder.generate(PROMPTS[0], max_new_tokens=15, stop=stop)
    assert (cut.text, cut.finish_reason) == (result.text[: result.text.index(stop)], "stop")
    assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids)
    with torch.no_grad():
        logits = tiny_model(torch.tensor([prompt + result.token_ids])).logits[0, len(prompt) - 1 : -1]
    for row, token, logprob in zip(torch.log_softmax(logits, -1), result.token_ids, result.logprobs):
        assert logprob.token == token == logprob.top[0][0] and len(logprob.top) == 2
        assert logprob.logprob == pytest.approx(float(row[token]), abs=1e-3)


def test_a_sequence_never_outgrows_the_context(tiny_folder: Path) -> None:
    with SpeculativeDecoder(tiny_folder, method="ngram", num_draft_tokens=8) as decoder:
        result = decoder.generate("ab" * 250, max_new_tokens=100, ignore_eos=True)
    assert (len(result.token_ids), result.finish_reason) == (12, "length")


# --- ids in, ids out --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ids_in_ids_out(decoder: SpeculativeDecoder, tiny_model: Any) -> None:
    ids = torch.randint(0, 250, (3, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    expected = tiny_model.generate(ids, attention_mask=mask, max_new_tokens=25, do_sample=False)
    assert torch.equal(decoder.decode(ids, mask, max_new_tokens=25), expected)
    assert torch.equal(decoder.decode(ids[0], max_new_tokens=25), expected[0][: 8 + 25])


@pytest.mark.slow
def test_arrays_of_numpy_and_torch_and_lists_are_ids(plain: SpeculativeDecoder) -> None:
    ids = [5, 6, 7, 5, 6]
    expected = plain.generate(ids, max_new_tokens=6).token_ids
    assert plain.decode(ids, max_new_tokens=6).tolist() == ids + expected
    numpy_ids = plain.decode(np.array([ids]), max_new_tokens=6)
    assert isinstance(numpy_ids, np.ndarray) and numpy_ids.tolist() == [ids + expected]
    for prompt in (np.array(ids), torch.tensor(ids), tuple(ids), [np.int64(token) for token in ids]):
        assert plain.generate(prompt, max_new_tokens=6).token_ids == expected
    both = plain.generate(torch.tensor([ids, ids]), max_new_tokens=6)
    assert [result.token_ids for result in both] == [expected, expected]
    assert next(plain.stream(np.array(ids), max_new_tokens=1)).token_ids == (expected[0],)


# --- values in the kinds users have them in ---------------------------------------------------------------------------


def test_torch_devices_and_dtypes_and_paths_and_numpy_numbers_are_understood(tiny_folder: Path) -> None:
    with SpeculativeDecoder(
        tiny_folder,
        device=torch.device("cpu"),
        dtype=torch.float32,
        method="ngram",
        num_draft_tokens=np.int64(3),
        max_num_seqs=np.int32(2),
    ) as decoder:
        assert (decoder.info.device, decoder.info.dtype) == ("cpu", "float32")
        result = decoder.generate(
            "abc", max_new_tokens=np.int64(5), temperature=np.float32(0.5), seed=np.int64(3), top_k=np.int64(4)
        )
        assert len(result.token_ids) == 5


@pytest.mark.slow
def test_do_sample_false_is_greedy(plain: SpeculativeDecoder) -> None:
    greedy = plain.generate(PROMPTS[1], max_new_tokens=12)
    same = plain.generate(PROMPTS[1], max_new_tokens=12, do_sample=False, temperature=1.3, seed=5)
    assert same.token_ids == greedy.token_ids


def test_a_json_schema_is_a_dictionary(plain: SpeculativeDecoder) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    for value in (schema, StructuredOutput("json_schema", json.dumps(schema))):
        text = plain.generate("x", max_new_tokens=40, structured_output=value).text
        assert json.loads(text) == {"n": 7}
    for wrong in ('{"type": "object"}', ["a"], {"type": {1, 2}}):
        with pytest.raises(OptionError, match="structured_output is"):
            plain.generate("x", structured_output=wrong)


@pytest.mark.parametrize(
    ("options", "mentioned"),
    [
        ({"num_draft_tokens": 4}, True),
        ({"num_draft_tokens": 0}, False),
        ({"method": "ngram", "num_draft_tokens": 4}, False),
    ],
    ids=str,
)
def test_draft_tokens_that_nothing_drafts_are_mentioned(
    tiny_folder: Path, options: dict[str, Any], mentioned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    SpeculativeDecoder(tiny_folder, **options).close()
    assert ("num_draft_tokens 4 is not used: nothing drafts; name a method" in caplog.text) == mentioned


def test_sampling_params_may_be_one_object(plain: SpeculativeDecoder) -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    [first, second] = plain.generate(PROMPTS[:2], params, max_new_tokens=8)
    assert first.token_ids == plain.generate(PROMPTS[0], temperature=1.0, seed=5, max_new_tokens=8).token_ids
    assert second.token_ids == plain.generate(PROMPTS[1], params, seed=6, max_new_tokens=8).token_ids
    parts = plain.stream(PROMPTS[0], params, max_new_tokens=8)
    assert [token for part in parts for token in part.token_ids] == first.token_ids
    ids = plain.tokenizer.encode(PROMPTS[0])
    assert plain.decode(ids, sampling_params=params, max_new_tokens=8).tolist() == ids + first.token_ids
    for wrong in ({"temperature": 1.0}, [params]):
        with pytest.raises(OptionError, match=r"sampling_params is one paceline\.SamplingParams"):
            plain.generate("x", wrong)  # type: ignore[call-overload]


def test_do_sample_true_samples(plain: SpeculativeDecoder) -> None:
    def token_ids(**settings: Any) -> list[int]:
        return plain.generate(PROMPTS[1], max_new_tokens=12, seed=5, **settings).token_ids

    assert token_ids(do_sample=True) == token_ids(temperature=1.0) != token_ids()
    assert token_ids(do_sample=True, temperature=0.5) == token_ids(temperature=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("max_seq_len", [16, 32])
@pytest.mark.parametrize("options", [{}, {"method": "ngram"}, {"method": "suffix", "num_draft_tokens": 24}], ids=str)
def test_a_model_of_a_short_context_loads_and_fills_it(max_seq_len: int, options: dict[str, Any]) -> None:
    """Learned positions end with the context: a warm-up or a draft beyond it would fail."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=259, n_positions=max_seq_len, n_embd=32, n_layer=2, n_head=4)
    with SpeculativeDecoder(GPT2LMHeadModel(config).eval(), tokenizer=byte_tokenizer(), **options) as decoder:
        result = decoder.generate("abcab", max_new_tokens=99, ignore_eos=True)
    assert len(result.token_ids) == max_seq_len - 5 and result.finish_reason == "length"


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_prediction_may_be_text(tiny_folder: Path) -> None:
    """Its tokens are the draft, without one that marks the beginning of a sequence."""
    with SpeculativeDecoder(tiny_folder, method="prediction", num_draft_tokens=4) as decoder:
        prediction = decoder.generate("x", max_new_tokens=24, num_draft_tokens=0).text
        ids = decoder.tokenizer.encode_continuation(prediction)
        results = [decoder.generate("x", max_new_tokens=24, prediction=given) for given in (prediction, ids)]
    of_text, of_ids = (result.stats for result in results)
    assert (of_text.drafted, of_text.accepted) == (of_ids.drafted, of_ids.accepted) and of_ids.drafted


def test_a_prediction_that_no_method_drafts_from_is_mentioned(
    plain: SpeculativeDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    plain.generate("x", max_new_tokens=1, prediction="abc")
    assert "the prediction is not used: the method none does not draft from it" in caplog.text


@pytest.mark.slow
def test_a_seed_is_a_sequence(decoder: SpeculativeDecoder) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.95}
    first, second = (decoder.generate(PROMPTS[1], seed=5, **settings).token_ids for _ in range(2))
    assert first == second
    together = decoder.generate([PROMPTS[0], PROMPTS[1]], seed=4, **settings)
    assert together[1].token_ids == first, "in a list, sequence i has seed + i"


@pytest.mark.slow
def test_a_rule_that_is_chosen_is_the_rule_with_a_seed_too(tiny_folder: Path) -> None:
    texts: dict[str | None, str] = {}
    for rule in (None, "coupled", "token"):
        with SpeculativeDecoder(tiny_folder, method="ngram", acceptance=rule) as decoder:
            texts[rule] = decoder.generate(PROMPTS[1], max_new_tokens=40, temperature=1.0, seed=3).text
    assert texts[None] == texts["coupled"] != texts["token"]


@pytest.mark.slow
def test_a_seed_gives_the_same_text_with_any_drafter_and_any_number_of_draft_tokens(tiny_folder: Path) -> None:
    texts = set()
    for options in DRAFTING:
        with SpeculativeDecoder(tiny_folder, **options) as decoder:
            texts.add(decoder.generate(PROMPTS[1], max_new_tokens=20, temperature=1.0, seed=3).text)
    assert len(texts) == 1


@pytest.mark.slow
def test_penalties_follow_the_drafts(tiny_folder: Path, tiny_model: Any) -> None:
    with SpeculativeDecoder(tiny_folder, draft_model=tiny_model, num_draft_tokens=4) as decoder:
        plain = decoder.generate(PROMPTS[0], max_new_tokens=25, presence_penalty=2.0, num_draft_tokens=0)
        drafted = decoder.generate(PROMPTS[0], max_new_tokens=25, presence_penalty=2.0)
        assert drafted.token_ids == plain.token_ids and drafted.stats.acceptance_rate == 1.0
        assert plain.token_ids != decoder.generate(PROMPTS[0], max_new_tokens=25).token_ids


# --- draft models -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_draft_that_is_the_target_is_accepted_in_full(tiny_model: Any) -> None:
    options: dict[str, Any] = {"draft_model": tiny_model, "num_draft_tokens": 4, "tokenizer": byte_tokenizer()}
    with SpeculativeDecoder(tiny_model, **options) as decoder:
        stats = decoder.generate(PROMPTS[1], max_new_tokens=50, ignore_eos=True).stats
    assert (stats.tokens_per_step, stats.steps, stats.acceptance_rate) == (5.0, 10, 1.0)


def test_a_draft_of_another_vocabulary(tiny_folder: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", swapped=4)
    with pytest.raises(PairError, match="4 of 259"):
        SpeculativeDecoder(tiny_folder, draft_model=other, num_draft_tokens=2)


@pytest.mark.slow
def test_a_padded_vocabulary_is_the_same_vocabulary(tiny_folder: Path, tmp_path: Path, tiny_model: Any) -> None:
    """Sizes inside one family differ by padding; a larger head must not draft what the target does not have."""
    other = write_tiny_model(tmp_path / "padded", seed=1, vocab_size=320)
    with SpeculativeDecoder(tiny_folder, draft_model=other, num_draft_tokens=3) as decoder:
        expected = generated_by_transformers(tiny_model, decoder, PROMPTS[0])
        assert decoder.generate(PROMPTS[0], max_new_tokens=30).token_ids == expected
        sampled = decoder.generate(PROMPTS[0], max_new_tokens=60, temperature=2.0, seed=1, ignore_eos=True)
    assert max(sampled.token_ids) < 259


# --- threads and interrupts -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["hf", "native"])
def test_four_threads_get_what_one_thread_gets(runner: str, tiny_folder: Path) -> None:
    prompts = [f"{prompt} {number}" for number, prompt in enumerate(PROMPTS * 6)]
    with SpeculativeDecoder(tiny_folder, runner=runner, method="ngram", num_draft_tokens=3) as decoder:
        alone = [decoder.generate(prompt, max_new_tokens=12).text for prompt in prompts]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda prompt: decoder.generate(prompt, max_new_tokens=12).text, prompts))
    assert together == alone


@pytest.mark.slow
def test_generation_goes_on_after_an_interrupt(plain: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a caller waits: its request is aborted, and the next one runs."""
    import concurrent.futures

    expected = plain.generate(PROMPTS[0], max_new_tokens=10).token_ids
    wait = concurrent.futures.Future.result

    def interrupted(future: Any, timeout: float | None = None) -> Any:
        if threading.current_thread() is threading.main_thread():
            monkeypatch.setattr(concurrent.futures.Future, "result", wait)
            raise KeyboardInterrupt
        return wait(future, timeout)

    monkeypatch.setattr(concurrent.futures.Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plain.generate(PROMPTS[1], max_new_tokens=450, ignore_eos=True)
    assert plain.generate(PROMPTS[0], max_new_tokens=10).token_ids == expected
    assert plain.stats().spec.new_tokens < 450, "the interrupted request was aborted, not finished"


# --- what is wrong is a typed error -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"num_draft_tokens": 200},
        {"num_draft_tokens": "many"},
        {"colour": "red"},
        {"method": "magic"},
        {"method": 3},
        {"max_num_seqs": 0},
        {"acceptance": "sure"},
        {"device": "cuda:99"},
        {"device": 3.5},
        {"dtype": 32},
        {"runner": "fast"},
        {"engine": "steam"},
        {"draft_options": None},
        {"draft_options": ["nodes"]},
        {"batch_invariant": True, "device": "cpu"},
        {"max_model_len": 1},
        {"draft_model": 5},
    ],
    ids=str,
)
def test_impossible_options_are_option_errors(tiny_folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        SpeculativeDecoder(tiny_folder, **options)


@pytest.mark.parametrize("model", [None, 7, b"x", "", object()], ids=["none", "int", "bytes", "empty", "object"])
def test_what_is_no_model_is_a_typed_error(model: Any) -> None:
    with pytest.raises(PacelineError, match="model"):
        SpeculativeDecoder(model, tokenizer=byte_tokenizer())


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean num_draft_tokens"):
        SpeculativeDecoder("default", num_draft_token=3)


@pytest.mark.parametrize(
    ("prompt", "settings"),
    [
        ("", {}),
        ([], {}),
        (None, {}),
        (5, {}),
        ([[]], {}),
        (["fine", ""], {}),
        ("x" * 600, {}),
        ([999], {}),
        ([1.5], {}),
        ("x", {"max_new_tokens": -1}),
        ("x", {"max_new_tokens": "ten"}),
        ("x", {"tempreature": 1}),
        ("x", {"temperature": "warm"}),
        ("x", {"stop": [""]}),
        ("x", {"stop": 5}),
        ("x", {"seed": "abc"}),
        ("x", {"logprobs": -1}),
        ("x", {"logprobs": 10**6}),
        ("x", {"logit_bias": [1]}),
        ("x", {"num_draft_tokens": 500}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_impossible_requests_are_typed_errors(plain: SpeculativeDecoder, prompt: Any, settings: dict[str, Any]) -> None:
    with pytest.raises((OptionError, PromptError)):
        plain.generate(prompt, **settings)


@pytest.mark.parametrize(
    "ids",
    [[], [[[1, 2]]], torch.zeros(2, 0, dtype=torch.int64), [1.5], "abc", None, [[1, 2], [3]], torch.ones(1, 2, 3)],
    ids=lambda value: str(value)[:30],
)
def test_ids_that_are_no_batch_are_prompt_errors(plain: SpeculativeDecoder, ids: Any) -> None:
    with pytest.raises(PromptError):
        plain.decode(ids)


UNFINISHED = """
import sys
from paceline import SpeculativeDecoder

stream = SpeculativeDecoder(sys.argv[1], method="none").stream("abc", max_new_tokens=100_000, ignore_eos=True)
next(stream)
"""


@pytest.mark.slow
def test_a_program_that_ends_while_a_model_writes_ends_well(tiny_folder: Path) -> None:
    """The interpreter ends threads wherever they are; inside torch that aborts the process."""
    for _ in range(2):
        command = [sys.executable, "-c", UNFINISHED, str(tiny_folder)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
