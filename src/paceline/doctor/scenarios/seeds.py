"""Seeds: the same seed gives the same answer, alone and under load."""

from __future__ import annotations

from paceline.doctor.check import Check, Exchange
from paceline.doctor.examination import Examination
from paceline.doctor.material import passage
from paceline.doctor.near_ties import binomial_tail
from paceline.doctor.query import Query
from paceline.doctor.scenario import SAMPLED_ERROR, Scenario

BOUNDARY = 0.25  # share of answers in which a draw may fall on a boundary that rounding moves
TOKENS = 12


async def run(exam: Examination) -> None:
    alone = exam.check("the same seed gives the same answer, asked twice alone")
    load = exam.check("the same seed gives the same answer under load")
    await exam.guarded(alone, _compare(exam, alone, load))


def _queries(exam: Examination) -> list[Query]:
    prompt = exam.prompt(passage(exam.rng, 160), max_tokens=TOKENS, temperature=1)
    return [prompt.changed(seed=exam.rng.randrange(1, 1 << 31)) for _ in range(exam.effort.seeds)]


async def _compare(exam: Examination, check: Check, load: Check) -> None:
    queries = _queries(exam)
    first = [await exam.ask(query) for query in queries]
    if len({exchange.answer.content for exchange in first}) < 3:
        for part in (check, load):
            part.missing("the answers hardly differ from seed to seed")
        return
    _count(exam, check, [await exam.ask(query) for query in queries], first)
    if not check.faults:
        noise = [exam.prompt(passage(exam.rng, 100), temperature=1) for _ in queries]
        mixed = await exam.ask_together([query for pair in zip(queries, noise) for query in pair], 8)
        _count(exam, load, mixed[::2], first)


def _count(exam: Examination, check: Check, tested: list[Exchange], reference: list[Exchange]) -> None:
    """Sampled answers may part where a draw is on a boundary: only more of that than rounding explains is a fault."""
    pairs = [(new, old) for new, old in zip(tested, reference) if new.answer.content != old.answer.content]
    check.passed(len(tested))
    if pairs:
        check.note(f"{len(pairs)} of {len(tested)} answers differ")
    if binomial_tail(len(pairs), len(tested), BOUNDARY) < exam.level:
        new, old = pairs[0]
        message = f"{len(pairs)} of {len(tested)} seeds give another answer the second time"
        check.fault(message, [old, new], old.answer.content, new.answer.content)


SCENARIO = Scenario("seeds", "a seed decides a sampled answer", SAMPLED_ERROR, run, order=70)
