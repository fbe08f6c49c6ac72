"""Medusa heads: several small heads over the target's last hidden state, each guessing one token further ahead.

y = W·(x + SiLU(Ax + b)), the residual part once or several times. The target's own head says token t+1 from the state
at t; Medusa head h says token t+2+h from the same state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import OptionError


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Everything that shapes the heads. draft_vocab_size below vocab_size: the heads say only the tokens of a map."""

    heads: int
    layers: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    bias: bool = True  # of the residual parts

    def __post_init__(self) -> None:
        if self.heads < 1 or self.layers < 0:
            raise OptionError(f"Medusa needs 1 head or more and 0 layers or more, not {self.heads} and {self.layers}")


class _Residual(nn.Module):
    """x + SiLU(Ax + b)"""

    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)
        # A head that has learnt nothing yet says what the target's own head would say.
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        return states + functional.silu(self.linear(states))


class MedusaHeads(nn.Module):
    """All heads of one target."""

    token_map: Tensor

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(
            nn.Sequential(*[_Residual(config.hidden_size, config.bias) for _ in range(config.layers)])
            for _ in range(config.heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) for _ in range(config.heads)
        )
        self.register_buffer("token_map", torch.arange(config.draft_vocab_size))

    def forward(self, hidden: Tensor, heads: int | None = None) -> Tensor:
        """States after the final norm [..., width] -> logits of the first `heads` heads [heads, ..., draft vocab]"""
        wanted = len(self.lm_heads) if heads is None else heads
        hidden = hidden.to(self.lm_heads[0].get_parameter("weight").dtype)
        pairs = list(zip(self.blocks, self.lm_heads))[:wanted]
        return torch.stack([speak(block(hidden)) for block, speak in pairs])

    def start_from(self, weight: Tensor) -> None:
        """Begin every head as a copy of the target's own head, [vocab, width]."""
        with torch.no_grad():
            for speak in self.lm_heads:
                speak.get_parameter("weight").copy_(weight[self.token_map])

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """Ids of the heads' own vocabulary -> ids of the target."""
        return self.token_map[ids] if self.config.draft_vocab_size < self.config.vocab_size else ids

    def choose_vocabulary(self, target_ids: Tensor) -> None:
        """Let the heads say exactly these tokens of the target."""
        if target_ids.shape != self.token_map.shape:
            raise OptionError(f"these heads say {self.config.draft_vocab_size} tokens, not {target_ids.numel()}")
        self.token_map.copy_(target_ids)
