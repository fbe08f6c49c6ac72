"""Optimizers of a training: AdamW, or Muon for the matrices and AdamW for everything else.

Muon orthogonalises the step of a matrix and needs fewer steps. Tables of token vectors stay with AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from paceline.errors import OptionError

OPTIMIZERS = ("adamw", "muon")
WEIGHT_DECAY = 0.01
BETAS, EPS = (0.9, 0.95), 1e-8
MOMENTUM = 0.95
TABLE_ROWS = 8192  # a matrix with more rows is a table of tokens


def optimizer_of(name: str, weights: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """The optimizer of this name over these weights."""
    weights = list(weights)
    if name == "adamw":
        return _adamw(weights, learning_rate)
    matrices = [weight for weight in weights if weight.ndim == 2 and max(weight.shape) <= TABLE_ROWS]
    others = [weight for weight in weights if not any(weight is matrix for matrix in matrices)]
    return JoinedOptimizer([_muon(matrices, learning_rate), _adamw(others, learning_rate)])


def _adamw(weights: list[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """Matrices decay, scales do not."""
    matrices = [weight for weight in weights if weight.ndim > 1]
    scales = [weight for weight in weights if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, eps=EPS)


def _muon(weights: list[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """Steps are as large as AdamW's, so both take the same learning rate."""
    try:
        from torch.optim import Muon
    except ImportError:
        raise OptionError("--optimizer muon needs torch 2.9 or newer; use adamw") from None
    return Muon(weights, lr=learning_rate, weight_decay=WEIGHT_DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")


class JoinedOptimizer(torch.optim.Optimizer):
    """Several optimizers of different weights as one: one state, one step."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self._parts = parts
        self.defaults: dict[str, Any] = {}
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self._parts for group in part.param_groups]
