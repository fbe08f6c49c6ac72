"""GGUF -> a Hugging Face directory: dequantised bf16 safetensors, config and tokenizer.

Llama and Qwen2 files are read tensor by tensor; other architectures go through transformers' own GGUF route, which
holds the whole model in memory once.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import WeightsError
from paceline.hub.model_config import DecoderSizes, decoder_sizes, gguf_config
from paceline.hub.progress import stage, track

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
SKIPPED = {"rope_freqs.weight"}  # derived from the config


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of a GGUF file into `folder`."""
    reader = _open(gguf)
    architecture = _value(reader, "general.architecture")
    if architecture in ARCHITECTURES:
        _convert_known(reader, architecture, folder)
    else:
        _convert_by_transformers(gguf, folder)
    _save_tokenizer(gguf, reader, folder)


def _open(gguf: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        return GGUFReader(gguf)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise WeightsError(f"{gguf} is not a readable GGUF file ({error}); is it complete?") from error


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def _convert_known(reader: GGUFReader, architecture: str, folder: Path) -> None:
    from safetensors.torch import save_file

    state = _dequantized(reader, architecture)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    _write_config(_config(reader, architecture, state), folder)


def _dequantized(reader: GGUFReader, architecture: str) -> dict[str, Tensor]:
    """Every tensor in bf16, under its Hugging Face name."""
    import torch
    from gguf import dequantize

    num_heads = _value(reader, f"{architecture}.attention.head_count")
    rotary_heads = {"attn_q": num_heads}
    rotary_heads["attn_k"] = _value(reader, f"{architecture}.attention.head_count_kv") or num_heads
    state: dict[str, Tensor] = {}
    for tensor in track(reader.tensors, "converting", len(reader.tensors)):
        if tensor.name in SKIPPED:
            continue
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        projection = tensor.name.rpartition(".")[0].rpartition(".")[2]
        if architecture == "llama" and projection in rotary_heads:
            weight = _two_halves(weight, rotary_heads[projection])
        state[_hugging_face_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    return state


def _two_halves(weight: Tensor, num_heads: int) -> Tensor:
    """GGUF stores llama's rotary pairs side by side; Hugging Face keeps the two halves of a head apart."""
    return weight.view(num_heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _hugging_face_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in BLOCK_NAMES:
        raise WeightsError(f"the GGUF file holds a tensor paceline does not know: {name}")
    return f"model.layers.{match[1]}.{BLOCK_NAMES[match[2]]}.{match[3]}"


def _config(reader: GGUFReader, architecture: str, state: dict[str, Tensor]) -> dict[str, Any]:
    metadata = gguf_config(architecture, lambda key: _value(reader, key))
    vocab_size = state["model.embed_tokens.weight"].shape[0]
    theta = _value(reader, f"{architecture}.rope.freq_base") or 10000.0
    return {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        **_size_keys(decoder_sizes({**metadata, "vocab_size": vocab_size})),
        "hidden_act": "silu",
        # GGUF stores float32: without the rounding 1e-5 would come back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{_value(reader, f'{architecture}.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": "lm_head.weight" not in state,
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def _size_keys(sizes: DecoderSizes) -> dict[str, int]:
    return {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.max_seq_len,
    }


def _write_config(config: dict[str, Any], folder: Path) -> None:
    from transformers import __version__

    config["transformers_version"] = __version__  # without it a Qwen tokenizer is taken for a faulty Mistral one
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _convert_by_transformers(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with stage("converting"):
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
            model.save_pretrained(folder)
    except (ValueError, KeyError, OSError) as error:
        raise WeightsError(f"transformers cannot convert {gguf.name}: {error}") from error


def _save_tokenizer(gguf: Path, reader: GGUFReader, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if _value(reader, "tokenizer.ggml.pre") == "smollm":
        # SmolLM2 was trained with digits split one by one; transformers' GGUF route does not restore that.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.save_pretrained(folder)
