"""The statistics of near-ties and of sampled tokens."""

from __future__ import annotations

import math
import random

import pytest

from paceline.doctor.answer import Answer, TokenChoice
from paceline.doctor.near_ties import binomial_tail, drift, parting, plausible
from paceline.doctor.scenarios.sampling import rank_counts


def token(text: str, **top: float) -> TokenChoice:
    alternatives = {name.encode(): value for name, value in top.items()}
    return TokenChoice(text.encode(), alternatives.get(text.encode(), -0.1), alternatives)


def answer(*tokens: TokenChoice) -> Answer:
    return Answer("".join(item.data.decode() for item in tokens), "length", list(tokens))


def test_answers_part_at_the_token_that_holds_the_first_other_byte() -> None:
    reference = answer(token("ab", ab=-0.1), token("cd", cd=-0.7, ce=-0.8))
    place = parting(Answer("abce"), reference, reference)
    assert place.offset == 3 and place.gap == pytest.approx(0.1)


def test_a_way_that_is_not_listed_is_no_near_tie() -> None:
    reference = answer(token("ab", ab=-0.1), token("cd", cd=-0.7, ce=-0.8))
    assert parting(Answer("abxx"), reference, reference).gap is None


def test_characters_that_are_cut_into_tokens_are_compared_as_bytes() -> None:
    euro, first, second = "€".encode(), TokenChoice(b"\xe2\x82", -0.1, {b"\xe2\x82": -0.1}), b"\xac"
    last = TokenChoice(second, -0.6, {second: -0.6, b"\xa3": -0.7})
    reference = Answer(euro.decode(), "length", [first, last])
    place = parting(Answer("₣"), reference, reference)
    assert place.offset == 2 and place.gap == pytest.approx(0.1)


def test_so_many_differences_are_plausible_only_with_near_ties_to_differ_at() -> None:
    assert plausible(0, [0, 0, 0]) == 1
    assert plausible(1, [0, 0, 0]) == 0
    assert plausible(3, [1, 1, 1]) == pytest.approx(1 / 8)
    assert plausible(2, [1, 1, 1]) == pytest.approx(1 / 2)
    assert binomial_tail(3, 3, 0.5) == pytest.approx(1 / 8)


def test_a_token_without_alternatives_does_not_tell_a_near_tie() -> None:
    """llama.cpp gives accepted draft tokens the log-probability 0 and nothing beside them."""
    bare = TokenChoice(b"cd", 0.0, {})
    reference = answer(token("ab", ab=-0.1), bare)
    place = parting(Answer("abce"), reference, reference)
    assert place.gap is None and not place.is_known
    listed = answer(token("ab", ab=-0.1), token("cd", cd=-0.1, xy=-3.0))
    assert parting(Answer("abce"), listed, listed).is_known, "the other way is not among the alternatives"


@pytest.mark.parametrize("spelling", ["", "<end>"])
def test_an_end_is_a_way_like_any_other(spelling: str) -> None:
    """Servers list the end token as nothing or by its name. To go on where it is certain is no near-tie."""
    gaps = []
    for end, other in ((-0.01, -5.0), (-0.7, -0.8)):
        last = TokenChoice(spelling.encode(), end, {spelling.encode(): end, b"on": other})
        reference = Answer("ab", "stop", [token("ab", ab=-0.1, x=-3.0), last])
        gaps.append(parting(Answer("abon"), reference, reference).gap)
    assert gaps == [pytest.approx(4.99), pytest.approx(0.1)]


def test_where_an_ended_answer_lists_no_end_nothing_is_known() -> None:
    """llama.cpp may leave the end token out: that the other way is not listed proves nothing."""
    reference = Answer("ab", "stop", [token("ab", ab=-0.1, x=-3.0)])
    place = parting(Answer("abon"), reference, reference)
    assert place.gap is None and not place.is_known


def test_drift_is_the_largest_change_of_a_likely_token() -> None:
    first = [token("a", a=-0.1, b=-3.0), token("c", c=-0.2, d=-9.0)]
    second = [token("a", a=-0.1, b=-3.4), token("c", c=-0.2, d=-7.0)]
    change = drift(first, second)
    assert change.largest == pytest.approx(0.4) and change.token == b"b"


def test_draws_by_their_log_probabilities_raise_no_alarm_and_others_do() -> None:
    """2,000 draws; the probability of a false alarm is below 4e-6, of a miss below 1e-9."""
    rng, shares = random.Random(0), {"a": 0.5, "b": 0.3, "c": 0.15}
    top = {name.encode(): math.log(share) for name, share in shares.items()}

    def draws(weights: list[float]) -> list[TokenChoice]:
        names = rng.choices(["a", "b", "c", "z"], weights, k=2000)
        return [TokenChoice(name.encode(), -1.0, top) for name in names]

    right, wrong = draws([0.5, 0.3, 0.15, 0.05]), draws([0.65, 0.2, 0.1, 0.05])
    assert min(count.p_value for count in rank_counts(right, 3)) > 1e-6
    assert rank_counts(wrong, 3)[0].p_value < 1e-6


def test_a_token_that_a_server_adds_because_it_was_drawn_counts_as_not_listed() -> None:
    top = {b"a": math.log(0.6), b"b": math.log(0.3), b"rare": math.log(0.01)}
    counts = rank_counts([TokenChoice(b"rare", math.log(0.01), top)], 3)
    assert [count.observed for count in counts] == [0, 0, 0, 1]
    assert counts[3].expected == pytest.approx(0.1)


@pytest.mark.parametrize("how", ["added", "in the place of the last", "left out"])
def test_how_a_server_shows_the_drawn_token_raises_no_alarm(how: str) -> None:
    """4,000 right draws, 3 alternatives asked for; the probability of a false alarm is below 4e-6."""
    shares = {b"a": 0.4, b"b": 0.2, b"c": 0.15, b"y": 0.13, b"z": 0.12}
    kept = 2 if how == "in the place of the last" else 3

    def shown(drawn: bytes) -> TokenChoice:
        best = list(shares)[: 3 if drawn in (b"a", b"b", b"c") else kept]
        names = {*best, *([drawn] if how != "left out" else [])}
        return TokenChoice(drawn, math.log(shares[drawn]), {name: math.log(shares[name]) for name in names})

    draws = random.Random(1).choices(list(shares), list(shares.values()), k=4000)
    counts = rank_counts([shown(drawn) for drawn in draws], 3)
    assert min(count.p_value for count in counts) > 1e-6
    assert sum(count.observed for count in counts) == 4000
