"""Many requests at a time, of mixed lengths, some of which are broken off."""

from __future__ import annotations

import asyncio

from paceline.doctor.check import Check
from paceline.doctor.client import RequestFailed, RequestRefused
from paceline.doctor.examination import Examination
from paceline.doctor.material import passage, repetitive
from paceline.doctor.query import Query
from paceline.doctor.scenario import GREEDY_ERROR, Scenario

LENGTHS = (4, 24, 9, 40, 16)  # tokens of the answers, in turn


async def run(exam: Examination) -> None:
    for load in exam.effort.loads:
        check = exam.check(f"{load} at a time give the answers of one at a time")
        await exam.guarded(check, _compare(exam, check, load))


def _queries(exam: Examination, number: int) -> list[Query]:
    chars = min(exam.chars(max(LENGTHS)), 800)
    return [
        exam.prompt(
            (repetitive if index % 3 else passage)(exam.rng, chars // (1 + index % 4)),
            max_tokens=LENGTHS[index % len(LENGTHS)],
        )
        for index in range(number)
    ]


async def _compare(exam: Examination, check: Check, load: int) -> None:
    queries = _queries(exam, load)
    alone = [await exam.ask(query) for query in queries]
    broken = [asyncio.create_task(_break_off(exam, query)) for query in _queries(exam, load // 4)]
    try:
        together = await exam.ask_together(queries, load)
    finally:
        await asyncio.gather(*broken, return_exceptions=True)
    for tested, reference in zip(together, alone):
        await check.same(tested, reference)
    check.note(f"{len(broken)} streams were broken off meanwhile")


async def _break_off(exam: Examination, query: Query) -> None:
    try:
        await exam.server.client.stream(query.changed(max_tokens=max(LENGTHS)), chunks=3)
    except (RequestFailed, RequestRefused):
        return  # what happens to a request that is given up is not compared


SCENARIO = Scenario(
    "concurrency", "answers under load, with disconnects, are those given alone", GREEDY_ERROR, run, order=60
)
