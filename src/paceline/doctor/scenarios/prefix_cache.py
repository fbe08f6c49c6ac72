"""Answers from a cold and from a warm prefix cache."""

from __future__ import annotations

from paceline.doctor.check import Check, Exchange
from paceline.doctor.examination import Examination
from paceline.doctor.material import passage, sentence
from paceline.doctor.query import Query
from paceline.doctor.scenario import GREEDY_ERROR, Scenario


async def run(exam: Examination) -> None:
    again = exam.check("A, B, A again: the third answer is the first")
    await exam.guarded(again, _again(exam, again))
    shared = exam.check("prompts that share a long system prompt")
    await exam.guarded(shared, _shared(exam, shared))
    evicted = exam.check("A again after other prompts have filled the cache")
    await exam.guarded(evicted, _evicted(exam, evicted))


def _queries(exam: Examination, number: int) -> list[Query]:
    """Prompts that share all but their last sentences, with log-probabilities where there are any."""
    head = passage(exam.rng, exam.chars() // 2)
    tails = [" ".join(sentence(exam.rng) for _ in range(1 + index % 3)) for index in range(number)]
    queries = [exam.prompt(f"{head}\n\n{tail} Then") for tail in tails]
    return [query.with_logprobs() if exam.server.has_logprobs else query for query in queries]


async def _again(exam: Examination, check: Check) -> None:
    """Two prompts with nothing in common, and the first one again, twice: with and without log-probabilities."""
    for _ in range(exam.effort.prompts):
        first, other = _queries(exam, 1)[0], _queries(exam, 1)[0]
        cold, between = await exam.ask(first), await exam.ask(other)
        warm = await exam.ask(first)
        await check.same(warm, cold, [between])
        await check.same(await exam.ask(other), between, [cold])
    _note_hits(check, [warm])


async def _shared(exam: Examination, check: Check) -> None:
    """The head is read once, then every prompt is asked under it, alone and again; forced cold where possible."""
    first = await _asked_twice(exam, check, _queries(exam, exam.effort.prompts + 1))
    if not exam.server.engine.cold_field:
        check.note("no field keeps a request off the cache, so a first hit was compared with later ones only")
    _note_hits(check, first)


async def _asked_twice(exam: Examination, check: Check, queries: list[Query]) -> list[Exchange]:
    first = [await exam.ask(query) for query in queries]
    for number, (exchange, query) in enumerate(zip(first, queries)):
        await check.same(await exam.ask(query), exchange, first[:number])
        salt = exam.server.engine.cold(f"{exam.rng.getrandbits(64):x}")
        if salt:
            await check.same(exchange, await exam.ask(query.changed(**salt)), first[:number])
    return first


async def _evicted(exam: Examination, check: Check) -> None:
    """A cold; others until A may be gone; a neighbour of A that shares its head; A again."""
    first, neighbour = _queries(exam, 2)
    cold = await exam.ask(first)
    for _ in range(exam.effort.fillers):
        await exam.ask(exam.prompt(passage(exam.rng, exam.chars()), max_tokens=1))
    between = await exam.ask(neighbour)
    again = await exam.ask(first)
    await check.same(again, cold, [between])
    cached = again.answer.usage.cached_tokens
    if cached is not None:
        check.note(f"{cached} of {again.answer.usage.prompt_tokens} prompt tokens were still cached")


def _note_hits(check: Check, exchanges: list[Exchange]) -> None:
    counts = [exchange.answer.usage.cached_tokens for exchange in exchanges]
    known = [count for count in counts if count is not None]
    if known:
        check.note(f"the server reports {max(known)} cached tokens")


SCENARIO = Scenario(
    "prefix-cache", "the prefix cache changes no answer: cold, warm, shared and evicted", GREEDY_ERROR, run, order=10
)
