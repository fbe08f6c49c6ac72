"""Tokens, log-probabilities, offsets and text agree, whatever stop strings hold back and cut, streamed or whole."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.sampling import SamplingParams
from paceline.core.stats import SpecStats
from paceline.core.stopping import StopRules
from paceline.core.types import Request, RequestOutput, TokenLogprob
from paceline.hub.tokenizer import Tokenizer
from paceline.serve.logprob_format import TokenFormatter
from paceline.serve.requests import ChoiceRequest, CompletionTask
from paceline.serve.responses import ChatFormat, ChoiceDelta, CompletionFormat, ResponseBuilder
from paceline.serve.token_text import token_text

SAMPLE = "to be, or not to be: that is the question. été über naïve 日本 🙂 " * 4
EOS = 0
PIECES = ["to be", " or not", " that", " que", "stion", "été", "日", "本", "🙂", ".", "\n", " ", "o", "<", "a"]


@cache
def tokenizer() -> Tokenizer:
    """Tokens of several characters, and single bytes for all else."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    ends = ["</s>", "<s>"]
    bpe.train_from_iterator(
        [SAMPLE], trainers.BpeTrainer(vocab_size=320, special_tokens=ends, initial_alphabet=alphabet)
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", bos_token="<s>"))


def formatter() -> TokenFormatter:
    return TokenFormatter(token_text(tokenizer()), frozenset({EOS}))


def engine_outputs(request: Request, tokens: list[int], sizes: list[int]) -> list[RequestOutput]:
    """What an engine reports of these tokens, in steps of these sizes, until a stop rule ends the sequence."""
    rules = StopRules(
        request.max_new_tokens, frozenset({EOS}), request.stop, tokenizer().decode, include_stop=request.include_stop
    )
    detokenizer = tokenizer().stream(request.stop, include_stop=request.include_stop)
    outputs: list[RequestOutput] = []
    ids: list[int] = []
    for size in sizes:
        run = tokens[len(ids) : len(ids) + size]
        stop = rules.check([*ids, *run], len(run))
        run = run[: stop.kept - len(ids)] if stop else run
        ids += run
        reason = rules.stop_reason(ids) if stop and stop.reason == "stop" else None
        is_end_token = stop is not None and stop.reason == "stop" and reason is None
        text = detokenizer.feed(run[:-1] if is_end_token else run) + (detokenizer.flush() if stop else "")
        logprobs = tuple(entry(token, request.logprobs or 0) for token in run)
        stats = SpecStats(new_tokens=len(ids)) if stop else None
        finish = stop.reason if stop else None
        outputs.append(RequestOutput(text, tuple(run), False, logprobs, finish, stats, None, reason))
        if stop:
            break
    return outputs


def entry(token: int, top: int) -> TokenLogprob:
    """Some alternatives, the token itself among them now and then, many of them spelled alike."""
    others = [(token * 7 + place * 31) % 320 for place in range(top)]
    pairs = {other: -1.0 - place / 10 for place, other in enumerate(others)}
    return TokenLogprob(token, pairs.get(token, -9.0 - token / 1000), tuple(pairs.items()))


def builder(request: Request, chat: bool, **options: Any) -> ResponseBuilder:
    task = CompletionTask([ChoiceRequest(request)], len(request.prompt), return_token_ids=True, **options)
    shape = ChatFormat(formatter()) if chat else CompletionFormat(formatter())
    return ResponseBuilder(shape, task, "model")


async def deltas(outputs: list[RequestOutput]) -> AsyncGenerator[ChoiceDelta, None]:
    for output in outputs:
        yield ChoiceDelta(0, output)


def whole(request: Request, outputs: list[RequestOutput], chat: bool = False, **options: Any) -> Any:
    return asyncio.run(builder(request, chat, **options).whole(deltas(outputs)))["choices"][0]


def streamed(request: Request, outputs: list[RequestOutput], chat: bool = False) -> list[Any]:
    async def collect() -> list[Any]:
        return [chunk["choices"][0] async for chunk in builder(request, chat).chunks(deltas(outputs))]

    return asyncio.run(collect())


texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=14).map("".join)
@st.composite
def cases(draw: st.DrawFn) -> tuple[Request, list[RequestOutput]]:
    text = draw(texts)
    tokens = tokenizer().encode(text) + [EOS]
    starts = draw(st.lists(st.integers(0, len(text) - 1), max_size=2))
    stops = [text[start : start + draw(st.integers(1, 9))] for start in starts]
    request = Request(
        [5, 6],
        SamplingParams(),
        draw(st.integers(1, len(tokens) + 1)),
        stop=tuple(stops),
        logprobs=draw(st.integers(0, 6)),
        include_stop=draw(st.booleans()),
    )
    sizes = draw(st.lists(st.integers(1, 5), min_size=len(tokens), max_size=len(tokens)))
    return request, engine_outputs(request, tokens, sizes)


property_settings = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@property_settings
@given(cases())
def test_tokens_offsets_and_text_agree(case: tuple[Request, list[RequestOutput]]) -> None:
    request, outputs = case
    choice = whole(request, outputs)
    text, logprobs = choice["text"], choice["logprobs"]
    assert text == "".join(output.text for output in outputs)
    lengths = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert len(lengths) == 1
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets) and all(offset <= len(text) for offset in offsets)
    if text:
        assert offsets[0] == 0, "the first token starts the text"
    for token, (start, end) in zip(logprobs["tokens"], itertools.pairwise([*offsets, len(text)])):
        is_text = not token.startswith("bytes:") and token != "</s>"
        assert not is_text or text[start:end] == token, "tokens tile the text"
    ids = [entry.token for output in outputs for entry in output.logprobs or ()]
    for token, top, number in zip(logprobs["tokens"], logprobs["top_logprobs"], ids):
        assert token in top and top[token] == entry(number, request.logprobs or 0).logprob
        expected = len({number, *(other for other, _ in entry(number, request.logprobs or 0).top)})
        assert len(top) == expected, "no alternative is lost because it is spelled like another"


@pytest.mark.slow
@property_settings
@given(cases())
def test_a_stream_carries_the_same_entries(case: tuple[Request, list[RequestOutput]]) -> None:
    request, outputs = case
    expected, chunks = whole(request, outputs), streamed(request, outputs)
    assert "".join(chunk["text"] for chunk in chunks) == expected["text"]
    for name, values in expected["logprobs"].items():
        assert [value for chunk in chunks for value in (chunk["logprobs"] or {}).get(name, [])] == values
    assert [token for chunk in chunks for token in chunk.get("token_ids", [])] == expected["token_ids"]
    assert chunks[-1]["finish_reason"] == expected["finish_reason"]
    assert chunks[-1]["stop_reason"] == expected["stop_reason"]


@pytest.mark.slow
@property_settings
@given(cases())
def test_the_bytes_of_a_chat_are_its_content(case: tuple[Request, list[RequestOutput]]) -> None:
    request, outputs = case
    choice, chunks = whole(request, outputs, chat=True), streamed(request, outputs, chat=True)
    content, entries = choice["message"]["content"], choice["logprobs"]["content"]
    if "�" not in content:
        assert b"".join(bytes(entry["bytes"] or ()) for entry in entries).decode() == content
    assert all(len(entry["top_logprobs"]) == request.logprobs or not request.logprobs for entry in entries)
    for shown in entries:
        alternatives = [other["logprob"] for other in shown["top_logprobs"]]
        assert not request.logprobs or shown["logprob"] in alternatives, "the token itself is among them"
    assert [entry for chunk in chunks for entry in (chunk["logprobs"] or {}).get("content", [])] == entries


@pytest.mark.slow
@property_settings
@given(cases())
def test_tokens_as_ids_name_every_token(case: tuple[Request, list[RequestOutput]]) -> None:
    request, outputs = case
    choice = whole(request, outputs, tokens_as_ids=True)
    ids = [f"token_id:{token}" for token in choice["token_ids"]]
    tokens = choice["logprobs"]["tokens"]
    assert tokens == ids[: len(tokens)]
    assert all(token in top for token, top in zip(tokens, choice["logprobs"]["top_logprobs"]))


def test_a_token_that_a_stop_string_cuts_is_shown_as_far_as_the_text_goes() -> None:
    tokens = tokenizer().encode("to be question")
    request = Request([5], SamplingParams(), 50, stop=("uest",), logprobs=1)
    choice = whole(request, engine_outputs(request, tokens, [1] * len(tokens)))
    assert choice["text"] == "to be q" and "".join(choice["logprobs"]["tokens"]) == "to be q"
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == "uest"


def test_the_token_that_ends_a_completion_is_shown_and_that_of_a_chat_is_not() -> None:
    tokens = [*tokenizer().encode("to be"), EOS]
    request = Request([5], SamplingParams(), 50, logprobs=1)
    outputs = engine_outputs(request, tokens, [len(tokens)])
    shown = whole(request, outputs)["logprobs"]
    assert shown["tokens"][-1] == "</s>" and shown["text_offset"][-1] == len("to be")
    chat = whole(request, outputs, chat=True)
    assert len(chat["logprobs"]["content"]) == len(tokens) - 1 and chat["token_ids"] == tokens
