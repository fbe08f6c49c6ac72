"""The plan and the verdict: what each part does as the setting changes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import OptionError
from paceline.plan.catalogue import find_model
from paceline.plan.fit import Outcome, longest_context, verifier
from paceline.plan.hardware import GIB, Card, CardKind, cards, find_card, nameless_card
from paceline.plan.memory import Method, Setting, plan_memory
from paceline.plan.precision import find_precision

BF16 = find_precision("bf16")


def setting(target="llama-3.1-8b", draft="llama-3.2-1b", **changes):
    shape = find_model(draft).shape if draft else None
    chosen = {"method": Method.DRAFT if draft else Method.NONE, "draft": shape} | changes
    return Setting(find_model(target).shape, BF16, **chosen)


def sizes(given):
    return {part.name: part.bytes for part in plan_memory(given).parts}


def test_every_part_is_there_for_a_pair():
    names = list(sizes(setting()))
    assert names == [
        "target weights", "target KV cache", "draft weights", "draft KV cache", "tree and q buffers", "activations",
    ]  # fmt: skip


def test_llama_3_1_8b_keeps_128_kib_of_cache_per_token():
    # 2 x 32 layers x 8 heads x 128 x 2 bytes, as its model card's arithmetic has it
    assert sizes(setting(draft=None, context=4096))["target KV cache"] == 4096 * 131072


def test_caches_grow_with_context_and_batch_and_weights_do_not():
    small, large = sizes(setting(num_draft_tokens=0)), sizes(setting(num_draft_tokens=0, batch=4))
    assert large["target KV cache"] == 4 * small["target KV cache"]
    assert large["draft KV cache"] == 4 * small["draft KV cache"]
    assert large["target weights"] == small["target weights"]


def test_a_round_keeps_room_for_its_guesses_in_the_cache():
    per_token = 131072
    plain, guessed = sizes(setting(draft=None)), sizes(setting(num_draft_tokens=5))
    assert guessed["target KV cache"] - plain["target KV cache"] == 6 * per_token


def test_an_eight_bit_cache_is_half_of_a_sixteen_bit_one():
    half = sizes(setting(kv_precision=find_precision("fp8")))
    assert 2 * half["target KV cache"] == sizes(setting())["target KV cache"]


def test_chosen_guesses_need_no_q():
    ngram = sizes(setting(draft=None, method=Method.NGRAM))
    assert ngram["tree and q buffers"] < sizes(setting())["tree and q buffers"]


def test_heads_stay_in_floats_when_the_target_is_quantised():
    heads = sizes(setting(draft=None, method=Method.EAGLE))["heads weights"]
    quantised = replace(setting(draft=None, method=Method.EAGLE), precision=find_precision("int4"))
    assert sizes(quantised)["heads weights"] == heads


def test_several_gpus_divide_the_target_by_whole_layers_and_not_the_draft():
    one, three = plan_memory(setting()), plan_memory(setting(gpus=3))
    assert three.total_bytes == one.total_bytes
    by_name = {part.name: part for part in three.parts}
    assert by_name["target weights"].fullest == pytest.approx(by_name["target weights"].bytes * 11 / 32, rel=1e-6)
    assert by_name["draft weights"].fullest == by_name["draft weights"].bytes


@pytest.mark.parametrize(
    "nonsense",
    [
        {"context": -1}, {"context": 0}, {"context": 1 << 40}, {"batch": 0}, {"gpus": 0}, {"gpus": -2},
        {"num_draft_tokens": -1}, {"num_draft_tokens": 129}, {"tree_nodes": 2}, {"context": 2.5}, {"batch": True},
    ],
)  # fmt: skip
def test_nonsense_is_refused_with_the_option_named(nonsense):
    with pytest.raises(OptionError, match=next(iter(nonsense)).replace("_", "-")):
        setting(**nonsense)


def test_a_draft_without_its_method_is_refused():
    with pytest.raises(OptionError, match="--draft"):
        setting(method=Method.NGRAM)
    with pytest.raises(OptionError, match="--draft"):
        setting(draft=None, method=Method.DRAFT)


def test_the_verdict_says_what_is_left():
    plan = plan_memory(setting())
    card = find_card("h100")
    verified = verifier(plan, card)
    assert verified.outcome is Outcome.FITS
    assert verified.left_bytes == card.usable_bytes - plan.total_bytes
    assert verified.changes == ()


def test_a_change_that_is_offered_really_fits():
    wanted = setting(context=131072)
    card = find_card("rtx-4090")
    verified = verifier(plan_memory(wanted), card)
    assert verified.outcome is Outcome.FITS_IF_CHANGED
    assert verified.left_bytes < 0
    assert all(change.left_bytes >= 0 for change in verified.changes)
    assert {change.options.split()[0] for change in verified.changes} >= {"--context"}
    fitting = replace(wanted, context=verified.longest_context)
    assert verifier(plan_memory(fitting), card).outcome is Outcome.FITS
    longer = replace(wanted, context=verified.longest_context + 256)
    assert verifier(plan_memory(longer), card).outcome is not Outcome.FITS


def test_a_quantisation_is_offered_where_the_weights_are_too_large():
    verified = verifier(plan_memory(setting("qwen2.5-32b", "qwen2.5-0.5b")), find_card("rtx-5090"))
    assert verified.outcome is Outcome.FITS_IF_CHANGED
    assert any(change.options == "--dtype int4" for change in verified.changes)


def test_too_much_for_one_card_says_how_many_it_takes():
    verified = verifier(plan_memory(setting("llama-3.1-70b", "llama-3.2-1b")), find_card("rtx-3060"))
    assert verified.outcome is Outcome.DOES_NOT_FIT
    assert verified.changes and all("--gpus" in change.options for change in verified.changes)


def test_what_can_never_fit_says_so():
    verified = verifier(plan_memory(setting("llama-3.1-405b", None)), nameless_card(8))
    assert verified.outcome is Outcome.DOES_NOT_FIT
    assert verified.changes == ()


def test_longest_context_stops_at_what_the_model_was_made_for():
    assert longest_context(setting("llama-2-7b", None, context=512), find_card("h200")) == 4096


@pytest.mark.parametrize(
    "name", ["RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090", "nvidia_rtx4090", "GeForce RTX 4090"]
)
def test_a_card_may_be_written_anyhow(name):
    assert find_card(name).name == "rtx-4090"


def test_the_same_chip_with_other_memory():
    assert find_card("Apple M4 Max", 64).memory_bytes == 64 * GIB


@pytest.mark.parametrize("name", ["rtx-9999", "", "abacus"])
def test_an_unknown_card_is_a_clear_error(name):
    with pytest.raises(OptionError, match="--list cards"):
        find_card(name)


@pytest.mark.parametrize("memory", [0, -8, float("nan"), float("inf")])
def test_an_impossible_memory_is_a_clear_error(memory):
    with pytest.raises(OptionError, match="--memory"):
        nameless_card(memory)


def test_the_catalogue_of_cards_is_sane():
    listed = cards()
    assert {card.kind for card in listed} == set(CardKind)
    assert len({card.name for card in listed}) == len(listed)
    assert all(isinstance(c, Card) and 0 < c.usable_bytes < c.memory_bytes and c.bandwidth_gbs > 0 for c in listed)
