"""Verbatim copying of values that no model knows: UUIDs, numbers, identifiers, several scripts."""

from __future__ import annotations

from paceline.doctor.check import Check
from paceline.doctor.examination import Examination
from paceline.doctor.material import Entry, copy_task, entries
from paceline.doctor.query import Query
from paceline.doctor.scenario import GREEDY_ERROR, Scenario

NUM_ENTRIES = 12


async def run(exam: Examination) -> None:
    tasks = _tasks(exam)
    warm = exam.check("values copied from a long prompt, cold and warm")
    await exam.guarded(warm, _cold_and_warm(exam, warm, tasks))
    variants = exam.check("values copied with and without speculation")
    await exam.guarded(variants, _variants(exam, variants, tasks))


def _tasks(exam: Examination) -> dict[Entry, Query]:
    chars = exam.chars()
    records = entries(exam.rng, min(NUM_ENTRIES, max(2, chars // 60)))
    chosen = [records[index % len(records)] for index in range(exam.effort.prompts + 1)]
    return {
        entry: exam.continuation(copy_task(exam.rng, entry, [item for item in records if item is not entry], chars))
        for entry in chosen
    }


async def _cold_and_warm(exam: Examination, check: Check, tasks: dict[Entry, Query]) -> None:
    """A model that cannot copy is no fault of the server: answers are compared with each other, not with the truth."""
    exact = 0
    for entry, query in tasks.items():
        cold = await exam.ask(query)
        await check.same(await exam.ask(query), cold)
        exact += cold.answer.content.strip().startswith(entry.value)
    check.note(f"the model copies {exact} of {len(tasks)} exactly")


async def _variants(exam: Examination, check: Check, tasks: dict[Entry, Query]) -> None:
    drafted = await exam.compare_variants(check, tasks.values())
    if drafted is not None:
        check.note(f"{drafted} draft tokens were verified")


SCENARIO = Scenario("copying", "rare values are copied alike in every way of asking", GREEDY_ERROR, run, order=30)
