"""Random MTP heads for the toy, whose states are its logits: one of Qwen's layers, one of DeepSeek's."""

from __future__ import annotations

from typing import Any

import torch

from paceline.heads.mtp import MtpHead, mtp_config
from paceline.heads.mtp_layer import layer_config
from paceline.heads.mtp_names import DEEPSEEK, MIMO, QWEN
from tests.support.families import tiny_family_config

LAYOUTS: dict[str, Any] = {"qwen3_5_text": QWEN, "deepseek_v3": DEEPSEEK, "qwen2": MIMO}


def toy_mtp_head(
    model_type: str = "qwen3_5_text", vocab_size: int = 4, seed: int = 0, num_modules: int = 1
) -> MtpHead:
    config = tiny_family_config(model_type, {"hidden_size": vocab_size, "vocab_size": vocab_size, **SPECIAL})
    layer = layer_config(config, has_experts=model_type == "deepseek_v3")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = MtpHead(mtp_config(layer, LAYOUTS[model_type], {}, num_modules))
        for weight in head.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.5)
    return head.eval().requires_grad_(False)


SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
