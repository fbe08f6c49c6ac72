"""Sizes: the formula against published counts, against torch's own allocation, and against bad configs."""

from __future__ import annotations

import pytest

from paceline.errors import OptionError
from paceline.plan.catalogue import catalogue, find_model
from paceline.plan.memory import Deployment, head_sizes, kv_bytes
from paceline.plan.methods import DraftWeights, draft_method
from paceline.plan.model_sizes import sizes_from_config
from paceline.plan.precision import find_precision, weight_bytes

EAGLE = draft_method("eagle", DraftWeights.HEAD)
MEDUSA = draft_method("medusa", DraftWeights.HEAD)
SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}

FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


@pytest.mark.parametrize("entry", catalogue(), ids=lambda entry: entry.name)
def test_every_catalogue_model_has_its_published_number_of_weights(entry):
    assert entry.sizes.parameters == pytest.approx(entry.published_parameters, rel=0.001)


# File sizes in GB as published: bf16 checkpoints (model index totals) and GGUF files (repository listings).
PUBLISHED_SIZES = [
    ("llama-2-7b", "fp16", 13.48),
    ("llama-3.1-8b", "bf16", 16.06),
    ("mistral-7b", "bf16", 14.48),
    ("mixtral-8x7b", "bf16", 93.41),
    ("qwen2.5-7b", "bf16", 15.23),
    ("gemma-2-9b", "bf16", 18.48),
    ("phi-3-mini", "bf16", 7.64),
    ("llama-2-7b", "Q4_K_M", 4.08),
    ("llama-2-7b", "Q8_0", 7.16),
    ("llama-2-7b", "Q6_K", 5.53),
    ("llama-2-7b", "Q5_K_M", 4.78),
    ("llama-2-7b", "Q3_K_M", 3.30),
    ("llama-3.1-8b", "Q4_K_M", 4.92),
    ("llama-3.1-70b", "Q4_K_M", 42.52),
]


@pytest.mark.parametrize(("name", "precision", "gigabytes"), PUBLISHED_SIZES)
def test_weights_are_within_three_per_cent_of_published_files(name, precision, gigabytes):
    size = weight_bytes(find_model(name).sizes, find_precision(precision))
    assert size / 1e9 == pytest.approx(gigabytes, rel=0.03)


@pytest.fixture(scope="module")
def torch_smollm2():
    """The default model as torch allocates it, in fp32 (bf16 crawls on older CPUs), its weights all zero."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{k: v for k, v in SMOLLM2_135M.items() if k != "model_type"})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.float32)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@pytest.mark.slow
def test_weights_are_within_five_per_cent_of_what_torch_allocates(torch_smollm2):
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in torch_smollm2.parameters()}
    planned = weight_bytes(sizes_from_config(SMOLLM2_135M, "default"), find_precision("fp32"))
    assert planned == pytest.approx(sum(storages.values()), rel=0.05)


@pytest.mark.slow
def test_cache_is_within_five_per_cent_of_what_torch_allocates(torch_smollm2):
    torch = pytest.importorskip("torch")
    tokens = torch.zeros(2, 16, dtype=torch.long)
    with torch.inference_mode():
        cache = torch_smollm2(tokens, use_cache=True).past_key_values
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    deployment = Deployment(
        sizes_from_config(SMOLLM2_135M, "default"), find_precision("fp32"), max_seq_len=16, max_num_seqs=2
    )
    assert kv_bytes(deployment.target, deployment) == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize(
    ("config_name", "model_name", "overrides"),
    [
        ("Qwen2Config", "Qwen2ForCausalLM", {}),
        ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 24}),
        ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 24}),
        ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 24}),
        ("Phi3Config", "Phi3ForCausalLM", {"pad_token_id": 0}),
        ("PhiConfig", "PhiForCausalLM", {"num_key_value_heads": 4}),
        ("GPTNeoXConfig", "GPTNeoXForCausalLM", {"num_key_value_heads": 4}),
        ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("GraniteMoeConfig", "GraniteMoeForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
        ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**FEW_EXPERTS, "shared_expert_intermediate_size": 80}),
        ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**FEW_EXPERTS, "head_dim": 24}),
        ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_every_architecture_counts_as_transformers_does(config_name, model_name, overrides):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 128}
    config = getattr(transformers, config_name)(**(small | overrides))
    with torch.device("meta"):
        model = getattr(transformers, model_name)(config)
    ours = sizes_from_config(config.to_dict(), config_name)
    assert ours.notes == ()
    assert ours.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("changes", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_experts_in_some_layers_only_are_counted_there(changes):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(**FEW_EXPERTS, **changes)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    assert sizes_from_config(config.to_dict(), "mixed").parameters == sum(p.numel() for p in model.parameters())


def test_gpt2_counts_as_transformers_does():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, n_positions=128, vocab_size=320)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    assert sizes_from_config(config.to_dict(), "g").parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("target", "billions"), [("llama-2-7b", 0.24), ("llama-2-13b", 0.37), ("llama-2-70b", 0.99)])
def test_an_eagle_head_has_the_size_its_authors_state(target, billions):
    assert head_sizes(find_model(target).sizes, EAGLE).parameters / 1e9 == pytest.approx(billions, rel=0.03)


def test_medusa_heads_are_blocks_and_heads_and_keep_no_cache():
    heads = head_sizes(find_model("vicuna-7b").sizes, MEDUSA)
    assert heads.parameters == 4 * (4096 * 4096 + 4096 + 4096 * 32000)
    assert heads.kv_values_per_token == 0


def test_an_unknown_architecture_is_counted_as_a_llama_and_says_so():
    sizes = sizes_from_config({**SMOLLM2_135M, "model_type": "brandnew"}, "x")
    assert sizes.parameters == 134515008
    assert "brandnew" in sizes.notes[0]


def test_a_nested_text_config_is_read_and_noted():
    sizes = sizes_from_config(
        {"model_type": "gemma3", "text_config": {**SMOLLM2_135M, "model_type": "gemma3_text"}}, "x"
    )
    assert sizes.hidden_size == 576
    assert "text decoder" in sizes.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": -3}, "num_hidden_layers = -3"),
        ({"layer_types": ["wavelet"] * 30}, "layers of type wavelet"),
        ({"layer_types": ["linear_attention"] * 30}, "recurrent"),
        ({"index_topk": 64}, "index"),
        ({"is_encoder_decoder": True}, "encoder"),
    ],
)
def test_a_config_that_cannot_be_sized_is_refused_by_name(change, message):
    with pytest.raises(OptionError, match=message):
        sizes_from_config({**SMOLLM2_135M, **change}, "odd-model")


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        ({"torch_dtype": "bfloat16"}, "bf16"),
        ({"dtype": "float32"}, "fp32"),
        ({"quantization_config": {"bits": 4, "quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({}, None),
    ],
)
def test_the_stored_precision_is_read_from_the_config(config, stored):
    assert sizes_from_config({**SMOLLM2_135M, **config}, "x").stored_precision == stored


def test_precisions_order_as_their_bits_do():
    sizes = find_model("llama-3.1-8b").sizes
    names = ("fp32", "bf16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K")
    byte_counts = [weight_bytes(sizes, find_precision(name)) for name in names]
    assert byte_counts == sorted(byte_counts, reverse=True)
    assert weight_bytes(sizes, find_precision("int4")) < weight_bytes(sizes, find_precision("int8"))


def test_an_unknown_precision_names_the_nearest():
    with pytest.raises(OptionError, match="Q4_K_M"):
        find_precision("Q4_KM")


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5", "qwen3_next", "qwen3_5_moe_text"])
def test_hybrid_models_have_the_weights_that_transformers_allocates(kind: str) -> None:
    from tests.support.families import MANY_LAYERS, Variant, tiny_family

    changes = {"text_config": MANY_LAYERS} if kind == "qwen3_5" else MANY_LAYERS
    model = tiny_family(Variant(kind, changes=changes))
    sizes = sizes_from_config(model.config.to_dict(), kind)
    assert sizes.parameters == sum(weight.numel() for weight in model.parameters())
    assert sizes.num_attention_layers == 1 and sizes.kv_values_per_token == 2 * 2 * 8
