"""Tiny random checkpoints of every causal language model that the installed transformers has, and variants of them.

A family is built by writing small sizes over the defaults of its config; what that leaves inconsistent is put right in
CHANGES. Variants change one thing: windows, biases, alibi, ropes, tied heads, experts, orders of layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.tiny import byte_tokenizer

VOCABULARY = 264
SCALE = 0.2  # standard deviation of matrices: decided distributions, and no chaos
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "attention_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 512),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("v_head_dim", "head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "index_topk"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups", "encoder_layers"), 1),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "encoder_attention_heads"), 4),
    "index_n_heads": 16,  # with few heads many scores are zero, and which of them are the best is arbitrary
    "vocab_size": VOCABULARY,
    "sliding_window": 16,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
ALWAYS = ("bos_token_id", "eos_token_id", "pad_token_id")  # also where a config has none
KEPT_SCALES = ("A_log", "dt_bias", ".D", "norm", "time_", "lambda", "sinks", "scale")

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
MLA: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
SEQ2SEQ: dict[str, Any] = {"is_decoder": True, "is_encoder_decoder": False, "encoder_layers": 2, "decoder_layers": 2}
ENCODER: dict[str, Any] = {"is_decoder": True}
FEW_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SMALL_INPUTS: dict[str, Any] = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
HYBRID: dict[str, Any] = {"layer_types": [LINEAR, FULL]}


@dataclass(frozen=True)
class Variant:
    """One checkpoint. runner: which runner is asked for; None: as a user who says nothing."""

    model_type: str
    name: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    runner: str | None = None

    @property
    def id(self) -> str:
        return f"{self.model_type}-{self.name}" if self.name else self.model_type


# What a family needs beyond small sizes.
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), MLA),
    **dict.fromkeys(("glm_moe_dsa", "minicpm3", "youtu"), MLA),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), SMALL_INPUTS),
    **{name: {"text_config": SMALL_INPUTS} for name in ("gemma4", "gemma4_unified")},
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart"), SEQ2SEQ),
    **dict.fromkeys(("mvp", "pegasus", "plbart", "whisper", "trocr"), SEQ2SEQ),
    **dict.fromkeys(("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"), ENCODER),
    **dict.fromkeys(("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roformer"), ENCODER),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl"), ENCODER),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "olmo_hybrid"), HYBRID),
    **{name: {"text_config": HYBRID} for name in ("qwen3_5", "qwen3_5_moe", "qwen4_exp")},
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "bailing_hybrid": {**MLA, **HYBRID, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, **FEW_EXPERTS},
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {**MLA, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"layer_types": [SLIDING, FULL], "num_kv_shared_layers": 0, **SMALL_INPUTS},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**MLA, **HYBRID, **FEW_EXPERTS, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", FULL]},
    "lfm2": {"layer_types": ["conv", FULL]},
    "longcat_flash": {**MLA, "ffn_hidden_size": 48, "moe_topk": 2, "zero_expert_num": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "reformer": {"is_decoder": True},
    "roc_bert": {**ENCODER, "shape_vocab_size": 264, "pronunciation_vocab_size": 264},
    "xlm": {"emb_dim": 32, "causal": True},
    "zamba": {"attention_hidden_size": None, "num_hidden_layers": 3, "layers_block_type": [LINEAR, "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": [LINEAR, "hybrid"], "attention_hidden_size": None},
    "zaya": {"num_experts_per_tok": 1},
}

# Families that transformers itself does not build small, or does not run or load from tokens alone.
LEFT_OUT = {
    "blt": "reads bytes through a patcher with its own config",
    "cohere_compass_text": "an embedding model without a rope of its own",
    "dbrx": "its config has no rope_theta in this release",
    "emu3": "the config of its text part is not a causal language model's when it is loaded",
    "gemma3n": "needs the timm package",
    "gemma4_assistant": "a draft head: it reads the target's keys and values",
    "gemma4_unified_assistant": "a draft head: it reads the target's keys and values",
    "mllama": "the config of its text part is not a causal language model's when it is loaded",
    "musicgen": "writes sound",
    "musicgen_melody": "writes sound",
    "prophetnet": "refuses the positions that transformers' own generation gives it",
    "qwen4_exp": "its sizes do not shrink",
    "qwen4_exp_text": "its sizes do not shrink",
    "reformer": "wants sequences of whole chunks",
    "xlstm": "its state does not fit a small model",
    "xmod": "wants the language of every sequence",
}
ROPE = {"rope_theta": 10000.0}
LONGROPE = {
    **ROPE,
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 3.0, 2.0, 1.5],
    "original_max_position_embeddings": 24,
}
MANY_LAYERS = {"num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, LINEAR, FULL]}
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {**ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT_YARN = {**YARN, "original_max_position_embeddings": 8}
GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 5.0}

VARIATIONS = [
    Variant("llama", "transformers", runner="hf"),
    Variant("llama", "attention_bias", {"attention_bias": True}),
    Variant("llama", "attention_bias_transformers", {"attention_bias": True}, "hf"),
    Variant("llama", "mlp_bias", {"mlp_bias": True}),
    Variant("llama", "tied", {"tie_word_embeddings": True}),
    Variant("llama", "wide_heads", {"head_dim": 16}),
    Variant("llama", "one_kv_head", {"num_key_value_heads": 1}),
    Variant("llama", "linear_rope", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 2.0}}),
    Variant("llama", "dynamic_rope", {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 2.0}}),
    Variant("llama", "yarn", {"rope_parameters": YARN}),
    Variant("llama", "llama3_rope", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 128}}),
    Variant("mistral", "no_window", {"sliding_window": None}),
    Variant("mistral", "transformers", {"sliding_window": None}, "hf"),
    Variant("mistral", "window_4", {"sliding_window": 4}),
    Variant("qwen2", "transformers", runner="hf"),
    Variant("qwen2", "window", {"use_sliding_window": True, "max_window_layers": 1}),
    Variant("qwen3", "transformers", runner="hf"),
    Variant("qwen3", "attention_bias", {"attention_bias": True}),
    Variant("qwen3", "window", {"use_sliding_window": True, "max_window_layers": 1}),
    Variant("falcon", "alibi", {"alibi": True}),
    Variant("falcon", "new_decoder", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    Variant("falcon", "multi_head", {"multi_query": False, "parallel_attn": False}),
    Variant("gpt_bigcode", "multi_head", {"multi_query": False}),
    Variant("gpt_neo", "global", {"attention_types": [[["global"], 2]]}),
    Variant("gpt_neox", "sequential", {"use_parallel_residual": False}),
    Variant("phi3", "longrope", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 24}),
    Variant("phi3", "no_window", {"sliding_window": None}),
    Variant("phimoe", "longrope", {"rope_parameters": {**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.0}}),
    Variant("opt", "post_norm", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    Variant("stablelm", "qk_norm", {"qk_layernorm": True, "use_qkv_bias": True}),
    Variant("llama4_text", "chunks", {"attention_chunk_size": 16, "layer_types": ["chunked_attention", FULL]}),
    Variant("gemma2", "untied", {"tie_word_embeddings": False}),
    Variant("gemma3_text", "window_5", {"sliding_window": 5}),
    Variant("gpt_oss", "window_3", {"sliding_window": 3}),
    Variant("qwen3_next", "four_layers", MANY_LAYERS),
    Variant("qwen3_5_text", "four_layers", MANY_LAYERS),
    Variant("lfm2", "conv_last", {"layer_types": [FULL, "conv"]}),
    Variant("olmo_hybrid", "four_layers", MANY_LAYERS),
    Variant("bert", "not_causal", {"is_decoder": False}),
    Variant("deepseek_v3", "no_q_lora", {"q_lora_rank": None}),
    Variant("llama", "gelu", {"hidden_act": "gelu"}),
    Variant("granite", "multipliers", GRANITE),
    Variant("ministral", "layer_types", {"layer_types": [SLIDING, FULL]}),
    Variant("ministral3", "scaled_queries", {"rope_parameters": {**SHORT_YARN, "llama_4_scaling_beta": 0.5}}),
    Variant("smollm3", "no_rope", {"no_rope_layer_interval": 2}),
    Variant("stablelm", "parallel", {"use_parallel_residual": True}),
    Variant("starcoder2", "no_bias", {"use_bias": False}),
]


def variants() -> list[Variant]:
    """All of them: every family that can be built, then the variations."""
    return [Variant(kind) for kind in causal_types() if kind not in LEFT_OUT] + VARIATIONS


def causal_types() -> list[str]:
    """Every model type of transformers' causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_family_config(model_type: str, changes: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    default = kind()
    settings = _small(default)
    for name in kind.sub_configs:
        part = getattr(default, name, None)
        if part is not None:
            settings[name] = _small(part)
    return kind(**_merged(_merged(settings, CHANGES.get(model_type, {})), changes))


def _small(config: Any) -> dict[str, Any]:
    """Small values for the sizes that a config has."""
    sizes, aliases = config.to_dict(), type(config).attribute_map
    known = {name: value for name, value in SIZES.items() if name in sizes and name not in aliases}
    return {name: value for name, value in known.items() if sizes[name] is not None or name in ALWAYS}


def _merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Changes over settings, also inside configs of parts. None takes a setting away."""
    merged = {name: value for name, value in settings.items() if name not in changes}
    for name, value in changes.items():
        inner = settings.get(name)
        if isinstance(value, dict) and isinstance(inner, dict) and "config" in name:
            merged[name] = _merged(inner, value)
        elif value is not None:
            merged[name] = value
    return merged


def tiny_family(variant: Variant, seed: int = 0) -> Any:
    """The model of a variant, with weights of a scale that makes decided distributions."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = tiny_family_config(variant.model_type, variant.changes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                _rescale(name, weight)
        return model


def _rescale(name: str, weight: torch.Tensor) -> None:
    if any(part in name for part in KEPT_SCALES):
        return
    if weight.ndim > 1:
        weight.normal_(0.0, SCALE)
    else:
        weight.add_(torch.randn_like(weight) * 0.1)


def write_family(variant: Variant, folder: Path, seed: int = 0) -> Path:
    """The checkpoint of a variant with a byte tokenizer, as a user finds one on disk."""
    tiny_family(variant, seed).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


# --- what a user gets -------------------------------------------------------------------------------------------------

NEW_TOKENS, K = 15, 4  # the shortest prompt crosses a window of 16 too
NEW_TOKENS_OF_WINDOWS = 30  # every prompt crosses it twice
PROMPT_LENGTHS = (21, 3, 9)  # one past the windows, two before them


@dataclass(frozen=True)
class Outcome:
    """How a variant decodes.

    result           "same", an error's first line, or what differs
    way              how its draft tokens run
    tokens_per_step  with the model as its own draft: k + 1 where nothing is ever rejected
    """

    result: str
    way: str = ""
    tokens_per_step: float = 0.0


def prompts_of(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 250, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def expected_tokens(folder: Path, prompts: list[list[int]], num_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """What transformers' own greedy generation continues each prompt with, one at a time."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, pad_token_id=258)
    for owner in (model.generation_config, model.config):
        for name in ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id"):
            if getattr(owner, name, None) is not None:
                setattr(owner, name, None)
    rows = [model.generate(torch.tensor([prompt]), generation_config=config)[0] for prompt in prompts]
    return [row[len(prompt) :].tolist() for row, prompt in zip(rows, prompts)]


def outcome(folder: Path, variant: Variant) -> Outcome:
    """Plain, n-gram in a batch of three lengths, and the model as its own draft, alone and in that batch, against
    transformers."""
    from paceline.errors import PacelineError

    prompts = prompts_of()
    expected = expected_tokens(folder, prompts, new_tokens_of(folder))
    try:
        return _compared(folder, variant, prompts, expected)
    except PacelineError as error:
        return Outcome(str(error).replace(str(folder), variant.id))


def _compared(folder: Path, variant: Variant, prompts: list[list[int]], expected: list[list[int]]) -> Outcome:
    from paceline import SpeculativeDecoder

    options = {} if variant.runner is None else {"runner": variant.runner}
    settings = {"max_new_tokens": len(expected[0]), "ignore_eos": True}
    with SpeculativeDecoder(str(folder), method="ngram", num_draft_tokens=K, **options) as decoder:
        texts = {"plain": [decoder.generate(prompts[0], num_draft_tokens=0, **settings)]}
        texts["n-gram batch"] = decoder.generate(prompts, **settings)
    with SpeculativeDecoder(str(folder), draft_model=str(folder), num_draft_tokens=K, **options) as decoder:
        texts["draft"] = [decoder.generate(prompts[0], **settings)]
        texts["draft batch"] = decoder.generate(prompts, **settings)
        way = _way(decoder)
    wrong = [name for name, results in texts.items() if any(a.token_ids != b for a, b in zip(results, expected))]
    rates = {round(result.stats.tokens_per_step, 3) for name in ("draft", "draft batch") for result in texts[name]}
    if rates != {1.0 if way == PLAIN else K + 1.0}:
        wrong.append("tokens per step")
    return Outcome(f"differs: {', '.join(wrong)}" if wrong else "same", way, min(rates))


def new_tokens_of(folder: Path) -> int:
    """Multiples of k + 1, so that a draft that is always right fills every step."""
    import json

    config = json.loads((folder / "config.json").read_text())
    windows = [part.get("sliding_window") for part in (config, config.get("text_config") or {})]
    return NEW_TOKENS_OF_WINDOWS if any(windows) else NEW_TOKENS


PLAIN = "plain"


def _way(decoder: Any) -> str:
    """How the target of a decoder runs, for the table."""
    from paceline.core.types import Capability
    from paceline.runners.huggingface import HuggingFaceRunner
    from paceline.runners.huggingface_model import TransformersRunner

    target = decoder._engine.engine.parts.target
    if target.plain_only:
        return PLAIN
    if not isinstance(target, TransformersRunner):
        return "native"
    if not isinstance(target, HuggingFaceRunner):
        return "chains, one sequence a pass"
    return "trees, batches" if Capability.TREE in target.capabilities else "chains, batches"
