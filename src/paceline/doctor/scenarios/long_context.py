"""A needle at several depths of a long prompt."""

from __future__ import annotations

from paceline.doctor.check import Check
from paceline.doctor.examination import Examination
from paceline.doctor.material import passage
from paceline.doctor.query import Query
from paceline.doctor.scenario import GREEDY_ERROR, Scenario

TIMES = 2  # longer than other prompts


async def run(exam: Examination) -> None:
    needles = _needles(exam)
    warm = exam.check("a needle in a long prompt, cold and warm")
    await exam.guarded(warm, _cold_and_warm(exam, warm, needles))
    variants = exam.check("a needle in a long prompt, with and without speculation")
    await exam.guarded(variants, _variants(exam, variants, needles))


def _needles(exam: Examination) -> dict[str, Query]:
    """Requests by the number that is hidden in them, at depths from the start to the end."""
    chars = exam.server.fitting(TIMES * exam.effort.chars, exam.effort.tokens)
    tasks: dict[str, Query] = {}
    for index in range(exam.effort.prompts):
        secret = str(exam.rng.randrange(10**6, 10**7))
        text = passage(exam.rng, chars - 120)
        place = text.find(". ", int(len(text) * (index + 0.5) / exam.effort.prompts)) + 2
        hidden = f"{text[:place]}The secret number is {secret}. {text[place:]}"
        tasks[secret] = exam.continuation(f"{hidden}\n\nThe secret number is", max_tokens=16)
    return tasks


async def _cold_and_warm(exam: Examination, check: Check, tasks: dict[str, Query]) -> None:
    recalled = 0
    for secret, query in tasks.items():
        cold = await exam.ask(query)
        await check.same(await exam.ask(query), cold)
        recalled += secret in cold.answer.content
        length = cold.answer.usage.prompt_tokens
    check.note(f"prompts of about {length} tokens; the model recalls {recalled} of {len(tasks)}")


async def _variants(exam: Examination, check: Check, tasks: dict[str, Query]) -> None:
    await exam.compare_variants(check, tasks.values())


SCENARIO = Scenario("long-context", "long prompts are read alike in every way of asking", GREEDY_ERROR, run, order=80)
