"""LoRA adapters as PEFT writes them, with random weights, and the models that result from merging them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SOME = ("q_proj", "v_proj", "down_proj")


def write_adapter(
    folder: Path, model: Any, seed: int, rank: int = 4, modules: tuple[str, ...] = ALL, **settings: Any
) -> Path:
    """An adapter for a transformers model, large enough to change its text."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in modules:
            out_features, in_features = module.weight.shape
            prefix = f"base_model.model.{name}.lora_"
            tensors[f"{prefix}A.weight"] = 0.3 * torch.randn(rank, in_features, generator=generator)
            tensors[f"{prefix}B.weight"] = 0.3 * torch.randn(out_features, rank, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    return folder


@torch.no_grad()
def merged(model: Any, folder: Path) -> Any:
    """The model itself, with the adapter merged into its weights; the sum is formed in float64."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** (0.5 if config.get("use_rslora") else 1))
    tensors = load_file(folder / "adapter_model.safetensors")
    for key in (key for key in tensors if key.endswith("lora_A.weight")):
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        down, up = tensors[key].double(), tensors[key.replace("lora_A", "lora_B")].double()
        weight = model.get_submodule(name).weight
        weight.copy_((weight.double() + scale * up @ down).to(weight.dtype))
    return model
