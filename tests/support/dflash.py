"""Tiny random DFlash heads of every variant, for the toy and for the tiny Llama."""

from __future__ import annotations

from typing import Any

import torch

from paceline.heads.dflash import DFlashConfig, DFlashHead

VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 2, "selector_rank": 3, "selector_top_k": 2},
    "dspark": {"sample_from_anchor": True, "markov_rank": 3, "confidence_head": True, "confidence_reads_markov": True},
    "dspark-gated": {"sample_from_anchor": True, "markov_rank": 3, "markov_kind": "gated"},
    "dspark-rnn": {"markov_rank": 3, "markov_kind": "rnn"},
    "jetspec": {"causal": True},
}


def random_head(config: DFlashConfig, seed: int = 0, scale: float = 0.6) -> DFlashHead:
    """Nothing in it starts at zero: every part decides."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = DFlashHead(config)
        for name, value in head.named_parameters():
            value.data = torch.randn_like(value) * scale + (1.0 if "norm" in name or "base_kernel" in name else 0.0)
    return head.eval().requires_grad_(False)


def toy_head(variant: str = "dflash", seed: int = 0, vocab_size: int = 4, **changes: Any) -> DFlashHead:
    """For the toy, whose state is its logits and which returns it three times."""
    sizes: dict[str, Any] = {
        "hidden_size": vocab_size, "intermediate_size": 8, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1,
        "head_dim": 2, "vocab_size": vocab_size, "draft_vocab_size": vocab_size, "target_hidden_size": vocab_size,
        "feature_layers": (0, 1, 2), "block_size": 4, "mask_token_id": vocab_size - 1,
    }  # fmt: skip
    options = dict(VARIANTS[variant])
    if options.get("conv_group_size"):
        options["conv_group_size"] = 1 if vocab_size % 2 else 2
    return random_head(DFlashConfig(**{**sizes, **options, **changes}), seed)


def tiny_head(variant: str = "dflash", seed: int = 0, **changes: Any) -> DFlashHead:
    """For the Llama of tests/support/tiny.py; the outputs of its first two layers are read."""
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "vocab_size": 259, "draft_vocab_size": 259, "target_hidden_size": 32, "feature_layers": (1, 2),
        "block_size": 6, "mask_token_id": 255,
    }  # fmt: skip
    return random_head(DFlashConfig(**{**sizes, **VARIANTS[variant], **changes}), seed, scale=0.3)
