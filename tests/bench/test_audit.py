"""The audit finds what it is there to find, names it, and raises no false alarms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.bench.audit import AuditCheck, AuditPlan, AuditResult, audit
from paceline.bench.candidates import Candidates
from paceline.bench.measure import OutputLength
from paceline.bench.outcome import Outcome
from paceline.core.verify import RULES
from paceline.drafting.layerskip import LayerSkip
from paceline.drafting.no_draft import NoDraft
from paceline.runners.native import NativeRunner
from tests.support.bench_toys import CONTEXT, blurred_draft, toy_candidates
from tests.support.tiny import tiny_llama
from tests.support.wrong_rules import PeeksAtItsDraft, WrappedDrafter, WrongQ, resample_from_target, wrong_rule

pytestmark = pytest.mark.slow


def plan(**changes: Any) -> AuditPlan:
    """600 draws detect a distance of 0.2 with 95% certainty; the planted bugs are twice as far off."""
    first = AuditPlan(
        [CONTEXT],
        [CONTEXT],
        ["draft_model"],
        ("token",),
        (1.0,),
        length=OutputLength(12),
        draws=600,
        seconds=60,
        seed=1,
    )
    return replace(first, **changes)


def checks_of(candidates: Candidates, chosen: AuditPlan) -> dict[str, AuditCheck]:
    return {check.name: check for check in audit(candidates, chosen)}


def test_every_lossless_rule_and_method_passes_on_the_table() -> None:
    """False alarm probability 0.001 in all, as the audit states."""
    every = plan(methods=["draft_model", "ngram"], rules=("token", "block", "coupled"))
    checks = checks_of(toy_candidates(), every)
    assert {check.outcome for check in checks.values()} == {Outcome.LOSSLESS}
    assert len(checks) == 2 + 6
    assert AuditResult(list(checks.values()), 0.001).lossless


def test_a_lossy_rule_is_caught_and_named() -> None:
    checks = checks_of(toy_candidates(), plan(rules=("token", "lossy-typical"), draws=300))
    result = AuditResult(list(checks.values()), 0.001)
    assert [check.name for check in result.different] == ["sampled draft_model k=2 T=1 lossy-typical"]
    assert "its probability under the target is" in result.different[0].detail
    assert result.outcome is Outcome.DIFFERENT


@pytest.mark.parametrize(("wrong_drafter", "context"), [(WrongQ, CONTEXT), (PeeksAtItsDraft, [1, 1])])
def test_a_drafter_that_states_a_wrong_q_or_looks_at_its_draft_is_caught(
    wrong_drafter: type[WrappedDrafter], context: list[int]
) -> None:
    candidates = toy_candidates(planted=wrong_drafter(blurred_draft()))
    checks = checks_of(candidates, plan(methods=["planted"], contexts=[context], draws=1000))
    assert checks["sampled planted k=2 T=1"].outcome is Outcome.DIFFERENT


def test_a_missing_residual_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "token", wrong_rule(resample_from_target))
    checks = checks_of(toy_candidates(), plan(draws=1000))
    assert checks["sampled draft_model k=2 T=1"].outcome is Outcome.DIFFERENT
    assert checks["greedy draft_model = plain"].outcome is Outcome.LOSSLESS  # greedy outputs alone do not show it


def test_a_drafter_that_never_drafts_is_not_called_proven() -> None:
    checks = checks_of(toy_candidates(silent=NoDraft()), plan(methods=["silent"]))
    assert checks["sampled silent k=2 T=1"].outcome is Outcome.NOT_SHOWN


def test_a_drafter_that_reads_the_target_gets_as_many_draws_as_any() -> None:
    """The probability of a false alarm is the audit's alpha, 0.001."""
    runner = NativeRunner.of_model(tiny_llama(), "tiny", kv_cache_tokens=1024)
    candidates = toy_candidates(runner, layerskip=LayerSkip(runner, 1))
    checks = audit(candidates, plan(contexts=[[5, 90, 17, 5]], prompts=[], draws=600, methods=["layerskip"]))
    assert {(check.outcome, check.draws) for check in checks} == {(Outcome.LOSSLESS, 600)}
