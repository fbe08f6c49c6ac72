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
from paceline.plan.model_sizes import sizes_from_config
from paceline.plan.parallel import stages
from paceline.plan.precision import find_precision
from paceline.plan.predict import Expectation, estimate_speed

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


def test_two_stages_of_two_gpus_hold_what_is_computed_by_hand():
    """llama-3.1-8b in bf16 with a 1B draft: 32 layers, 32 heads, 8 of them for keys, 128 a head, MLP 14336."""
    plan = plan_memory(deployed(num_gpus=4, pipeline_parallel_size=2, max_seq_len=4096, num_draft_tokens=5))
    matrices = 4096 * (2048 + 512 + 512 + 2048) + 3 * 4096 * 7168  # q, k, v, out and MLP of one layer, half of each
    layers = 16 * (matrices + 2 * 4096)  # and two whole norms
    table = 64128 * 4096  # half of the vocabulary
    first, last = plan.stages
    assert first.parts["target weights"] == 2 * (layers + table)
    assert last.parts["target weights"] == 2 * (layers + table + 4096)  # the output matrix and the final norm
    cached = 4096 + 5 + 1
    assert first.parts["target KV cache"] == last.parts["target KV cache"] == 2 * 16 * 4 * 128 * cached * 2
    # llama-3.2-1b: 16 layers of 2048, 32 heads, 8 for keys, 64 a head, MLP 8192, tied; shared by the last stage's two
    draft_layer = 2048 * (1024 + 256 + 256 + 1024) + 3 * 2048 * 4096 + 2 * 2048
    assert last.parts["draft weights"] == 2 * (16 * draft_layer + 64128 * 2048 + 2048)
    assert last.parts["draft KV cache"] == 2 * 16 * 4 * 64 * cached * 2
    assert "draft weights" not in first.parts and "tree and q buffers" not in first.parts
    assert first.parts["activations"] == last.parts["activations"] == 2048 * (2 * 4096 + 3 * 14336 // 2) * 2
    by_name = {part.name: part for part in plan.parts}
    assert by_name["draft weights"].bytes == 2 * last.parts["draft weights"]
    assert by_name["target weights"].bytes == 2 * (first.parts["target weights"] + last.parts["target weights"])
    assert plan.fullest_bytes == last.bytes_each


def test_one_gpu_is_one_stage_with_everything():
    plan = plan_memory(deployed())
    [stage] = plan.stages
    assert stage.num_gpus == 1 and stage.bytes_each == plan.total_bytes == plan.fullest_bytes


def test_fewer_key_heads_than_gpus_are_kept_whole_on_each():
    """llama-3.1-8b has 8 key heads: 16 GPUs keep one each, as 8 GPUs do."""
    eight, sixteen = (plan_memory(deployed(draft=None, num_gpus=count)).stages[0].parts for count in (8, 16))
    assert sixteen["target KV cache"] == eight["target KV cache"]
    assert sixteen["target weights"] < eight["target weights"]


def test_a_draft_that_is_not_shared_is_whole_on_one_gpu():
    whole = parts_of(deployed())["draft weights"]
    plan = plan_memory(deployed(num_gpus=2, draft_tensor_parallel_size=1))
    part = next(part for part in plan.parts if part.name == "draft weights")
    assert (part.bytes, part.fullest) == (whole, whole)


def test_a_head_of_the_target_is_shared_like_it():
    """One layer of llama-3.1-8b, half of it on each GPU; the matrix that joins state and token is whole on both."""
    plan = plan_memory(deployed(draft=None, method=EAGLE, num_gpus=2))
    matrices = 4096 * (2048 + 512 + 512 + 2048) + 3 * 4096 * 7168
    assert plan.stages[0].parts["head weights"] == 2 * (matrices + 2 * 4096 + 4096 + 2 * 4096 * 4096)


@pytest.mark.parametrize(
    ("num_layers", "size", "counts"),
    [(32, 2, [16, 16]), (32, 3, [11, 11, 10]), (33, 4, [8, 8, 9, 8]), (30, 4, [7, 8, 8, 7]), (5, 5, [1] * 5)],
)
def test_layers_that_remain_go_to_the_stages_before_the_last(num_layers, size, counts):
    divided = stages(num_layers, size)
    assert [stage.num_layers for stage in divided] == counts
    assert [stage.first_layer for stage in divided] == [sum(counts[:index]) for index in range(size)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_gpus": 3}, "3 GPUs cannot share the 32 attention heads .* --pipeline-parallel-size 3"),
        ({"num_gpus": 4, "pipeline_parallel_size": 3}, "no multiple of --pipeline-parallel-size 3"),
        ({"num_gpus": 64, "pipeline_parallel_size": 64}, "has 32 layers"),
        ({"num_gpus": 4, "draft_tensor_parallel_size": 2}, "--draft-tensor-parallel-size must be 1 or"),
    ],
)
def test_a_division_that_cannot_be_is_refused(changes, message):
    with pytest.raises(OptionError, match=message):
        deployed(**changes)


def test_gpus_that_share_layers_are_faster_and_stages_are_not():
    speeds = [
        estimate_speed(deployed(**changes), find_accelerator("h100"), Expectation(2.0, 3.0, "test"))
        for changes in ({}, {"num_gpus": 2}, {"num_gpus": 2, "pipeline_parallel_size": 2})
    ]
    single, shared, staged = (speed.target_pass_seconds for speed in speeds)
    assert single / 2 < shared < single
    assert staged == single


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


def test_states_of_recurrent_layers_do_not_grow_with_the_length():
    sizes = {"num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    config = {**sizes, **heads, "head_dim": 16, "linear_value_head_dim": 16, "model_type": "qwen3_5_text"}
    target = sizes_from_config({**config, "intermediate_size": 96, "vocab_size": 1000}, "tiny")
    short, long = (parts_of(Deployment(target, BF16, max_seq_len=length)) for length in (1000, 2000))
    assert short["target states"] == long["target states"] == 32 * 6 * (4 * 16 * 16 * 4 + 64 * (2 * 32 + 64 + 8) * 2)
    assert long["target KV cache"] == 2 * short["target KV cache"] == 2 * 2 * 2 * 2 * 16 * 2000
