"""Structured output: what comes must be JSON of the schema, with and without reasoning, sampled and greedy."""

from __future__ import annotations

import json
from typing import Any

from paceline.doctor.check import Check, Exchange
from paceline.doctor.examination import Examination
from paceline.doctor.material import passage, sentence
from paceline.doctor.query import Query, chat
from paceline.doctor.scenario import EXACT_ERROR, Scenario

TOKENS = 160
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "enum": ["hill", "station", "mill", "sea"]},
        "open": {"type": "boolean"},
        "grade": {"type": "string", "enum": ["low", "middle", "high"]},
        "tags": {
            "type": "array",
            "items": {"type": "string", "enum": ["old", "new", "wet"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["place", "open", "grade", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "report", "schema": SCHEMA, "strict": True}}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


async def run(exam: Examination) -> None:
    valid = exam.check("every answer is JSON of its schema")
    thinking = exam.check("the same with reasoning: the schema holds for the answer after it")
    variants = exam.check("greedy JSON with and without speculation")
    if not exam.server.has_chat:
        for check in (valid, thinking, variants):
            check.missing("the server has no chat completions")
        return
    await exam.guarded(valid, _valid(exam, valid))
    await exam.guarded(thinking, _thinking(exam, thinking))
    if valid.compared and not valid.faults:
        await exam.guarded(variants, _variants(exam, variants))
    else:
        variants.missing("structured output is not offered, or wrong")


def _query(exam: Examination) -> Query:
    text = f"{passage(exam.rng, 80)} {sentence(exam.rng)} Describe the place in JSON."
    return chat([{"role": "user", "content": text}], max_tokens=TOKENS, response_format=FORMAT)


async def _valid(exam: Examination, check: Check) -> None:
    for index in range(2 * exam.effort.prompts):
        query = _query(exam)
        query = query.changed(temperature=1, seed=exam.rng.randrange(1 << 31)) if index % 2 else query
        _examine(check, await exam.ask(query, stream=index % 3 == 2))


async def _thinking(exam: Examination, check: Check) -> None:
    for _ in range(exam.effort.prompts):
        exchange = await exam.ask(_query(exam).changed(max_tokens=4 * TOKENS, **THINKING))
        if not exchange.answer.reasoning:
            check.missing("no answer had reasoning")
            return
        _examine(check, exchange)


async def _variants(exam: Examination, check: Check) -> None:
    await exam.compare_variants(check, [_query(exam) for _ in range(exam.effort.prompts)])


def _examine(check: Check, exchange: Exchange) -> None:
    """An answer cut off by its length shows nothing."""
    answer = exchange.answer
    if answer.finish_reason == "length":
        check.note("an answer was cut off by max_tokens") if not check.notes else None
        return
    check.passed()
    problem = problem_of(answer.text)
    if problem is not None:
        check.fault(problem, [exchange], json.dumps(SCHEMA), answer.text)


def problem_of(text: str) -> str | None:
    """What is wrong with a text that must match SCHEMA; None: nothing."""
    try:
        document = json.loads(text)
    except ValueError as error:
        return f"the answer is not JSON: {error}"
    if not isinstance(document, dict) or set(document) != set(SCHEMA["properties"]):
        return f"the answer has not the properties of the schema: {text[:80]!r}"
    properties = SCHEMA["properties"]
    choices = [name for name in ("place", "grade") if document[name] not in properties[name]["enum"]]
    tags = document["tags"]
    is_tags = isinstance(tags, list) and 1 <= len(tags) <= 3 and set(map(str, tags)) <= {"old", "new", "wet"}
    if choices or not isinstance(document["open"], bool) or not is_tags:
        return f"a value is not what the schema allows: {text[:120]!r}"
    return None


SCENARIO = Scenario(
    "json-schema", "structured output is valid, with speculation and reasoning", EXACT_ERROR, run, order=90
)
