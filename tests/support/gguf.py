"""A tiny model as a GGUF file, written by the gguf package; and random blocks of every kind."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

# What llama.cpp calls an architecture, where Hugging Face's model_type is another.
GGUF_NAMES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}
ADDED_TO_NORMS = {"gemma2": 1.0, "gemma3_text": 1.0}
Change = Callable[[Any], None]
Kinds = Callable[[str], str | None]
# Where a block has its scales in half precision, and how large they are for weights of about 0.2.
HALVES: dict[str, dict[int, float]] = {
    "Q4_0": {0: 0.04}, "Q4_1": {0: 0.04, 2: -0.3}, "Q5_0": {0: 0.02}, "Q5_1": {0: 0.02, 2: -0.3}, "Q8_0": {0: 0.003},
    "IQ4_NL": {0: 0.003}, "Q4_K": {0: 0.0012, 2: 0.009}, "Q5_K": {0: 0.0006, 2: 0.009}, "Q6_K": {208: 0.00015},
    "IQ4_XS": {0: 0.0001}, "Q3_K": {108: 0.004}, "Q2_K": {80: 0.02, 82: 0.02},
}  # fmt: skip


def mix(default: str, **parts: str) -> Kinds:
    """The kind of every matrix by what llama.cpp calls it: attn_v, output …; others are of the default."""
    return lambda name: parts.get(name.split(".")[-2], default)


# As llama.cpp mixes kinds.
MIXES = {
    "q4_k_m": mix("Q4_K", attn_v="Q6_K", ffn_down="Q6_K", token_embd="Q6_K", output="Q6_K"),
    "q3_k_m": mix("Q3_K", attn_v="Q5_K", attn_output="Q4_K", ffn_down="Q4_K", output="Q6_K"),
    "q2_k": mix("Q2_K", attn_v="Q3_K", attn_output="Q3_K", ffn_down="Q3_K", output="Q6_K"),
    "iq4_xs": mix("IQ4_XS", attn_v="Q5_K", output="Q6_K"),
}


def write_gguf(
    path: Path,
    model: Any,
    *,
    metadata: Change | None = None,
    quantization: Any = None,
    kinds: Kinds | None = None,
    tensors_a_file: int = 0,
    without: tuple[str, ...] = (),
    added: dict[str, np.ndarray] | None = None,
    pre_tokenizer: str = "gpt-2",
    tokenizer: Change | None = None,
) -> Path:
    """Write a model. metadata: adds keys with the writer; quantization: of every matrix.

    kinds: the kind of random blocks that each matrix holds instead of its weights, by its name; None: as it is.
    tensors_a_file: more of them go to a further file, as llama-gguf-split divides a model; 0: all are in one.
    """
    import gguf

    model_type = model.config.model_type
    writer = gguf.GGUFWriter(str(path), GGUF_NAMES.get(model_type, model_type), split_max_tensors=tensors_a_file)
    _add_sizes(writer, model.config)
    OWN_KEYS.get(model_type, lambda writer, config: None)(writer, model.config)
    if tokenizer is None:
        _add_tokenizer(writer, model.config.vocab_size, pre_tokenizer)
    else:
        tokenizer(writer)
    if metadata is not None:
        metadata(writer)
    tensors = gguf_tensors(model) | (added or {})
    for name, tensor in tensors.items():
        if name in without:
            continue
        kind = kinds(name) if kinds is not None and tensor.ndim > 1 else None
        if kind is not None:
            writer.add_tensor(name, _blocks_named(name, kind, tensor), raw_dtype=gguf.GGMLQuantizationType[kind])
        elif quantization is not None and tensor.ndim > 1:
            writer.add_tensor(name, gguf.quantize(tensor, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _blocks_named(name: str, kind: str, tensor: np.ndarray) -> np.ndarray:
    """Random blocks of the shape of a tensor, others for every name."""
    rows = random_blocks(kind, tensor.size // tensor.shape[-1], tensor.shape[-1], seed=zlib.crc32(name.encode()))
    return rows.reshape(*tensor.shape[:-1], -1)


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Rows of a file, uint8 [rows, bytes]: any bits, and scales that are numbers."""
    import gguf

    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows, columns // block_size, block_bytes), dtype=np.uint8)
    for place, size in HALVES[kind].items():
        scales = size * generator.uniform(0.5, 1.5, (*blocks.shape[:2], 1))
        blocks[..., place : place + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    """The weights under the names of llama.cpp, in float32."""
    config = model.config
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in state.items():
        stored = _stored(name, tensor, config).numpy()
        if name.endswith(".gate_up_proj") and tensor.dim() == 3:
            gate, up = np.split(stored, 2, axis=1)
            prefix = gguf_name(name.replace("gate_up_proj", "gate_proj.weight"), config.model_type)
            tensors |= {prefix: gate, prefix.replace("gate", "up"): up}
        else:
            tensors[gguf_name(name, config.model_type)] = stored
    return tensors


def gguf_name(name: str, model_type: str = "llama") -> str:
    """A tensor's name in a file, by the tables of the gguf package."""
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(numbers[GGUF_NAMES.get(model_type, model_type)], 64)
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found if found.endswith((".weight", ".bias")) else f"{found}.weight"


def _stored(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp keeps the rotary pairs of a Llama side by side, and adds the one that Gemma's norms leave out."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if config.model_type == "llama" and heads:
        tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    added = ADDED_TO_NORMS.get(config.model_type, 0.0) if name.endswith("norm.weight") else 0.0
    return (tensor.detach().float() + added).contiguous()


def _add_sizes(writer: Any, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1.0)))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_name("tiny")
    writer.add_file_type(0)


def _add_gemma2(writer: Any, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _add_gemma3(writer: Any, config: Any) -> None:
    """The base of the windows' rope, which older converters leave out, and the scale of the other layers' rope."""
    import gguf

    full, sliding = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    writer.add_sliding_window(config.sliding_window)
    if sliding["rope_theta"] != 10000.0:
        writer.add_rope_freq_base_swa(sliding["rope_theta"])
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])


def _add_experts(writer: Any, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)


# Beside the sizes, as llama.cpp's converter writes them.
OWN_KEYS: dict[str, Callable[[Any, Any], None]] = {
    "gemma2": _add_gemma2,
    "gemma3_text": _add_gemma3,
    "qwen3_moe": _add_experts,
    "phi3": lambda writer, config: writer.add_sliding_window(config.sliding_window or 0),
    "stablelm": lambda writer, config: writer.add_layer_norm_eps(config.layer_norm_eps),
    "starcoder2": lambda writer, config: writer.add_layer_norm_eps(config.norm_epsilon),
}


def _add_tokenizer(writer: Any, vocab_size: int, pre_tokenizer: str) -> None:
    """One token a byte, one merge, and control tokens for the rest of the vocabulary."""
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    tokens += [f"<|{index}|>" for index in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * (vocab_size - 257))
    writer.add_token_merges(["h e"] * 2)  # of an array of one, transformers 5.17 makes a string
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)


def llama3_rope_factors(config: Any) -> np.ndarray:
    """rope_freqs.weight as llama.cpp's conversion writes it: by how much each frequency is divided."""
    rope = config.rope_parameters
    old_length, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    factors = []
    for frequency in frequencies:
        turns = old_length * float(frequency) / (2 * np.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1.0 / ((1.0 - share) / rope["factor"] + share))
    return np.array(factors, dtype=np.float32)
