"""Memory plans: what each part does as the deployment changes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import OptionError
from paceline.plan.catalogue import find_model
from paceline.plan.fit import FitOutcome, longest_seq_len, memory_fit
from paceline.plan.hardware import (
    GIB,
    Accelerator,
    AcceleratorKind,
    accelerators,
    find_accelerator,
    unnamed_accelerator,
)
from paceline.plan.memory import Deployment, plan_memory
from paceline.plan.methods import DraftWeights, draft_method
from paceline.plan.precision import find_precision

BF16 = find_precision("bf16")


PLAIN, NGRAM = draft_method("none"), draft_method("ngram")
DRAFT, EAGLE = draft_method("draft_model", DraftWeights.MODEL), draft_method("eagle", DraftWeights.HEAD)


def deployed(target="llama-3.1-8b", draft="llama-3.2-1b", **changes):
    sizes = find_model(draft).sizes if draft else None
    options = {"method": DRAFT if draft else PLAIN, "draft": sizes} | changes
    return Deployment(find_model(target).sizes, BF16, **options)


def parts_of(deployment):
    return {part.name: part.bytes for part in plan_memory(deployment).parts}


def test_every_part_is_there_for_a_pair():
    names = list(parts_of(deployed()))
    assert names == [
        "target weights", "target KV cache", "draft weights", "draft KV cache", "tree and q buffers", "activations",
    ]  # fmt: skip


def test_llama_3_1_8b_keeps_128_kib_of_cache_per_token():
    # 2 x 32 layers x 8 heads x 128 x 2 bytes
    assert parts_of(deployed(draft=None, max_seq_len=4096))["target KV cache"] == 4096 * 131072


def test_caches_grow_with_context_and_batch_and_weights_do_not():
    small, large = parts_of(deployed(num_draft_tokens=0)), parts_of(deployed(num_draft_tokens=0, max_num_seqs=4))
    assert large["target KV cache"] == 4 * small["target KV cache"]
    assert large["draft KV cache"] == 4 * small["draft KV cache"]
    assert large["target weights"] == small["target weights"]


def test_the_cache_has_room_for_the_draft_tokens_of_a_step():
    per_token = 131072
    plain, drafted = parts_of(deployed(draft=None)), parts_of(deployed(num_draft_tokens=5))
    assert drafted["target KV cache"] - plain["target KV cache"] == 6 * per_token


def test_an_eight_bit_cache_is_half_of_a_sixteen_bit_one():
    half = parts_of(deployed(kv_precision=find_precision("fp8")))
    assert 2 * half["target KV cache"] == parts_of(deployed())["target KV cache"]


def test_draft_tokens_that_are_not_sampled_need_no_q():
    ngram = parts_of(deployed(draft=None, method=NGRAM))
    assert ngram["tree and q buffers"] < parts_of(deployed())["tree and q buffers"]


def test_heads_stay_in_floats_when_the_target_is_quantised():
    heads = parts_of(deployed(draft=None, method=EAGLE))["head weights"]
    quantised = replace(deployed(draft=None, method=EAGLE), precision=find_precision("int4"))
    assert parts_of(quantised)["head weights"] == heads


def test_several_gpus_divide_the_target_by_whole_layers_and_not_the_draft():
    single, three = plan_memory(deployed()), plan_memory(deployed(num_gpus=3))
    assert three.total_bytes == single.total_bytes
    by_name = {part.name: part for part in three.parts}
    assert by_name["target weights"].fullest == pytest.approx(by_name["target weights"].bytes * 11 / 32, rel=1e-6)
    assert by_name["draft weights"].fullest == by_name["draft weights"].bytes


@pytest.mark.parametrize(
    "nonsense",
    [
        {"max_seq_len": -1}, {"max_seq_len": 0}, {"max_seq_len": 1 << 40}, {"max_num_seqs": 0}, {"num_gpus": 0},
        {"num_gpus": -2}, {"num_draft_tokens": -1}, {"num_draft_tokens": 129}, {"tree_nodes": 2}, {"max_seq_len": 2.5},
        {"max_num_seqs": True},
    ],
)  # fmt: skip
def test_nonsense_is_refused_with_the_option_named(nonsense):
    with pytest.raises(OptionError, match=next(iter(nonsense)).replace("_", "-")):
        deployed(**nonsense)


def test_a_draft_without_its_method_is_refused():
    with pytest.raises(OptionError, match="--draft-model"):
        deployed(method=NGRAM)
    with pytest.raises(OptionError, match="--draft-model"):
        deployed(draft=None, method=DRAFT)


def test_the_fit_says_what_is_free():
    plan = plan_memory(deployed())
    accelerator = find_accelerator("h100")
    fit = memory_fit(plan, accelerator)
    assert fit.outcome is FitOutcome.FITS
    assert fit.free_bytes == accelerator.usable_bytes - plan.total_bytes
    assert fit.changes == ()


def test_a_change_that_is_offered_really_fits():
    deployment = deployed(max_seq_len=131072)
    accelerator = find_accelerator("rtx-4090")
    fit = memory_fit(plan_memory(deployment), accelerator)
    assert fit.outcome is FitOutcome.FITS_IF_CHANGED
    assert fit.free_bytes < 0
    assert all(change.free_bytes >= 0 for change in fit.changes)
    assert {change.options.split()[0] for change in fit.changes} >= {"--max-seq-len"}
    fitting = replace(deployment, max_seq_len=fit.longest_seq_len)
    assert memory_fit(plan_memory(fitting), accelerator).outcome is FitOutcome.FITS
    longer = replace(deployment, max_seq_len=fit.longest_seq_len + 256)
    assert memory_fit(plan_memory(longer), accelerator).outcome is not FitOutcome.FITS


def test_a_quantisation_is_offered_where_the_weights_are_too_large():
    fit = memory_fit(plan_memory(deployed("qwen2.5-32b", "qwen2.5-0.5b")), find_accelerator("rtx-5090"))
    assert fit.outcome is FitOutcome.FITS_IF_CHANGED
    assert any(change.options == "--dtype int4" for change in fit.changes)


def test_too_much_for_one_gpu_says_how_many_it_takes():
    fit = memory_fit(plan_memory(deployed("llama-3.1-70b", "llama-3.2-1b")), find_accelerator("rtx-3060"))
    assert fit.outcome is FitOutcome.DOES_NOT_FIT
    assert fit.changes and all("--num-gpus" in change.options for change in fit.changes)


def test_what_can_never_fit_says_so():
    fit = memory_fit(plan_memory(deployed("llama-3.1-405b", None)), unnamed_accelerator(8))
    assert fit.outcome is FitOutcome.DOES_NOT_FIT
    assert fit.changes == ()


def test_longest_seq_len_stops_at_what_the_model_supports():
    assert longest_seq_len(deployed("llama-2-7b", None, max_seq_len=512), find_accelerator("h200")) == 4096


@pytest.mark.parametrize(
    "name", ["RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090", "nvidia_rtx4090", "GeForce RTX 4090"]
)
def test_an_accelerator_is_found_in_any_spelling(name):
    assert find_accelerator(name).name == "rtx-4090"


def test_the_same_chip_with_other_memory():
    assert find_accelerator("Apple M4 Max", 64).memory_bytes == 64 * GIB


@pytest.mark.parametrize("name", ["rtx-9999", "", "abacus"])
def test_an_unknown_accelerator_is_a_clear_error(name):
    with pytest.raises(OptionError, match="--list hardware"):
        find_accelerator(name)


@pytest.mark.parametrize("memory", [0, -8, float("nan"), float("inf")])
def test_an_impossible_memory_is_a_clear_error(memory):
    with pytest.raises(OptionError, match="--memory"):
        unnamed_accelerator(memory)


def test_the_catalogue_of_accelerators_is_sane():
    listed = accelerators()
    assert {accelerator.kind for accelerator in listed} == set(AcceleratorKind)
    assert len({accelerator.name for accelerator in listed}) == len(listed)
    assert all(
        isinstance(c, Accelerator) and 0 < c.usable_bytes < c.memory_bytes and c.bandwidth_gbs > 0 for c in listed
    )
