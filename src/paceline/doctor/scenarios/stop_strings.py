"""Stop strings, also those that begin inside one token and end inside another."""

from __future__ import annotations

from itertools import accumulate

from paceline.doctor.answer import Answer
from paceline.doctor.check import Check, Exchange
from paceline.doctor.examination import Examination
from paceline.doctor.material import passage, repetitive
from paceline.doctor.query import Query
from paceline.doctor.scenario import GREEDY_ERROR, Scenario

LEAST_OFFSET = 4  # characters before a stop string: an answer that ends at once shows little


async def run(exam: Examination) -> None:
    check = exam.check("an answer ends before its stop string, whole and streamed")
    await exam.guarded(check, _compare(exam, check))


async def _compare(exam: Examination, check: Check) -> None:
    for index in range(exam.effort.prompts):
        text = repetitive(exam.rng, 300) if index % 2 else passage(exam.rng, 200)
        query = exam.continuation(text)
        free = await exam.ask(query.with_logprobs() if exam.server.has_logprobs else query)
        for stop in _stops(exam, free.answer):
            for stream in (False, True):
                stopped = await exam.ask(query.changed(stop=[stop]), stream=stream)
                await _examine(check, stopped, Exchange(free.client, query, free.answer), stop)
    if not check.compared:
        check.missing("no answer was long enough to stop in")


def _stops(exam: Examination, answer: Answer) -> list[str]:
    """Pieces of the answer: across the borders of tokens where these are known, and any."""
    text = answer.text
    places = [place for place in _borders(answer) if LEAST_OFFSET < place < len(text) - 3] or list(
        range(LEAST_OFFSET + 1, len(text) - 3, 4)
    )
    chosen = exam.rng.sample(places, min(2, len(places)))
    stops = [text[place - 2 : place + 2] for place in chosen]
    stops += [text[place - 1 : place + 1] for place in chosen[:1]]
    return [stop for stop in dict.fromkeys(stops) if stop and text.find(stop) > 0]


def _borders(answer: Answer) -> list[int]:
    """Where tokens begin, in characters, for tokens that are whole characters."""
    try:
        return list(accumulate(len(choice.data.decode()) for choice in answer.tokens))
    except UnicodeDecodeError:
        return []


async def _examine(check: Check, stopped: Exchange, free: Exchange, stop: str) -> None:
    """The answer up to the stop string, and finish_reason `stop`."""
    expected = free.answer.text[: free.answer.text.find(stop)]
    if stop in stopped.answer.text:
        check.passed()
        check.fault(f"the answer goes on past the stop string {stop!r}", [stopped], expected, stopped.answer.text)
        return
    cut = Answer(expected, "stop", free.answer.tokens)
    if await check.same(stopped, _unstopped(free, cut)) and stopped.answer.finish_reason != "stop":
        reason = stopped.answer.finish_reason
        check.fault(f"finish_reason is {reason!r} after the stop string {stop!r}", [stopped], "stop", str(reason))


def _unstopped(free: Exchange, cut: Answer) -> Exchange:
    query: Query = free.query
    return Exchange(free.client, query, cut)


SCENARIO = Scenario(
    "stop-strings", "stop strings end an answer, also across the borders of tokens", GREEDY_ERROR, run, order=50
)
