"""Mixtures of experts: every kind of pass against transformers in float64, both ways experts are stored, what a user
gets with every method, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from paceline import SpeculativeDecoder
from paceline.core.types import Row
from paceline.errors import CapabilityError, OptionError, WeightsError
from paceline.layers.moe_layer import MoeMlp
from paceline.models import registry
from paceline.runners.native import NativeRunner, is_native
from paceline.runners.native.lora_runner import LoraRunner
from tests.runners.native.models import MOE, tiny
from tests.support.agreement import PROMPTS, assert_agrees, logits_of
from tests.support.families import expected_tokens
from tests.support.lora import write_adapter
from tests.support.tiny import byte_tokenizer

VARIANTS: list[tuple[str, dict[str, Any]]] = [(kind, {}) for kind in MOE] + [
    ("mixtral", {"tie_word_embeddings": True, "num_experts_per_tok": 1}),
    ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    ("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": [0], "qkv_bias": False}),
    ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True, "decoder_sparse_step": 2}),
    ("qwen3_moe", {"num_experts_per_tok": 6}),
]
IDS = ["-".join([kind, *changes]) for kind, changes in VARIANTS]
TOLERANCE = 5e-5  # transformers rotates, norms and routes in float32


def experts_of(runner: NativeRunner, layer: int = 0) -> Any:
    mlp = runner.model.layers[layer].mlp  # type: ignore[attr-defined]
    assert isinstance(mlp, MoeMlp)
    return mlp.mixture.experts


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), VARIANTS, ids=IDS)
def test_chains_trees_and_batches_agree_with_transformers_in_float64(kind: str, changes: dict[str, Any]) -> None:
    model = tiny(kind, torch.float64, **changes)
    model.set_experts_implementation("eager")  # the only one that has float64
    assert_agrees(NativeRunner.of_model(model, kind, kv_cache_tokens=2048), model, TOLERANCE)


# --- how experts are stored -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MOE)
@pytest.mark.parametrize("stacked", [False, True], ids=["as published", "stacked"])
def test_a_folder_loads_however_its_experts_are_stored(kind: str, stacked: bool, tmp_path: Path) -> None:
    model = tiny(kind)
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert kind == "granitemoe" or any("experts.5." in name for name in names), "transformers writes single experts"
    if stacked:
        state = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    runner = NativeRunner.load(tmp_path, kind, "float32", "cpu", 512)
    assert experts_of(runner).stacked is not None
    logits = runner.forward([Row.chain(runner.new_cache(), PROMPTS[0])]).logits
    torch.testing.assert_close(logits, logits_of(model, PROMPTS[0]), rtol=1e-3, atol=1e-3)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    tiny("qwen3_moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.experts\.4\.up_proj\.weight"):
        NativeRunner.load(tmp_path, "qwen3_moe", "float32", "cpu", 512)


# --- integer weights --------------------------------------------------------------------------------------------------

MULTIPLES = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}  # of a block


@pytest.mark.parametrize("kind", MOE)
def test_integer_weights_give_nearly_the_same_logits(kind: str) -> None:
    model = tiny(kind)
    runner = NativeRunner.of_model(model, kind, kv_cache_tokens=512, weight_format="int8")
    assert experts_of(runner).stacked is None and runner.model.quantizes_input
    assert not runner.model.layers[0].can_fuse and not runner.model.layers[0].can_capture
    expected = logits_of(model, PROMPTS[0])
    logits = runner.forward([Row.chain(runner.new_cache(), PROMPTS[0])]).logits
    closest = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert closest.median() < 0.1, "a rounding may choose another expert for a token, not for most"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("sizes", [MULTIPLES, {}], ids=["blocks", "other sizes"])
def test_integer_weights_give_the_same_bits_at_every_width(kind: str, sizes: dict[str, int]) -> None:
    runner = NativeRunner.of_model(tiny(kind, **sizes), kind, 512, weight_format="int8")
    seq_cache, other = runner.new_cache(), runner.new_cache()
    runner.forward([Row.chain(seq_cache, list(range(30)))], last_only=True)
    runner.forward([Row.chain(other, list(range(9)))], last_only=True)
    tokens = [3, 14, 15, 92, 65]
    together = runner.forward([Row.chain(seq_cache, tokens), Row.chain(other, [8, 8])])[0].logits
    runner.truncate(seq_cache, 30)
    alone = torch.cat([runner.forward([Row.chain(seq_cache, [token])]).logits for token in tokens])
    assert torch.equal(together, alone)


# --- what a user gets -------------------------------------------------------------------------------------------------

METHODS = ["ngram", "suffix", "lookahead", "layerskip", "auto"]
SETTINGS: dict[str, Any] = {"max_new_tokens": 14, "ignore_eos": True}


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral", "qwen2_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    tiny(request.param, vocab_size=259).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.mark.slow
def test_every_method_writes_what_transformers_writes(folder: Path) -> None:
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], list(range(40, 61)), [9]]
    expected = expected_tokens(folder, prompts, 14)
    with SpeculativeDecoder(str(folder)) as plain:
        assert [result.token_ids for result in plain.generate(prompts, **SETTINGS)] == expected
    for method in METHODS:
        with SpeculativeDecoder(str(folder), method=method, num_draft_tokens=4) as decoder:
            results = decoder.generate(prompts, **SETTINGS)
        assert [result.token_ids for result in results] == expected, method
    with SpeculativeDecoder(str(folder), draft_model=str(folder), num_draft_tokens=4) as decoder:
        results = decoder.generate(prompts, **SETTINGS)
    assert [result.token_ids for result in results] == expected
    assert results[0].stats.tokens_per_step > 4, "the model accepts all of its own draft tokens"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integer_weights_write_the_same_with_draft_tokens_and_without(folder: Path, dtype: str, tmp_path: Path) -> None:
    kind = folder.name.rstrip("0123456789")
    config, wide = tiny(kind).config, MULTIPLES | {"intermediate_size": 96}
    sizes = {name: size for name, size in wide.items() if hasattr(config, name)}
    tiny(kind, vocab_size=259, **sizes).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9]]
    try:
        with SpeculativeDecoder(str(tmp_path), dtype=dtype) as plain:
            expected = [result.token_ids for result in plain.generate(prompts, **SETTINGS)]
    except OptionError as error:
        assert "int4 has no kernel for this machine" in str(error)
        return
    with SpeculativeDecoder(str(tmp_path), dtype=dtype, draft_model=str(tmp_path), num_draft_tokens=3) as decoder:
        assert [result.token_ids for result in decoder.generate(prompts, **SETTINGS)] == expected


@pytest.mark.slow
def test_loading_measures_passes_that_read_more_experts_the_wider_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.layers.moe import Experts

    experts_read: dict[int, set[int]] = {}
    reference = Experts.__call__

    def counted(self: Experts, x: Tensor, routing: Any) -> Tensor:
        experts_read.setdefault(x.shape[0], set()).add(routing.experts.unique().numel())
        return reference(self, x, routing)

    monkeypatch.setattr(Experts, "__call__", counted)
    with SpeculativeDecoder(str(folder), method="ngram") as decoder:
        costs = decoder._engine.engine.parts.draft_length.costs
    assert min(experts_read[8]) > max(experts_read[1]) == 2
    assert {1, 2, 4, 8} <= set(costs.verify.sizes), "what a pass costs is known at every width, and flat at none"


# --- what is refused --------------------------------------------------------------------------------------------------


def test_an_adapter_is_refused_in_words(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", tiny("qwen3_moe"), 1, modules=("q_proj",))
    runner = LoraRunner.of_model(tiny("qwen3_moe"), "qwen3_moe", kv_cache_tokens=512)
    with pytest.raises(CapabilityError, match="LoRA adapters are for models with the MLP of Llama"):
        runner.read_adapters({"adapter": str(adapter)})


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act"), ("olmoe", {"clip_qkv": 8.0}, "clip_qkv")],
)
def test_what_an_architecture_does_not_compute_is_refused_with_the_reason(
    kind: str, changes: dict[str, Any], reason: str
) -> None:
    config = CONFIG_MAPPING[kind](**changes)
    assert not is_native(config) and reason in (registry.unsupported(config) or "")
