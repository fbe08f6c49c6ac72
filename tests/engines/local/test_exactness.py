"""Sampled decoding through the whole engine has exactly the target's distribution, and the test can tell."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from paceline.core import verify
from paceline.core.sampling import SamplingParams
from tests.support.exactness import MakeDrafter, draft_model, measured, ngram, ngram_tree, no_draft
from tests.support.wrong_rules import WRONG_DRAFTERS, WRONG_RULES, WrappedDrafter, target_prob_above_rand, wrong_rule

SAMPLES = 20_000  # of three tokens each: more than three times as many as catch every mutant
FEW = 6_000  # enough to catch every mutant
FEWEST = 3_000  # enough to catch the worst of them, in the fast lane
TEMPERATURE, TOP_P = SamplingParams(temperature=1.0), SamplingParams(temperature=0.8, top_p=0.9)


@dataclass(frozen=True, slots=True)
class Case:
    """One acceptance rule, one drafter, one way to sample."""

    rule: str
    drafter: MakeDrafter
    sampling: SamplingParams = TEMPERATURE

    def __str__(self) -> str:
        return f"{self.rule}-{self.drafter.__name__}{'-top_p' if self.sampling is TOP_P else ''}"


DRAFTERS = (draft_model, ngram, ngram_tree, no_draft)
CASES = (
    *(Case(rule, drafter) for rule in ("token", "block", "coupled") for drafter in DRAFTERS),
    Case("token", draft_model, TOP_P),
    Case("block", ngram, TOP_P),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_tokens_are_distributed_as_enumerated(case: Case) -> None:
    outcome = measured(case.rule, case.drafter, SAMPLES, case.sampling)
    print(f"{case}: {outcome}")
    assert outcome.samples >= SAMPLES
    assert outcome.passed, str(outcome)
    if case.drafter is not no_draft:
        assert outcome.stats.accepted > 0.1 * outcome.samples, "hardly any draft token was accepted: this shows little"


@pytest.mark.slow
def test_a_few_samples_tell_a_right_rule_from_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured("token", draft_model, FEWEST).passed
    monkeypatch.setitem(verify.RULES, "token", wrong_rule(target_prob_above_rand))
    assert not measured("token", draft_model, FEWEST).passed


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG_RULES, ids=lambda verify: verify.__name__)
def test_wrong_rules_of_tutorials_are_caught(wrong: verify.Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verify.RULES, "token", wrong_rule(wrong))
    assert not measured("token", draft_model, FEW).passed


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG_DRAFTERS)
def test_wrong_drafting_of_tutorials_is_caught(wrong: type[WrappedDrafter]) -> None:
    assert not measured("token", lambda target: wrong(draft_model(target)), FEW).passed


@pytest.mark.slow
def test_the_lossy_rule_is_lossy() -> None:
    """Not a fault: its name says it. But were it exact, the name would be wrong."""
    assert not measured("lossy-typical", draft_model, FEW).passed
