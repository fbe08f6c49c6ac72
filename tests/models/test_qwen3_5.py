"""Hybrid models against transformers, loaded, and on disk with parts that texts do not need."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import SpeculativeDecoder
from paceline.core.types import Capability, Row
from paceline.errors import CapabilityError
from paceline.models import registry
from paceline.runners.native import NativeRunner, is_native
from tests.support.families import MANY_LAYERS, Variant, expected_tokens, prompts_of, tiny_family, write_family

PROMPTS = [list(range(3, 90)), [7, 7, 9], list(range(200, 150, -1))]
VARIANTS = [
    Variant("qwen3_5_text"),
    Variant("qwen3_5_text", "four_layers", MANY_LAYERS),
    Variant("qwen3_5_text", "bias", {"attention_bias": True, "tie_word_embeddings": True}),
    Variant("qwen3_5_text", "no_groups", {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3}),
    Variant("qwen3_5_text", "attention_first", {"layer_types": ["full_attention", "linear_attention"]}),
    Variant("qwen3_5"),
    Variant("qwen3_5_moe_text"),
    Variant("qwen3_5_moe"),
    Variant("qwen3_next"),
    Variant("qwen3_next", "dense_layer", {**MANY_LAYERS, "mlp_only_layers": [1]}),
]


def in_float64(variant: Variant) -> Any:
    """With norms that are not all the same. Grouped products have no float64, so experts come one by one."""
    model = tiny_family(variant).double()
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn(weight.shape, generator=generator).to(weight) * 0.3)
    return model


class WideTorch:
    """torch, as transformers' modules see it, without float32: their norms and recurrences round to it."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.id)
def test_logits_agree_with_transformers_in_float64(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_float64(variant)
    runner = NativeRunner.of_model(model, variant.id, kv_cache_tokens=2048)
    outputs = runner.forward([Row.chain(runner.new_cache(), prompt) for prompt in PROMPTS])
    monkeypatch.setattr(sys.modules[type(model).__module__], "torch", WideTorch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for output, prompt in zip(outputs, PROMPTS):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(output.logits, expected, rtol=1e-5, atol=1e-5)  # our rope tables are in float32


def test_only_the_layers_with_attention_have_keys_and_values() -> None:
    runner = NativeRunner.of_model(tiny_family(Variant("qwen3_5_text", changes=MANY_LAYERS)), "tiny")
    assert runner.kv.keys.shape[0] == 1 and runner.info.num_layers == 4


def test_a_state_is_after_one_path_so_there_are_no_trees_and_no_exits() -> None:
    runner = NativeRunner.of_model(tiny_family(Variant("qwen3_5_text")), "tiny")
    assert runner.capabilities == {Capability.HIDDEN_STATES}
    with pytest.raises(CapabilityError, match="chains of draft tokens only"):
        runner.forward([Row(runner.new_cache(), torch.tensor([1, 2, 3]), [-1, -1, 1])])
    with pytest.raises(CapabilityError, match="cannot stop after an inner layer"):
        runner.early_exit(1)


@pytest.mark.slow
def test_verification_has_the_bits_of_plain_decoding_where_products_have_them() -> None:
    """Products of rounded inputs do not depend on the width of a pass, and neither does anything else."""
    model = tiny_family(Variant("qwen3_5_text", changes=MANY_LAYERS))
    runner = NativeRunner.of_model(model, "tiny", weight_format="int8")
    assert runner.model.quantizes_input
    ids, cache, plain = PROMPTS[0], runner.new_cache(), list[torch.Tensor]()
    for token in ids:
        plain.append(runner.forward([Row.chain(cache, [token])]).logits[0].clone())
        runner.commit(cache, [0])
    cache, place = runner.new_cache(), 0
    for count, kept in [(1, 1), (5, 2), (8, 8), (6, 1), (12, 12), (30, 30), (9, 4)]:
        logits = runner.forward([Row.chain(cache, ids[place : place + kept] + [1] * (count - kept))]).logits
        assert all(torch.equal(logits[node], plain[place + node]) for node in range(kept))
        runner.commit(cache, list(range(kept)))
        place += kept


@pytest.mark.slow
def test_a_checkpoint_with_vision_and_a_draft_head_runs_as_the_language_model_in_it(tmp_path: Path) -> None:
    folder = write_family(Variant("qwen3_5"), tmp_path)
    prompts = prompts_of()
    expected = expected_tokens(folder, prompts)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = {"mtp.fc.weight": torch.zeros(32, 64), "model.visual.merger.norm.weight": torch.zeros(8)}
    save_file({**renamed, **others}, folder / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["model_type"] in registry.model_types()
    with SpeculativeDecoder(folder, runner="native", method="ngram", num_draft_tokens=3) as decoder:
        results = decoder.generate(prompts, max_new_tokens=15, ignore_eos=True)
    assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
    ],
    ids=["activation", "weights"],
)
def test_what_the_layers_do_not_have_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    from transformers import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(**changes)
    assert not is_native(config) and reason in (registry.unsupported(config) or "")
