"""Where an audit draws, what it expects, and how often it raises a false alarm."""

from __future__ import annotations

import pytest

from paceline.bench.audit import sampled_conclusion
from paceline.bench.candidates import DecodeSetting
from paceline.bench.outcome import Evidence, Outcome
from paceline.bench.sampling_test import SampleLimit, SamplingAudit, sampling_for
from paceline.core.sampling import SamplingParams
from paceline.runners.table import TableRunner
from tests.support.bench_toys import CONTEXT, blurred_draft, toy_candidates

LARGE_CONTEXT = [5, 290, 17, 5, 290]


def test_the_exact_distribution_is_the_table_s() -> None:
    sampling_audit = SamplingAudit(toy_candidates())
    exact = sampling_audit.exact(sampling_audit.context("draft_model", CONTEXT), SamplingParams(temperature=1.0), 2)
    table = TableRunner(vocab_size=5, seed=3).exact(CONTEXT, 2, SamplingParams(temperature=1.0))
    assert exact == pytest.approx({path: probability for path, probability in table.items() if probability}, abs=1e-6)


def test_top_k_limits_the_outcomes_of_a_large_vocabulary_only() -> None:
    assert sampling_for(5, 0.7).top_k == 0
    assert sampling_for(40, 0.7).top_k == 4


def test_lookup_methods_draw_in_a_small_vocabulary_and_models_in_the_whole_one() -> None:
    target = TableRunner(vocab_size=300, order=1, seed=3)
    sampling_audit = SamplingAudit(toy_candidates(target, draft_model=blurred_draft(300, order=1)))
    small = sampling_audit.context("ngram", LARGE_CONTEXT)
    assert 4 <= small.target.info.vocab_size < 300
    assert small.model_ids(tuple(small.prompt)) == LARGE_CONTEXT
    whole = sampling_audit.context("draft_model", LARGE_CONTEXT)
    assert whole.target.info.vocab_size == 300
    assert whole.prompt == LARGE_CONTEXT


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_large_vocabulary_passes(method: str) -> None:
    """The probability of a false alarm is 1e-4."""
    target = TableRunner(vocab_size=300, order=1, seed=3)
    candidates = toy_candidates(target, draft_model=blurred_draft(300, order=1, blur=0.4))
    setting = DecodeSetting(method, 2, 1.0)
    result = SamplingAudit(candidates).test(setting, LARGE_CONTEXT, SampleLimit(draws=200), seed=1)
    assert result.stats.drafted > 0
    assert result.fit.p_value > 1e-4


@pytest.mark.slow
def test_models_compute_each_prefix_once() -> None:
    sampling_audit = SamplingAudit(toy_candidates())
    context = sampling_audit.context("draft_model", CONTEXT)
    for seed in range(2):
        passes = context.target.passes
        limit = SampleLimit(draws=200)
        samples = sampling_audit.draw(DecodeSetting("draft_model", 2, 1.0), context, sampling_for(5, 1.0), limit, seed)
        assert samples.total == 200
        assert samples.stats.drafted > 100
    assert context.target.passes - passes < 50


@pytest.mark.slow
def test_the_false_alarm_rate_is_the_one_stated() -> None:
    """120 audits of exact candidates at alpha = 0.05: 6 alarms expected, standard deviation 2.4. Fewer than 1 or more
    than 15 happen by chance with probability below 0.003; the draws are fixed."""
    alarms = 0
    sampling_audit = SamplingAudit(toy_candidates())
    for seed in range(120):
        setting = DecodeSetting("draft_model", 2, 1.0, ("token", "block")[seed % 2])
        result = sampling_audit.test(setting, CONTEXT, SampleLimit(draws=64), seed=1000 * seed)
        conclusion = sampled_conclusion(setting, result, 0.05, Evidence())
        alarms += conclusion.outcome is Outcome.DIFFERENT
    print(f"{alarms} alarms in 120 audits at alpha = 0.05")
    assert 1 <= alarms <= 15
