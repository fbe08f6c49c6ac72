"""Kernels that vLLM's CPU build gets wrong, in plain torch. worker.py registers them inside vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def expand(
    output: Tensor, values: Tensor, cumulative: Tensor, replace_from: int, replace_to: int, *args: Any, **options: Any
) -> None:
    """Repeat each sequence's value for each of its draft tokens: [a, b] and ends [2, 5] fill [a, a, b, b, b].

    Temperatures, top_k and top_p reach the verification of draft tokens this way. vLLM's own for CPUs (0.32) writes
    into a copy of the output, so that they are whatever the memory held before, and sampled outputs are wrong.
    """
    counts = torch.diff(cumulative, prepend=cumulative.new_zeros(1))
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    output.copy_(replaced.repeat_interleave(counts.to(torch.int64)))


def rms_norm_by_layer(states: Tensor, weights: Tensor, eps: float) -> Tensor:
    """RMS norm of each layer's rows by the layer's own weights. states [layers, ..., size], weights [layers, size]

    vLLM's own for CPUs (0.32) takes the first layer's weights for all: the later layers of a DFlash head see context
    keys that are none of theirs, and fewer of its draft tokens are accepted.
    """
    own = weights.view(weights.shape[0], *[1] * (states.dim() - 2), weights.shape[1])
    return torch.nn.functional.rms_norm(states, states.shape[-1:], None, eps) * own


def for_rows(process: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function of logits, which leaves logits without rows alone."""

    def processed(logits: Tensor, *args: Any, **options: Any) -> Tensor:
        return process(logits, *args, **options) if logits.shape[0] else logits

    return processed
