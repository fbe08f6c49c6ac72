"""The Markov head and the confidence head of DSpark.

The Markov head adds to the logits of a row what the token before it says: W2·W1[previous token]. Kinds: `vanilla`;
`gated`, where the row's state weighs W1's values; `rnn`, which also remembers the earlier tokens of the block.
The confidence head predicts the probability that a draft token is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.errors import OptionError

KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True, eq=False)
class MarkovStep:
    """What one row adds to its logits [..., draft_vocab_size], and what the next row needs of it [..., rank]."""

    bias: Tensor
    memory: Tensor


class MarkovHead(nn.Module):
    """What follows a token, of low rank. It starts without effect."""

    def __init__(self, kind: str, rank: int, hidden_size: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        if kind not in KINDS:
            raise OptionError(f"there is no Markov head of kind {kind!r}; the kinds are {', '.join(KINDS)}")
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank) if kind == "rnn" else None
        nn.init.zeros_(self.markov_w2.weight)

    def previous(self, tokens: Tensor) -> Tensor:
        """W1 of the tokens before some rows, ids of the target. [..., rank]"""
        vectors: Tensor = self.markov_w1(tokens)
        return vectors

    def step(self, states: Tensor, previous: Tensor, memory: Tensor | None = None) -> MarkovStep:
        """states [..., hidden_size] and W1 of the tokens before them; memory: of the row before, None at the first."""
        memory = torch.zeros_like(previous) if memory is None else memory
        latent = previous
        if self.gate_proj is not None:
            latent = torch.sigmoid(self.gate_proj(torch.cat([states, previous], dim=-1))) * previous
        elif self.joint_proj is not None:
            joined = self.joint_proj(torch.cat([memory, previous, states], dim=-1))
            gate, candidate, output = joined.chunk(3, dim=-1)
            weight = torch.sigmoid(gate)
            memory = weight * memory + (1 - weight) * torch.tanh(candidate)
            latent = torch.tanh(output)
        return MarkovStep(self.markov_w2(latent), memory)


class ConfidenceHead(nn.Module):
    """The logit of the probability that a draft token is accepted."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, features: Tensor) -> Tensor:
        """A row's state, beside it W1 of the token before where the head reads it. [..., input_size] -> [...]"""
        logits: Tensor = self.proj(features)
        return logits.squeeze(-1)
