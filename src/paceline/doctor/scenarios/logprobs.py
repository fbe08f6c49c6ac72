"""Log-probabilities against those the server gives when it is asked again, token by token."""

from __future__ import annotations

import math
from itertools import accumulate

from paceline.doctor.answer import Answer, TokenChoice
from paceline.doctor.check import Check, Exchange
from paceline.doctor.client import RequestRefused
from paceline.doctor.examination import Examination
from paceline.doctor.material import passage, repetitive
from paceline.doctor.near_ties import drift
from paceline.doctor.query import Query, completion
from paceline.doctor.scenario import GREEDY_ERROR, Scenario

POSITIONS = 8  # of an answer that are asked again
SLACK = 1e-3


async def run(exam: Examination) -> None:
    sound = exam.check("log-probabilities are those of a distribution, and the greedy token is the likeliest")
    again = exam.check("log-probabilities are those of the same text asked again")
    echoed = exam.check("log-probabilities are those of the same text as a prompt (echo)")
    if not exam.server.has_completions or not exam.server.has_logprobs:
        for check in (sound, again, echoed):
            check.missing("the server gives no log-probabilities of completions")
        return
    for index in range(max(2, exam.effort.prompts // 2)):
        text = passage(exam.rng, 240) if index % 2 else repetitive(exam.rng, 200)
        await exam.guarded(again, _examine(exam, text, (sound, again, echoed)))


async def _examine(exam: Examination, text: str, checks: tuple[Check, Check, Check]) -> None:
    sound, again, echoed = checks
    query = (await exam.primed(text)).with_logprobs()
    text = query.body["prompt"]
    exchange = await exam.ask(query)
    for index, choice in enumerate(exchange.answer.tokens):
        _sound(sound, exchange, index, choice)
    await _again(exam, again, exchange, text)
    await exam.guarded(echoed, _echo(exam, echoed, exchange, text))


def _sound(check: Check, exchange: Exchange, index: int, choice: TokenChoice) -> None:
    """What every right answer has, whatever the model."""
    check.passed()
    total = sum(math.exp(value) for value in choice.top.values())
    best = max(choice.top.values(), default=choice.logprob)
    token = choice.data.decode(errors="replace")
    if not choice.top and any(other.top for other in exchange.answer.tokens):
        message = f"token {index + 1}, {token!r}, has log-probability {choice.logprob:.3g} and no alternatives"
        check.fault(message + ", unlike others", [exchange])
    elif abs(choice.top.get(choice.data, choice.logprob) - choice.logprob) > SLACK:
        listed = choice.top[choice.data]
        message = (
            f"token {index + 1}, {token!r}, is given {choice.logprob:.3f}, and {listed:.3f} among its alternatives"
        )
        check.fault(message, [exchange])
    elif choice.logprob > SLACK or total > 1 + SLACK:
        check.fault(f"token {index + 1}, {token!r}: the probabilities add up to {total:.3f}", [exchange])
    elif choice.logprob < best - max(SLACK, check.near_tie):
        check.fault(
            f"token {index + 1}, {token!r}, is not the likeliest: {choice.logprob:.3f} under {best:.3f}", [exchange]
        )


async def _again(exam: Examination, check: Check, exchange: Exchange, text: str) -> None:
    """Go on from the middle of the answer with one token. A prompt that is cut into other tokens is left out."""
    answer, base = exchange.answer, exchange.answer.usage.prompt_tokens
    places = sorted(exam.rng.sample(range(len(answer.tokens)), min(POSITIONS, len(answer.tokens))))
    for place in places:
        written = b"".join(choice.data for choice in answer.tokens[:place])
        if not _is_text(written):
            continue
        query = completion(text + written.decode(), max_tokens=1).with_logprobs()
        other = await exam.ask(query)
        if base is None or other.answer.usage.prompt_tokens != base + place or not other.answer.tokens:
            continue
        check.passed()
        _compare(check, answer.tokens[place : place + 1], other.answer.tokens[:1], [exchange, other], place)
    if not check.compared:
        check.missing("no continuation was cut into the same tokens")


async def _echo(exam: Examination, check: Check, exchange: Exchange, text: str) -> None:
    """The prompt and the answer as one prompt: a single pass gives all log-probabilities at once."""
    answer = exchange.answer
    query: Query = completion(text + answer.text, max_tokens=1, echo=True, logprobs=5)
    echo = await exam.ask(query)
    tokens = _answer_tokens(echo.answer, text)
    if [item.data for item in tokens[: len(answer.tokens)]] != [item.data for item in answer.tokens]:
        raise RequestRefused("echo gives no log-probabilities, or cuts the text into other tokens")
    check.passed()
    _compare(check, answer.tokens, tokens, [exchange, echo], 0)


def _answer_tokens(echo: Answer, text: str) -> list[TokenChoice]:
    """The tokens after the prompt."""
    ends = list(accumulate(len(choice.data) for choice in echo.tokens))
    start = len(text.encode())
    return [choice for choice, end in zip(echo.tokens, ends) if end - len(choice.data) >= start]


def _compare(
    check: Check, first: list[TokenChoice], second: list[TokenChoice], exchanges: list[Exchange], offset: int
) -> None:
    change = drift(first, second)
    if change.largest > check.drift_limit:
        place, token = offset + change.index + 1, change.token.decode(errors="replace")
        check.fault(f"token {place}: the log-probability of {token!r} differs by {change.largest:.2g}", exchanges)


def _is_text(data: bytes) -> bool:
    return data.decode(errors="replace").encode() == data


SCENARIO = Scenario("logprobs", "log-probabilities can be recomputed", GREEDY_ERROR, run, order=45)
