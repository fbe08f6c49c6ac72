"""Sampled tokens against the probabilities that the server itself reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.bench.outcome import Evidence
from paceline.bench.statistics import against_exact
from paceline.bench.two_samples import compare_samples, detectable_share
from paceline.doctor.answer import TokenChoice
from paceline.doctor.check import Check, Exchange
from paceline.doctor.client import RequestRefused
from paceline.doctor.examination import Examination, Variant
from paceline.doctor.material import repetitive
from paceline.doctor.query import Query
from paceline.doctor.scenario import SAMPLED_ERROR, Scenario

TOKENS = 6  # of a draw: enough for steps with draft tokens after the first token
TOP = (20, 5)  # alternatives to ask for, the first number that the server takes
AT_A_TIME = 8
RANKS = ("the likeliest token", "the second token", "a token further down", "a token not listed")
UNTRUNCATED = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0}
PARTS = 3  # checks that share the level
# Not 1: a server that verifies draft tokens at another temperature than it samples at must show. No top_p or top_k:
# rounding may put a token on either side of their edges.
TEMPERATURE = 0.7


async def run(exam: Examination) -> None:
    first = exam.check("first tokens are distributed as their log-probabilities (chi²)")
    ranks = exam.check("every token is drawn as often as its log-probability says")
    samples = exam.check("sampled answers with and without speculation have one distribution")
    query = await exam.primed_chat(repetitive(exam.rng, min(exam.chars(), 400) // 2), max_tokens=TOKENS)
    for part in (first, ranks, samples):
        part.note(f"false alarm probability {exam.level / PARTS:.1g}")
    if exam.server.has_logprobs:
        await exam.guarded(ranks, _against_logprobs(exam, first, ranks, query))
    else:
        for part in (first, ranks):
            part.missing("the server gives no log-probabilities")
    await exam.guarded(samples, _against_variants(exam, samples, query))


@dataclass(frozen=True, slots=True)
class SampledQuery:
    """A request at temperature 1 over the whole vocabulary, with so many alternatives a token."""

    query: Query
    top: int


async def _sampled(exam: Examination, query: Query) -> SampledQuery:
    """The request in the fields that the server takes."""
    for fields in (UNTRUNCATED, {"temperature": 1, "top_p": 1}):
        for number in TOP:
            sampled = query.changed(**fields).with_logprobs(number)
            try:
                await exam.ask(sampled.changed(max_tokens=1))
                return SampledQuery(sampled, number)
            except RequestRefused as error:
                refusal = error
    raise refusal


# --- against log-probabilities ----------------------------------------------------------------------------------------


async def _against_logprobs(exam: Examination, first: Check, ranks: Check, query: Query) -> None:
    sampled = await _sampled(exam, query)
    draws = await exam.ask_together([sampled.query] * exam.effort.draws, AT_A_TIME)
    level = exam.level / PARTS
    _chi2(first, draws, sampled.top, level)
    _by_rank(ranks, draws, sampled.top, level)


def listed(choice: TokenChoice, number: int) -> list[bytes]:
    """The best alternatives but the last, likeliest first. number: how many were asked for.

    Some servers add the token that was drawn, others put it in the place of the last: which tokens count must not
    depend on the draw.
    """
    return sorted(choice.top, key=lambda data: -choice.top[data])[: number - 1]


def _chi2(check: Check, draws: list[Exchange], number: int, level: float) -> None:
    """All draws have the same context for their first token, so its exact distribution is known."""
    openings = [exchange.answer.tokens[0] for exchange in draws if exchange.answer.tokens]
    exact = {data: math.exp(openings[0].top[data]) for data in listed(openings[0], number)}
    exact[b""] = max(1 - sum(exact.values()), 1e-9)
    counts = Counter(choice.data if choice.data in exact else b"" for choice in openings)
    fit = against_exact(counts, exact)
    check.passed(len(openings))
    check.note(f"p = {fit.p_value:.2g} over {fit.num_cells} cells")
    if fit.p_value < level:
        message = f"first tokens are not drawn as reported: chi² = {fit.chi2:.1f}, p = {fit.p_value:.1g}"
        shares = {data: count / len(openings) for data, count in counts.items()}
        check.fault(message, draws[:1], str(_shares(exact)), str(_shares(shares)))


def _shares(probabilities: dict[bytes, float]) -> dict[str, float]:
    best = sorted(probabilities.items(), key=lambda item: -item[1])[:8]
    return {data.decode(errors="replace"): round(value, 3) for data, value in best}


@dataclass(slots=True)
class RankCount:
    """How often tokens of a rank were drawn, how often that is expected, and the variance of that."""

    observed: int = 0
    expected: float = 0.0
    variance: float = 0.0

    def add(self, probability: float, drawn: bool) -> None:
        self.observed += drawn
        self.expected += probability
        self.variance += probability * (1 - probability)

    @property
    def p_value(self) -> float:
        """Freedman's inequality: holds for draws whose contexts depend on earlier draws, at any number of them."""
        deviation = abs(self.observed - self.expected)
        return min(1.0, 2 * math.exp(-deviation * deviation / (2 * (self.variance + deviation / 3) + 1e-12)))


def rank_counts(choices: Iterable[TokenChoice], number: int) -> list[RankCount]:
    """Over all tokens of all draws, each under the distribution that was reported for it."""
    counts = [RankCount() for _ in RANKS]
    for choice in choices:
        best = listed(choice, number)
        shares = [math.exp(choice.top[data]) for data in best]
        groups = [sum(shares[:1]), sum(shares[1:2]), sum(shares[2:])]
        groups.append(max(0.0, 1 - sum(groups)))
        rank = min(best.index(choice.data), 2) if choice.data in best else 3
        for index, (count, share) in enumerate(zip(counts, groups)):
            count.add(min(1.0, share), index == rank)
    return counts


def _by_rank(check: Check, draws: list[Exchange], number: int, level: float) -> None:
    choices = [choice for exchange in draws for choice in exchange.answer.tokens if choice.top]
    check.passed(len(choices))
    for name, count in zip(RANKS, rank_counts(choices, number)):
        if count.p_value * len(RANKS) < level:
            message = (
                f"{name} was drawn {count.observed} times, {count.expected:.1f} times by its log-probability "
                f"(p < {count.p_value * len(RANKS):.1g})"
            )
            check.fault(message, draws[:1], f"{count.expected:.1f}", str(count.observed))


# --- against another way ----------------------------------------------------------------------------------------------


async def _against_variants(exam: Examination, check: Check, query: Query) -> None:
    variants = exam.variants()
    if not variants:
        check.missing("no way to turn speculation off; name a second server with --against")
    for variant in variants:
        await _two_samples(exam, check, query, variant)


async def _two_samples(exam: Examination, check: Check, query: Query, variant: Variant) -> None:
    """Without log-probabilities and seeds: some servers verify by another rule where either is asked for."""
    drawn = query.changed(temperature=TEMPERATURE, top_p=1, max_tokens=4)
    other = drawn.changed(**variant.fields)
    tested = await exam.ask_together([drawn] * exam.effort.draws, AT_A_TIME)
    reference = await exam.ask_together([other] * exam.effort.draws, AT_A_TIME, variant.client)
    first, second = (Counter(item.answer.content for item in draws) for draws in (tested, reference))
    level = exam.level / PARTS / len(exam.variants())
    result = compare_samples(first, second, level)
    missing = Evidence().missing(len(tested), detectable_share(first, second, level, result.num_testable))
    check.note(f"p = {result.p_value:.2g} against {variant.name}")
    if result.p_value < level:
        check.fault(f"another distribution than {variant.name}: p = {result.p_value:.1g}", [tested[0], reference[0]])
    elif missing:
        check.missing(missing)
        return
    check.passed(len(tested))


SCENARIO = Scenario("sampling", "sampled tokens have the distribution that is reported", SAMPLED_ERROR, run, order=75)
