"""Engine outputs to responses and chunks, without a model or a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from paceline.core.sampling import SamplingParams
from paceline.core.stats import SpecStats
from paceline.core.types import Request, RequestOutput, TokenLogprob
from paceline.errors import StepFailed
from paceline.serve.logprob_format import MIN_LOGPROB, TokenFormatter
from paceline.serve.requests import ChoiceRequest, CompletionTask
from paceline.serve.responses import ChatFormat, ChoiceDelta, CompletionFormat, Json, ResponseBuilder
from paceline.serve.token_text import TokenText, token_text
from tests.serve.toy_engine import EOS, AsciiTokenizer

FORMATTER = TokenFormatter(TokenText(AsciiTokenizer()), frozenset({EOS}))
STATS = SpecStats(new_tokens=4, steps=2, drafted=3, accepted=2)
OUTPUTS = [
    RequestOutput("ab", (97, 98), from_draft=True),
    RequestOutput("c", (99,), num_drafted=3),
    RequestOutput("", (EOS,), finish_reason="stop", stats=STATS, num_drafted=0),
]


def choice(echo: str = "", **fields: Any) -> ChoiceRequest:
    return ChoiceRequest(Request([1, 2], SamplingParams(), 8, **fields), echo)


def task(*choices: ChoiceRequest, **fields: Any) -> CompletionTask:
    return CompletionTask(list(choices) or [choice()], 2, **fields)


async def deltas(outputs: list[RequestOutput], num_choices: int = 1) -> AsyncGenerator[ChoiceDelta, None]:
    """The outputs of every choice, in turn."""
    for output in outputs:
        for index in range(num_choices):
            yield ChoiceDelta(index, output)


def builder(completion_task: CompletionTask, chat: bool = False) -> ResponseBuilder:
    return ResponseBuilder(ChatFormat(FORMATTER) if chat else CompletionFormat(FORMATTER), completion_task, "model")


def whole(completion_task: CompletionTask, outputs: list[RequestOutput] = OUTPUTS, chat: bool = False) -> Json:
    response = builder(completion_task, chat)
    return asyncio.run(response.whole(deltas(outputs, len(completion_task.choices))))


def chunks(completion_task: CompletionTask, outputs: list[RequestOutput] = OUTPUTS, chat: bool = False) -> list[Json]:
    async def collect() -> list[Json]:
        response = builder(completion_task, chat)
        return [chunk async for chunk in response.chunks(deltas(outputs, len(completion_task.choices)))]

    return asyncio.run(collect())


# --- whole responses --------------------------------------------------------------------------------------------------


def test_a_chat_response_is_a_message() -> None:
    document = whole(task(), chat=True)
    assert document["id"].startswith("chatcmpl-") and document["object"] == "chat.completion"
    assert document["model"] == "model" and document["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "abc", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": None,
        }
    ]


def test_a_completion_echoes_its_prompt() -> None:
    document = whole(task(choice("> "), choice()))
    assert document["object"] == "text_completion"
    assert [entry["text"] for entry in document["choices"]] == ["> abc", "abc"]
    assert [entry["index"] for entry in document["choices"]] == [0, 1]


def test_usage_counts_tokens_of_all_choices_and_the_prompt_once() -> None:
    usage = whole(task(choice(), choice()))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 8, 10)
    assert set(usage["completion_tokens_details"].values()) == {0}


def test_usage_counts_the_draft_tokens_of_a_prediction() -> None:
    details = whole(task(choice(prediction=[97]), choice()))["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 0, "accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1}


def test_speculation_statistics_are_added_where_asked_for() -> None:
    stats = whole(task(include_stats=True))["choices"][0]["x_paceline"]
    assert stats["from_draft_mask"] == [1, 1, 0, 0] and stats["accepted"] == 2 and stats["tokens_per_step"] == 2
    assert "x_paceline" not in whole(task())["choices"][0]


def test_the_access_log_gets_counts_and_no_text() -> None:
    response = builder(task(choice(), choice()))
    asyncio.run(response.whole(deltas(OUTPUTS, 2)))
    assert response.log_fields() == {"new_tokens": 8, "draft_tokens": 6, "accepted_tokens": 4}


# --- streams ----------------------------------------------------------------------------------------------------------


def test_the_chunks_of_a_chat_open_speak_and_close() -> None:
    documents = chunks(task(), chat=True)
    assert {document["object"] for document in documents} == {"chat.completion.chunk"}
    assert [document["choices"][0]["delta"] for document in documents] == [
        {"role": "assistant", "content": ""},
        {"content": "ab"},
        {"content": "c"},
        {},
    ]
    assert [document["choices"][0]["finish_reason"] for document in documents] == [None, None, None, "stop"]
    assert all("usage" not in document for document in documents)


def test_a_completion_echoes_its_prompt_with_its_first_output() -> None:
    entries = [document["choices"][0] for document in chunks(task(choice("> "), choice()))]
    firsts = [next(entry["text"] for entry in entries if entry["index"] == index) for index in (0, 1)]
    assert firsts == ["> ab", "ab"]
    assert all(entry["text"] or entry["finish_reason"] for entry in entries), "no chunk is empty but the last"


def test_the_last_text_of_a_chat_comes_with_the_finish_reason() -> None:
    outputs = [RequestOutput("ab", (97, 98)), RequestOutput("c", (99,), finish_reason="length", stats=STATS)]
    last = chunks(task(), outputs, chat=True)[-1]["choices"][0]
    assert last["delta"] == {"content": "c"} and last["finish_reason"] == "length"


def test_a_chat_begins_with_the_message_that_it_continues() -> None:
    documents = chunks(task(choice("once ")), chat=True)
    assert documents[0]["choices"][0]["delta"] == {"role": "assistant", "content": "once "}
    assert whole(task(choice("once ")), chat=True)["choices"][0]["message"]["content"] == "once abc"


def test_the_usage_of_a_stream_is_its_last_chunk() -> None:
    documents = chunks(task(include_usage=True))
    assert documents[-1]["choices"] == [] and documents[-1]["usage"] == whole(task())["usage"]
    assert all(document["usage"] is None for document in documents[:-1])


def test_every_chunk_says_where_its_tokens_come_from() -> None:
    documents = chunks(task(include_stats=True))
    assert [document["choices"][0].get("x_paceline") for document in documents[:3]] == [
        {"from_draft": True, "num_tokens": 2, "num_draft_tokens": None},
        {"from_draft": False, "num_tokens": 1, "num_draft_tokens": 3},
        {"from_draft": False, "num_tokens": 1, "num_draft_tokens": 0},
    ]
    assert documents[3]["choices"][0]["x_paceline"]["from_draft_mask"] == [1, 1, 0, 0]


def test_the_first_chunk_waits_for_the_first_output() -> None:
    async def fail() -> AsyncGenerator[ChoiceDelta, None]:
        raise StepFailed("broken")
        yield

    async def first() -> None:
        await anext(builder(task()).chunks(fail()))

    with pytest.raises(StepFailed):
        asyncio.run(first())


def test_closing_the_chunks_closes_the_outputs() -> None:
    closed: list[bool] = []

    async def endless() -> AsyncGenerator[ChoiceDelta, None]:
        try:
            while True:
                yield ChoiceDelta(0, OUTPUTS[0])
        finally:
            closed.append(True)

    async def leave() -> None:
        stream = builder(task()).chunks(endless())
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert closed == [True]


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_chat_logprobs_have_bytes_and_alternatives_and_no_end_token() -> None:
    entries = (TokenLogprob(97, -0.5, ((97, -0.5), (98, float("-inf")))), TokenLogprob(EOS, -0.1))
    outputs = [RequestOutput("a", (97, EOS), logprobs=entries, finish_reason="stop", stats=STATS)]
    content = whole(task(choice(logprobs=2)), outputs, chat=True)["choices"][0]["logprobs"]["content"]
    assert content == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "b", "logprob": MIN_LOGPROB, "bytes": [98]},
            ],
        }
    ]


def test_completion_logprobs_have_offsets_in_the_whole_text() -> None:
    outputs = [
        RequestOutput("ab", (97, 98), logprobs=(TokenLogprob(97, -0.5), TokenLogprob(98, -0.25))),
        RequestOutput("c", (99,), logprobs=(TokenLogprob(99, -0.1),), finish_reason="length", stats=STATS),
    ]
    logprobs = whole(task(choice(logprobs=0)), outputs)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"] and logprobs["token_logprobs"] == [-0.5, -0.25, -0.1]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["top_logprobs"] == [{"a": -0.5}, {"b": -0.25}, {"c": -0.1}], "the token itself is always there"
    streamed = [document["choices"][0]["logprobs"] for document in chunks(task(choice(logprobs=0)), outputs)]
    assert [entry and entry["text_offset"] for entry in streamed] == [[0, 1], [2]]


def test_the_last_text_of_a_completion_comes_with_the_finish_reason() -> None:
    outputs = [RequestOutput("ab", (97, 98)), RequestOutput("c", (99,), finish_reason="length", stats=STATS)]
    last = [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks(task(), outputs)]
    assert last == [("ab", None), ("c", "length")]


def test_a_token_that_is_part_of_a_character_has_its_own_byte() -> None:
    from paceline.hub.tokenizer import Tokenizer
    from tests.support.tiny import byte_tokenizer

    tokenizer = Tokenizer(byte_tokenizer())
    text = token_text(tokenizer)
    parts = text.encode("é")
    assert [text.token_bytes(token) for token in parts] == [[0xC3], [0xA9]]
    assert text.token_bytes(257) is None and text.decode([257]) == "</s>"  # a special token adds no bytes
