"""The theory, the time of a pass, the pairs and the advice."""

from __future__ import annotations

import random

import pytest

from paceline.errors import OptionError
from paceline.plan.advise import Question, Situation, advise, first_question, situation_of
from paceline.plan.catalogue import find_model
from paceline.plan.hardware import find_card, nameless_card
from paceline.plan.memory import Method, Setting
from paceline.plan.pairs import expectation_for, expectation_from_rate, pairing_note, pairs, pairs_for
from paceline.plan.precision import find_precision
from paceline.plan.predict import (
    best_draft_tokens,
    estimate_speed,
    pass_seconds,
    rate_from_tokens_per_step,
    speedup,
    speedup_by_position,
    tokens_per_step,
    tokens_per_step_by_position,
)

BF16 = find_precision("bf16")


def setting(target, draft=None, method=None, **changes):
    shape = find_model(draft).shape if draft else None
    chosen = method or (Method.DRAFT if draft else Method.NONE)
    return Setting(find_model(target).shape, BF16, method=chosen, draft=shape, **changes)


def test_the_worked_example_of_the_theory():
    assert tokens_per_step(0.8, 4) == pytest.approx(3.3616)
    assert speedup(0.8, 4, 0.1) == pytest.approx(2.40, abs=0.005)


def test_the_theory_agrees_with_playing_it_out():
    # 40,000 rounds: the standard error is below 0.01, so 0.05 fails by chance about once in a million runs
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
    assert speedup_by_position([0.6] * 5, 0.05) == pytest.approx(speedup(0.6, 5, 0.05))


@pytest.mark.parametrize(("rate", "tokens"), [(0.0, 1.0), (1.0, 6.0)])
def test_the_ends_of_the_theory(rate, tokens):
    assert tokens_per_step(rate, 5) == tokens


def test_a_rate_comes_back_from_its_tokens_per_step():
    assert rate_from_tokens_per_step(tokens_per_step(0.63, 6), 6) == pytest.approx(0.63, abs=1e-9)


def test_guessing_that_only_costs_has_a_best_k_of_nothing():
    assert best_draft_tokens(0.2, 0.9) == 0
    assert best_draft_tokens(0.9, 0.02) > best_draft_tokens(0.6, 0.02) > 0


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_outside_zero_to_one_is_refused(rate):
    with pytest.raises(OptionError, match="between 0 and 1"):
        tokens_per_step(rate, 4)


def test_other_nonsense_is_refused():
    with pytest.raises(OptionError):
        tokens_per_step(0.5, -1)
    with pytest.raises(OptionError):
        speedup(0.5, 3, -0.1)
    with pytest.raises(OptionError):
        rate_from_tokens_per_step(9.0, 4)


def test_plain_speed_is_near_what_was_reported_for_7b_on_an_a100():
    # gpt-fast reports 104.9 tokens/s with a prompt of five tokens
    plain = setting("llama-2-7b", context=64)
    seconds = pass_seconds(plain.target, BF16, plain, find_card("a100"), width=1)
    assert 1 / seconds == pytest.approx(104.9, rel=0.15)


@pytest.mark.parametrize("precision", ["bf16", "Q4_0"])
def test_width_is_nearly_free_on_a_gpu_and_dear_on_a_cpu(precision):
    chosen, pair = find_precision(precision), setting("llama-3.1-8b", "llama-3.2-1b")

    def eight_to_one(card):
        one, eight = (pass_seconds(pair.target, chosen, pair, find_card(card), width=w) for w in (1, 8))
        return eight / one

    assert eight_to_one("h100") < 1.05
    assert eight_to_one("cpu-laptop") > (1.3 if precision == "bf16" else 4.0)


def test_each_further_guess_wakes_more_experts():
    dense, mixed = setting("llama-3.1-8b"), setting("mixtral-8x7b")
    card = find_card("h200")
    ratios = [
        pass_seconds(s.target, BF16, s, card, width=6) / pass_seconds(s.target, BF16, s, card, width=1)
        for s in (dense, mixed)
    ]
    assert ratios[1] > 2 * ratios[0]


def test_an_estimate_says_what_it_rests_on():
    pair = setting("llama-3.1-70b", "llama-3.2-1b")
    estimate = estimate_speed(pair, find_card("h200"), expectation_for(pair))
    assert 1.0 < estimate.speedup_low < estimate.speedup_high < 4.0
    assert "Leviathan" in estimate.basis


def test_a_published_number_of_the_very_pair_comes_first():
    pair = setting("vicuna-7b", "vicuna-68m")
    assert expectation_for(pair).low == 2.28
    assert "Spec-Bench" in expectation_for(pair).source


def test_a_given_rate_overrides_the_published_one():
    assert expectation_from_rate(0.8, 4).low == pytest.approx(3.3616)


@pytest.mark.parametrize("method", list(Method))
def test_every_method_has_an_expectation_and_an_estimate(method):
    draft = "llama-3.2-1b" if method is Method.DRAFT else None
    chosen = setting("llama-3.1-8b", draft, method)
    expectation = expectation_for(chosen)
    assert 1.0 <= expectation.low <= expectation.high <= chosen.nodes + 1
    assert estimate_speed(chosen, find_card("rtx-4090"), expectation).speedup_low > 0


def test_without_a_data_sheet_there_is_no_speed():
    pair = setting("llama-3.1-8b", "llama-3.2-1b")
    assert estimate_speed(pair, nameless_card(24), expectation_for(pair)) is None


def test_every_pair_has_a_source_and_a_smaller_draft():
    for pair in pairs():
        assert pair.source and pair.suits
        assert (pair.draft is not None) == (pair.method is Method.DRAFT)
        if pair.draft is not None:
            assert pair.draft.shape.parameters < pair.target.shape.parameters / 2
        if pair.published.speedup is not None:
            assert pair.published.hardware


def test_pairs_share_a_tokenizer_or_say_what_to_check():
    for pair in pairs():
        if pair.draft is not None and pair.draft.shape.tokenizer != pair.target.shape.tokenizer:
            assert "check" in pair.suits


def test_pairs_that_warn_come_last():
    assert pairs_for("qwen2.5-coder-32b")[-1].is_warning
    assert pairs_for("nobody") == ()


def test_a_pair_of_two_worlds_gets_a_note():
    llama, phi = find_model("llama-3.1-8b").shape, find_model("phi-3-mini").shape
    assert "different tokenizers" in pairing_note(llama, phi)
    padded = pairing_note(find_model("qwen2.5-7b").shape, find_model("qwen2.5-0.5b").shape)
    assert "padding" in padded
    assert pairing_note(llama, find_model("llama-3.2-1b").shape) is None


@pytest.mark.parametrize("situation", list(Situation))
def test_every_situation_ends_in_a_command(situation):
    advice = advise(situation, "qwen2.5-7b")
    assert advice.situation is situation
    assert all(command.startswith("paceline ") for command in advice.commands)
    assert any("Qwen2.5-7B" in command for command in advice.commands)


def test_the_walk_reaches_every_situation():
    def ends(node):
        if isinstance(node, Question):
            return {end for answer in node.answers.values() for end in ends(answer)}
        return {node}

    assert ends(first_question()) == set(Situation)


def test_the_situation_follows_from_what_is_known():
    assert situation_of(find_card("m4-max"), 1, None) is Situation.APPLE
    assert situation_of(find_card("cpu-laptop"), 1, None) is Situation.CPU
    assert situation_of(find_card("h100"), 4, None) is Situation.MANY_GPUS
    assert situation_of(find_card("h100"), 1, "llama-3.1-8b") is Situation.SINGLE_GPU
    assert situation_of(None, 1, "my-own-model") is Situation.NO_DRAFT
