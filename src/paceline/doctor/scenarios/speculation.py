"""Greedy answers with and without speculation."""

from __future__ import annotations

from paceline.doctor.check import Check
from paceline.doctor.examination import Examination
from paceline.doctor.material import passage, repetitive
from paceline.doctor.query import Query
from paceline.doctor.scenario import GREEDY_ERROR, Scenario


async def run(exam: Examination) -> None:
    check = exam.check("greedy answers with speculation are those without")
    await exam.guarded(check, _compare(exam, check))


async def queries(exam: Examination) -> list[Query]:
    """Repetitive prompts, where many draft tokens are accepted, and plain ones, where many are rejected."""
    tokens, asked = 2 * exam.effort.tokens, []
    chars = min(exam.chars(tokens), 600)
    for index in range(exam.effort.prompts):
        asked.append(await exam.primed(repetitive(exam.rng, chars // 2), max_tokens=tokens))
        end = "" if index % 2 else "\n\n1. "
        asked.append(exam.continuation(passage(exam.rng, chars // 2) + end, max_tokens=tokens))
    return asked


async def _compare(exam: Examination, check: Check) -> None:
    drafted = await exam.compare_variants(check, await queries(exam))
    if drafted is not None:
        check.note(f"{drafted} draft tokens were verified")
    if drafted == 0:
        check.compared = 0
        check.missing("the server has drafted nothing")


SCENARIO = Scenario("speculation", "speculation changes no greedy answer", GREEDY_ERROR, run, order=20)
