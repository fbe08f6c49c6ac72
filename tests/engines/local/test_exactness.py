"""Sampled decoding through the whole machinery has exactly the target's distribution, and the test can tell."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from paceline.core import verify
from paceline.core.sampling import SamplingParams
from paceline.drafting.draft_model import DraftModel
from tests.support import wrong_rules
from tests.support.exactness import MakeDrafter, Outcome, blurred, draft_model, measured, ngram, ngram_tree, nothing

SAMPLES = 50_000  # of three tokens each
FEW = 3_000  # enough to catch what is wrong
WORKERS = 2
PLAIN, NARROW = SamplingParams(temperature=1.0), SamplingParams(temperature=0.8, top_p=0.9)


@dataclass(frozen=True, slots=True)
class Case:
    """One acceptance rule, one way to guess, one way to sample."""

    rule: str
    drafter: MakeDrafter
    sampling: SamplingParams = PLAIN

    def __str__(self) -> str:
        return f"{self.rule}-{self.drafter.__name__}{'-narrow' if self.sampling is NARROW else ''}"


DRAFTERS = (draft_model, ngram, ngram_tree, nothing)
CASES = (
    *(Case(rule, drafter) for rule in ("token", "block", "coupled") for drafter in DRAFTERS),
    Case("token", draft_model, NARROW),
    Case("block", ngram, NARROW),
)


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, Future[Outcome]]]:
    """All cases, worked on by two distributed at once: sampling is slow, and one core would stand idle."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, fresh, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield {str(case): pool.submit(measured, case.rule, case.drafter, SAMPLES, case.sampling) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_tokens_are_distributed_as_enumerated(case: Case, outcomes: dict[str, Future[Outcome]]) -> None:
    found = outcomes[str(case)].result()
    print(f"{case}: {found}")
    assert found.samples >= SAMPLES
    assert found.passed, str(found)
    if case.drafter is not nothing:
        assert found.stats.accepted > 0.1 * found.samples, "hardly anything was guessed right: this shows little"


@pytest.mark.parametrize(
    "wrong",
    [wrong_rules.target_prob_above_rand, wrong_rules.draft_prob_is_one, wrong_rules.resample_from_target],
)
def test_wrong_rules_of_tutorials_are_caught(wrong: acceptance.Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verify.RULES, "token", wrong)
    assert not measured("token", draft_model, FEW).passed


@pytest.mark.parametrize("wrong", [wrong_rules.OneDistributionForAll, wrong_rules.PeeksAtItsGuess])
def test_wrong_drafting_of_tutorials_is_caught(wrong: type[DraftModel]) -> None:
    assert not measured("token", lambda target: wrong(blurred(target), target.info.vocab_size), FEW).passed


def test_the_lossy_rule_is_lossy() -> None:
    """Not a fault: its name says it. But were it exact, the name would be wrong."""
    assert not measured("lossy-typical", draft_model, FEW).passed
