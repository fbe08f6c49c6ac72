"""Small checkpoints as other projects publish them, tensor by tensor: nothing here goes through paceline's writers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

WIDTH = 32  # of the tiny target in tests/tiny.py
INNER = 48
VOCABULARY = 259
REDUCED = 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.2


def llama_fields() -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "model_type": "llama",
    }


def layer(prefix: str, read: int) -> dict[str, Tensor]:
    return {
        f"{prefix}self_attn.q_proj.weight": random(HEADS * HEAD_DIM, read),
        f"{prefix}self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, read),
        f"{prefix}self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, read) + 0.01,
        f"{prefix}self_attn.o_proj.weight": random(WIDTH, HEADS * HEAD_DIM),
        f"{prefix}mlp.gate_proj.weight": random(INNER, WIDTH),
        f"{prefix}mlp.up_proj.weight": random(INNER, WIDTH) + 0.01,
        f"{prefix}mlp.down_proj.weight": random(WIDTH, INNER),
        f"{prefix}post_attention_layernorm.weight": torch.ones(WIDTH),
    }


def eagle1() -> dict[str, Tensor]:
    return {**layer("layers.0.", WIDTH), "fc.weight": random(WIDTH, 2 * WIDTH), "fc.bias": random(WIDTH)}


def eagle3(prefix: str = "midlayer.") -> dict[str, Tensor]:
    ids = torch.arange(REDUCED) * 4 + 1
    output = torch.zeros(VOCABULARY, dtype=torch.bool)
    output[ids] = True
    return {
        **layer(prefix, 2 * WIDTH),
        f"{prefix}hidden_norm.weight": torch.ones(WIDTH),
        f"{prefix}input_layernorm.weight": torch.ones(WIDTH),
        "fc.weight": random(WIDTH, 3 * WIDTH),
        "norm.weight": torch.ones(WIDTH),
        "lm_head.weight": random(REDUCED, WIDTH),
        "d2t": ids - torch.arange(REDUCED),
        "t2d": output,
    }


def eagle31() -> dict[str, Tensor]:
    """With a norm for each of the three states, as SpecForge writes EAGLE-3.1."""
    norms = {f"fc_norm.{index}.weight": torch.full((WIDTH,), 0.8 + 0.2 * index) for index in range(3)}
    return {**eagle3(), **norms}


def medusa(heads: int = 3) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for head in range(heads):
        found[f"{head}.0.linear.weight"] = random(WIDTH, WIDTH) + 0.01 * head
        found[f"{head}.0.linear.bias"] = random(WIDTH)
        found[f"{head}.1.weight"] = random(VOCABULARY, WIDTH) + 0.01 * head
    return found


def medusa_vllm(heads: int = 3) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {"token_map": torch.arange(REDUCED) * 3}
    for head in range(heads):
        found[f"blocks.{head}.layers.0.weight"] = random(WIDTH, WIDTH) + 0.01 * head
        found[f"lm_heads.{head}.weight"] = random(REDUCED, WIDTH) + 0.01 * head
    return found


CONFIGS: dict[str, dict[str, Any]] = {
    "eagle1": {**llama_fields(), "bias": True},
    "eagle3": {**llama_fields(), "draft_vocab_size": REDUCED, "architectures": ["LlamaForCausalLMEagle3"]},
    "specforge": {
        **llama_fields(),
        "draft_vocab_size": REDUCED,
        "architectures": ["Eagle3LlamaForCausalLM"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    },
    "eagle3.1": {
        **llama_fields(),
        "draft_vocab_size": REDUCED,
        "architectures": ["LlamaForCausalLMEagle3"],
        "fc_norm": True,
        "norm_output": True,
    },
    "speculators": {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": llama_fields(),
        "draft_vocab_size": REDUCED,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny", "architectures": []}},
    },
    # The published number of heads is wrong on purpose: it is, in files that people download.
    "medusa": {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"},
    "medusa_vllm": {"num_heads": 3, "num_hidden_layers": 1, "hidden_size": WIDTH, "vocab_size": VOCABULARY},
}
TENSORS = {
    "eagle1": eagle1,
    "eagle3": eagle3,
    "specforge": eagle3,
    "eagle3.1": eagle31,
    "speculators": lambda: eagle3("layers.0."),
    "medusa": medusa,
    "medusa_vllm": medusa_vllm,
}
FILES = {"eagle1": "pytorch_model.bin", "medusa": "medusa_lm_head.pt"}


def write(folder: Path, layout: str, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """A checkpoint of one layout; `tensors` and `config` replace what belongs into it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIGS[layout], **config}))
    held = TENSORS[layout]() if tensors is None else tensors
    name = FILES.get(layout, "model.safetensors")
    if name.endswith("safetensors"):
        save_file(held, folder / name)
    else:
        torch.save(held, folder / name)
    return folder
