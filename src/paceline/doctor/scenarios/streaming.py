"""Streamed answers and whole ones."""

from __future__ import annotations

from paceline.doctor.check import Check, Exchange
from paceline.doctor.examination import Examination
from paceline.doctor.material import ACCENTS, passage, repetitive
from paceline.doctor.query import Query, chat, completion
from paceline.doctor.scenario import GREEDY_ERROR, Scenario


async def run(exam: Examination) -> None:
    for name, queries in (("chat completions", _chats(exam)), ("completions", _completions(exam))):
        check = exam.check(f"{name}: a streamed answer is the whole one")
        if queries:
            await exam.guarded(check, _compare(exam, check, queries))
        else:
            check.missing(f"the server has no {name}")


def _texts(exam: Examination) -> list[str]:
    """Plain, repetitive and such as make an answer of several scripts, whose characters are cut into tokens."""
    texts = [passage(exam.rng, 200), repetitive(exam.rng, 300)]
    for _ in range(exam.effort.prompts - 1):
        words = exam.rng.sample(ACCENTS, 4)
        texts.append(f"{passage(exam.rng, 40)} {' '.join(words * 4)} {words[0]}")
    return texts


def _chats(exam: Examination) -> list[Query]:
    if not exam.server.has_chat:
        return []
    return [chat([{"role": "user", "content": text}], max_tokens=exam.effort.tokens) for text in _texts(exam)]


def _completions(exam: Examination) -> list[Query]:
    if not exam.server.has_completions:
        return []
    return [completion(text, max_tokens=exam.effort.tokens) for text in _texts(exam)]


async def _compare(exam: Examination, check: Check, queries: list[Query]) -> None:
    for query in queries:
        whole = await exam.ask(query)
        streamed = await exam.ask(query, stream=True)
        if await check.same(streamed, whole):
            _same_end(check, streamed, whole)
    if exam.server.has_logprobs:
        await _same_tokens(exam, check, queries[0].with_logprobs())


def _same_end(check: Check, streamed: Exchange, whole: Exchange) -> None:
    reasons = (streamed.answer.finish_reason, whole.answer.finish_reason)
    if reasons[0] != reasons[1]:
        message = f"the stream ends with finish_reason {reasons[0]!r}, the whole answer with {reasons[1]!r}"
        check.fault(message, [whole, streamed], str(reasons[1]), str(reasons[0]))


async def _same_tokens(exam: Examination, check: Check, query: Query) -> None:
    """As many tokens with log-probabilities in the stream as in the whole answer."""
    whole, streamed = await exam.ask(query), await exam.ask(query, stream=True)
    if not await check.same(streamed, whole) or not streamed.answer.tokens:
        return
    numbers = (len(streamed.answer.tokens), len(whole.answer.tokens))
    if numbers[0] != numbers[1]:
        message = f"the stream has log-probabilities of {numbers[0]} tokens, the whole answer of {numbers[1]}"
        check.fault(message, [whole, streamed], str(numbers[1]), str(numbers[0]))


SCENARIO = Scenario("streaming", "a stream adds up to the whole answer", GREEDY_ERROR, run, order=40)
