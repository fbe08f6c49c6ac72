"""Whether two greedy answers differ only where the model itself hardly prefers one token to the other.

Batches of different sizes are added up in different orders, so two right answers may part where the two best tokens
have nearly the same log-probability. How often that may happen is bounded as well: at a near-tie the two runs disagree
with probability 1/2 at most, so an answer with m near-ties on its way differs with probability 1 - 2^-m at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from paceline.doctor.answer import Answer, TokenChoice

REPLACEMENT = "\ufffd".encode()  # stands for parts of characters: several tokens are spelled so


@dataclass(frozen=True, slots=True)
class Parting:
    """Where an answer leaves another one. gap: of the log-probabilities of the two ways; None: one is not listed.

    is_known: whether the token there has alternatives; some servers give none for accepted draft tokens
    """

    offset: int  # in bytes
    gap: float | None
    is_known: bool = True


def common_bytes(first: str, second: str) -> int:
    a, b = first.encode(), second.encode()
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def parting(tested: Answer, reference: Answer, probe: Answer) -> Parting:
    """Where two answers part, by the log-probabilities of a probe: one of the two requests, asked for those as well."""
    offset = common_bytes(tested.content, reference.content)
    if not b"".join(choice.data for choice in probe.tokens).startswith(probe.content.encode()):
        # A parser has taken tool calls or reasoning out of the text: no place is known, so any near-tie explains it.
        return Parting(offset, min((choice.gap for choice in probe.tokens), default=None))
    written, first = probe.content.encode(), reference.content.encode()[:offset]
    if written[:offset] != first:  # the probe itself has left before: its own place decides
        return _at(common_bytes(reference.content, probe.content), reference, probe, probe)
    return _at(offset, tested, reference, probe)


def _at(offset: int, tested: Answer, reference: Answer, probe: Answer) -> Parting:
    ends = list(accumulate(len(choice.data) for choice in probe.tokens))
    index = next((place for place, end in enumerate(ends) if end > offset), len(ends) - 1)
    choice = probe.tokens[index]
    start = ends[index] - len(choice.data)
    if len(choice.all) < 2 or start > offset or ends[index] < offset or (choice.data and ends[index] == offset):
        return Parting(offset, None, is_known=False)  # no alternatives, or none for the place after the last token
    is_end = start == len(probe.content.encode())
    first, second = (_way(choice, answer.content.encode()[start:], is_end) for answer in (tested, reference))
    return Parting(offset, None if first is None or second is None else abs(first - second))


def _way(choice: TokenChoice, rest: bytes, is_end: bool) -> float | None:
    """The log-probability of the likeliest token that an answer can have gone on with; where it ends, of an end.

    is_end: the token is itself the end. Where it is not, any alternative may be the end: its spelling is not known.
    """
    if is_end and not rest:
        return choice.logprob
    fitting = [value for data, value in choice.top.items() if data and rest.startswith(data)]
    if not fitting and not rest:
        fitting = [value for data, value in choice.top.items() if data != choice.data]
    return max(fitting, default=None)


def num_near_ties(probe: Answer, limit: float) -> int:
    return sum(choice.gap <= limit for choice in probe.tokens)


def plausible(differing: int, near_ties: list[int]) -> float:
    """An upper bound on the probability of so many answers that differ, given the near-ties in each answer."""
    chances = [1.0]
    for number in near_ties:
        p = 1.0 - 0.5**number
        chances = [
            (chances[k] if k < len(chances) else 0.0) * (1 - p) + (chances[k - 1] * p if k else 0.0)
            for k in range(len(chances) + 1)
        ]
    return min(1.0, sum(chances[differing:]))


def binomial_tail(successes: int, draws: int, probability: float) -> float:
    """P(at least so many of so many)."""
    terms = (
        math.comb(draws, k) * probability**k * (1 - probability) ** (draws - k) for k in range(successes, draws + 1)
    )
    return min(1.0, sum(terms))


@dataclass(frozen=True, slots=True)
class Drift:
    """The largest difference between two sets of log-probabilities of the same tokens."""

    largest: float
    token: bytes
    index: int
    compared: int


def drift(first: list[TokenChoice], second: list[TokenChoice], least: float = math.log(0.02)) -> Drift:
    """Compare position by position while the tokens agree. Tokens rarer than `least` on both sides do not count."""
    worst = Drift(0.0, b"", -1, 0)
    compared = 0
    for index, (a, b) in enumerate(zip(first, second)):
        first_values, second_values = a.all, b.all
        for data in first_values.keys() & second_values.keys():
            if REPLACEMENT not in data and max(first_values[data], second_values[data]) >= least:
                compared += 1
                difference = abs(first_values[data] - second_values[data])
                if difference > worst.largest:
                    worst = Drift(difference, data, index, 0)
        if a.data != b.data:
            break
    return Drift(worst.largest, worst.token, worst.index, compared)
