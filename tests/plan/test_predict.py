"""The theory, the time of a pass, the pairs and the advice."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from paceline.cli.runnable import support
from paceline.errors import OptionError
from paceline.plan.advise import Question, Situation, advise, first_question, situation_of
from paceline.plan.catalogue import find_model
from paceline.plan.hardware import find_accelerator, unnamed_accelerator
from paceline.plan.memory import Deployment
from paceline.plan.methods import DraftWeights, draft_method
from paceline.plan.pairs import expectation_for, expectation_from_rate, pairing_note, pairs, pairs_for
from paceline.plan.precision import find_precision
from paceline.plan.predict import (
    BANDWIDTH_SHARE,
    PassClock,
    estimate_speed,
    speedup,
    tokens_per_step,
    tokens_per_step_by_position,
)

BF16 = find_precision("bf16")


DRAFT = draft_method("draft_model", DraftWeights.MODEL)
METHODS = {
    "none": DraftWeights.NONE,
    "ngram": DraftWeights.NONE,
    "suffix": DraftWeights.NONE,
    "lookahead": DraftWeights.NONE,
    "layerskip": DraftWeights.NONE,
    "brand-new-lookup": DraftWeights.NONE,
    "draft_model": DraftWeights.MODEL,
    "medusa": DraftWeights.HEAD,
    "eagle": DraftWeights.HEAD,
    "brand-new-head": DraftWeights.HEAD,
}


def deployed(target, draft=None, method=None, **changes):
    sizes = find_model(draft).sizes if draft else None
    method = method or (DRAFT if draft else draft_method("none"))
    return Deployment(find_model(target).sizes, BF16, method=method, draft=sizes, **changes)


def test_the_worked_example_of_the_theory():
    assert tokens_per_step(0.8, 4) == pytest.approx(3.3616)
    assert speedup(0.8, 4, 0.1) == pytest.approx(2.40, abs=0.005)


def test_the_theory_agrees_with_a_simulation():
    # 40,000 steps: the standard error is below 0.01, so 0.05 fails by chance about once in a million runs
    rng = random.Random(7)
    total = 0
    for _ in range(40_000):
        accepted = 0
        while accepted < 4 and rng.random() < 0.7:
            accepted += 1
        total += accepted + 1
    assert total / 40_000 == pytest.approx(tokens_per_step(0.7, 4), abs=0.05)


def test_equal_rates_by_position_are_one_rate():
    assert tokens_per_step_by_position([0.6] * 5) == pytest.approx(tokens_per_step(0.6, 5))


@pytest.mark.parametrize(("rate", "tokens"), [(0.0, 1.0), (1.0, 6.0)])
def test_the_ends_of_the_theory(rate, tokens):
    assert tokens_per_step(rate, 5) == tokens


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_outside_zero_to_one_is_refused(rate):
    with pytest.raises(OptionError, match="between 0 and 1"):
        tokens_per_step(rate, 4)


def test_other_nonsense_is_refused():
    with pytest.raises(OptionError):
        tokens_per_step(0.5, -1)
    with pytest.raises(OptionError):
        speedup(0.5, 3, -0.1)


def test_plain_speed_is_near_what_was_reported_for_7b_on_an_a100():
    # gpt-fast reports 104.9 tokens/s with a prompt of five tokens
    plain = deployed("llama-2-7b", max_seq_len=64)
    seconds = PassClock(plain, find_accelerator("a100")).target_seconds(width=1)
    assert 1 / seconds == pytest.approx(104.9, rel=0.15)


@pytest.mark.parametrize("precision", ["bf16", "Q4_0"])
def test_a_wide_pass_is_nearly_free_on_a_gpu_and_costly_on_a_cpu(precision):
    pair = replace(deployed("llama-3.1-8b", "llama-3.2-1b"), precision=find_precision(precision))
    assert cost_ratio(pair, "h100", 8) < 1.05
    assert cost_ratio(pair, "cpu-laptop", 8) > (1.3 if precision == "bf16" else 4.0)


def test_each_further_draft_token_activates_more_experts():
    dense, mixed = deployed("llama-3.1-8b"), deployed("mixtral-8x7b")
    assert cost_ratio(mixed, "h200", 6) > 2 * cost_ratio(dense, "h200", 6)


@pytest.mark.slow
def test_wider_passes_read_the_experts_that_tokens_choose_for_themselves():
    # 4,000 draws of each width: the standard error is below 0.06 experts, so 0.4 fails once in a billion runs
    sizes, rng = find_model("qwen3-30b-a3b").sizes, random.Random(3)
    assert (sizes.num_experts, sizes.num_experts_per_token) == (128, 8)
    for width in (1, 6, 16):
        drawn = [{expert for _ in range(width) for expert in rng.sample(range(128), 8)} for _ in range(4000)]
        assert sizes.expected_experts(width) == pytest.approx(sum(map(len, drawn)) / 4000, abs=0.4)
    assert sizes.expected_experts(1) == pytest.approx(8) and sizes.expected_experts(10_000) == pytest.approx(128)


def test_a_pass_is_as_slow_as_reading_its_experts():
    sizes = find_model("qwen3-30b-a3b").sizes
    plain = deployed("qwen3-30b-a3b", max_seq_len=64)
    clock = PassClock(plain, find_accelerator("h200"))
    expert_bytes = 2 * 48 * 3 * 2048 * 768
    added = clock.target_seconds(width=6) - clock.target_seconds(width=1)
    bandwidth = find_accelerator("h200").bandwidth_gbs * 1e9 * BANDWIDTH_SHARE
    assert added == pytest.approx((sizes.expected_experts(6) - 8) * expert_bytes / bandwidth, rel=0.01)


def test_drafting_gains_less_on_a_mixture_of_experts_than_on_a_dense_model_of_its_active_size():
    ngram = draft_method("ngram", DraftWeights.NONE)
    estimates = []
    for target in ("qwen3-30b-a3b", "qwen3-4b"):
        pair = deployed(target, method=ngram, num_draft_tokens=5, max_seq_len=512)
        estimates.append(estimate_speed(pair, find_accelerator("h200"), expectation_from_rate(0.7, 5)))
    mixed, dense = estimates
    assert mixed.verify_pass_seconds > 2 * mixed.target_pass_seconds
    assert mixed.speedup_high < 0.6 * dense.speedup_high


def cost_ratio(deployment, hardware, width):
    """Time of a pass of this width against one of a single token."""
    clock = PassClock(deployment, find_accelerator(hardware))
    return clock.target_seconds(width=width) / clock.target_seconds(width=1)


def test_an_estimate_says_what_it_rests_on():
    pair = deployed("llama-3.1-70b", "llama-3.2-1b")
    estimate = estimate_speed(pair, find_accelerator("h200"), expectation_for(pair))
    assert 1.0 < estimate.speedup_low < estimate.speedup_high < 4.0
    assert "Leviathan" in estimate.basis


def test_a_published_number_of_the_same_pair_comes_first():
    pair = deployed("vicuna-7b", "vicuna-68m")
    assert expectation_for(pair).low == 2.28
    assert "Spec-Bench" in expectation_for(pair).source


def test_a_stated_rate_overrides_the_published_one():
    assert expectation_from_rate(0.8, 4).low == pytest.approx(3.3616)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_an_expectation_and_an_estimate_even_one_the_table_does_not_list(name):
    method = draft_method(name, METHODS[name])
    draft = "llama-3.2-1b" if method.weights is DraftWeights.MODEL else None
    deployment = deployed("llama-3.1-8b", draft, method)
    expectation = expectation_for(deployment)
    assert 1.0 <= expectation.low <= expectation.high <= deployment.num_nodes + 1
    assert estimate_speed(deployment, find_accelerator("rtx-4090"), expectation).speedup_low > 0


def test_without_a_data_sheet_there_is_no_speed():
    pair = deployed("llama-3.1-8b", "llama-3.2-1b")
    assert estimate_speed(pair, unnamed_accelerator(24), expectation_for(pair)) is None


def test_every_pair_has_a_source_and_a_smaller_draft():
    for pair in pairs():
        assert pair.source and pair.suits
        assert (pair.draft is not None) == (pair.method == "draft_model")
        if pair.draft is not None:
            assert pair.draft.sizes.parameters < pair.target.sizes.parameters / 2
        if pair.published.speedup is not None:
            assert pair.published.hardware


def test_every_pair_of_the_table_can_run_here():
    assert [why for pair in pairs() if (why := pair.refusal(support()))] == []


def test_pairs_that_warn_come_last():
    assert pairs_for("qwen2.5-coder-32b")[-1].is_warning
    assert pairs_for("no-such-model") == ()


def test_a_pair_of_different_tokenizers_gets_a_note():
    llama, phi = find_model("llama-3.1-8b").sizes, find_model("phi-3-mini").sizes
    assert "different tokenizers" in pairing_note(llama, phi)
    padded = pairing_note(find_model("qwen2.5-7b").sizes, find_model("qwen2.5-0.5b").sizes)
    assert "padding" in padded
    assert pairing_note(llama, find_model("llama-3.2-1b").sizes) is None


@pytest.mark.parametrize("situation", list(Situation))
def test_every_situation_ends_in_a_command(situation):
    advice = advise(situation, "qwen2.5-7b", support())
    assert advice.situation is situation
    assert all(command.startswith("paceline ") for command in advice.commands)
    assert any("Qwen2.5-7B" in command for command in advice.commands)


def test_the_questions_reach_every_situation():
    def ends(node):
        if isinstance(node, Question):
            return {end for answer in node.answers.values() for end in ends(answer)}
        return {node}

    assert ends(first_question()) == set(Situation)


def test_the_situation_follows_from_the_options():
    assert situation_of(find_accelerator("m4-max"), 1, None, support()) is Situation.APPLE
    assert situation_of(find_accelerator("cpu-laptop"), 1, None, support()) is Situation.CPU
    assert situation_of(find_accelerator("h100"), 4, None, support()) is Situation.MANY_GPUS
    assert situation_of(find_accelerator("h100"), 1, "llama-3.1-8b", support()) is Situation.SINGLE_GPU
    assert situation_of(None, 1, "my-own-model", support()) is Situation.NO_DRAFT


def test_a_published_acceptance_at_the_same_k_is_used():
    listed = [pair for pair in pairs() if pair.published.acceptance and pair.published.num_draft_tokens]
    assert listed, "the table states the number of draft tokens of some pairs"
