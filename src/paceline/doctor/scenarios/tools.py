"""Conversations of several turns with tools."""

from __future__ import annotations

import json
from typing import Any

from paceline.doctor.answer import Answer
from paceline.doctor.check import Check, Exchange
from paceline.doctor.examination import Examination
from paceline.doctor.material import NOUNS, passage
from paceline.doctor.query import Query, chat
from paceline.doctor.scenario import GREEDY_ERROR, Scenario

TURNS = 3
TOKENS = 96
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Lima", "Cairo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
# strict: without it OpenAI promises no arguments that match, and vLLM constrains none.
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of the next days.",
        "strict": True,
        "parameters": PARAMETERS,
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


async def run(exam: Examination) -> None:
    forced = exam.check("a tool that must be called is called with valid arguments")
    turns = exam.check("conversations with tool results, cold and warm")
    streams = exam.check("conversations with tool results, whole and streamed")
    variants = exam.check("conversations with tools, with and without speculation")
    if not exam.server.has_chat:
        for check in (forced, turns, streams, variants):
            check.missing("the server has no chat completions")
        return
    await exam.guarded(forced, _forced(exam, forced))
    queries = [query for _ in range(max(1, exam.effort.prompts // 2)) for query in _conversation(exam)]
    await exam.guarded(turns, _turns(exam, turns, streams, queries))
    if turns.compared:
        await exam.guarded(variants, _variants(exam, variants, queries))
    else:
        for check in (streams, variants):
            check.missing("the server takes no tools")


def _conversation(exam: Examination) -> list[Query]:
    """The turns of one conversation, each with all that was said before it. The assistant's turns are given."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": passage(exam.rng, 60)}]
    queries = []
    for turn in range(TURNS):
        city, days = exam.rng.choice(["Oslo", "Lima", "Cairo"]), exam.rng.randrange(1, 9)
        messages.append(
            {"role": "user", "content": f"What is the weather in {city} for {days} days? {exam.rng.choice(NOUNS)}"}
        )
        queries.append(_query(messages))
        call = {"name": "get_weather", "arguments": json.dumps({"city": city, "days": days})}
        number = f"call_{turn}{exam.rng.getrandbits(24):06x}"
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": number, "type": "function", "function": call}],
            },
            {
                "role": "tool",
                "tool_call_id": number,
                "content": json.dumps({"rain": exam.rng.random() < 0.5, "high": days}),
            },
        ]
        queries.append(_query(messages))
        messages.append({"role": "assistant", "content": f"It is {days} degrees in {city}."})
    return queries


def _query(messages: list[dict[str, Any]]) -> Query:
    return chat(list(messages), tools=[TOOL], max_tokens=TOKENS // 4)


async def _forced(exam: Examination, check: Check) -> None:
    for index in range(exam.effort.prompts):
        choice: Any = NAMED if index % 2 else "required"
        query = _conversation(exam)[0].changed(tool_choice=choice, max_tokens=TOKENS)
        query = query.changed(temperature=1, seed=exam.rng.randrange(1 << 31)) if index % 3 else query
        exchange = await exam.ask(query, stream=index % 2 == 1)
        if exchange.answer.finish_reason == "length":
            continue
        check.passed()
        problem = problem_of(exchange.answer)
        if problem is not None:
            check.fault(problem, [exchange], json.dumps(PARAMETERS), exchange.answer.content)
    if not check.compared:
        check.missing("every answer was cut off by max_tokens")


def problem_of(answer: Answer) -> str | None:
    """What is wrong with an answer that must call get_weather; None: nothing."""
    if not answer.tool_calls:
        return f"no tool is called, though one must be: {answer.content[:80]!r}"
    call = answer.tool_calls[0]
    try:
        arguments = json.loads(call.arguments)
    except ValueError as error:
        return f"the arguments are not JSON ({error}): {call.arguments[:80]!r}"
    right = isinstance(arguments, dict) and set(arguments) == {"city", "days"}
    if not right or arguments["city"] not in ("Oslo", "Lima", "Cairo") or not isinstance(arguments["days"], int):
        return f"the arguments do not match the schema: {call.arguments[:80]!r}"
    return None if call.name == "get_weather" else f"there is no tool {call.name!r}"


async def _turns(exam: Examination, check: Check, streams: Check, queries: list[Query]) -> None:
    first: list[Exchange] = []
    for query in queries:
        first.append(await exam.ask(query))
        await streams.same(await exam.ask(query, stream=True), first[-1], first[:-1])
    for query, cold in zip(queries, first):
        await check.same(await exam.ask(query), cold)
    calls = sum(bool(exchange.answer.tool_calls) for exchange in first)
    check.note(f"{calls} of {len(first)} answers call a tool")


async def _variants(exam: Examination, check: Check, queries: list[Query]) -> None:
    await exam.compare_variants(check, queries)


SCENARIO = Scenario("tools", "tool calls survive several turns, streams and speculation", GREEDY_ERROR, run, order=95)
