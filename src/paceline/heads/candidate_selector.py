"""The candidate selector of DFlash 2: a path through the likeliest tokens of every row of a block.

The rows of a block are predicted at once and do not know each other's tokens. The selector adds to a candidate's logit
how well it follows the token before it: S(a, b) = u(b) + ⟨A[a] ⊙ g, B[b]⟩, where g is a projection of the row's state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.layers.cpu_selector import CompiledSelector

INITIAL_SPREAD = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class TokenCandidates:
    """The likeliest tokens of each row, the likeliest first. Both [..., top_k]."""

    scores: Tensor  # logits
    ids: Tensor  # of the head's own vocabulary


class CandidateSelector(nn.Module):
    """Scores of pairs of neighbouring tokens, of low rank."""

    def __init__(self, hidden_size: int, rank: int, top_k: int, vocab_size: int, draft_vocab_size: int) -> None:
        """A token before is any of the target's; a candidate is one the head can predict."""
        super().__init__()
        self.top_k = min(top_k, draft_vocab_size)
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank) * INITIAL_SPREAD)
        self.successor_codebook = nn.Parameter(torch.randn(draft_vocab_size, rank) * INITIAL_SPREAD)
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        nn.init.normal_(self.hidden_projection.weight, std=INITIAL_SPREAD)
        self.compiled: CompiledSelector | None = None  # a path in one call

    def compile_path(self, target_ids: Tensor) -> None:
        """Choose greedy paths by the compiled CPU kernels, where they take the codebooks. target_ids: of candidates."""
        books = (self.predecessor_codebook, self.successor_codebook)
        self.compiled = CompiledSelector.of(*books, target_ids, self.top_k)

    def candidates(self, logits: Tensor) -> TokenCandidates:
        """logits [..., draft_vocab_size]"""
        best = logits.topk(self.top_k, dim=-1)
        return TokenCandidates(best.values, best.indices)

    def pair_scores(self, states: Tensor, candidates: TokenCandidates, predecessors: Tensor) -> Tensor:
        """The score of every candidate after every token that may come before it. [..., predecessors, candidates]

        states        [..., hidden_size], those the logits are made of
        predecessors  int64 [..., predecessors], ids of the target
        """
        before = self.predecessor_codebook[predecessors] * self.hidden_projection(states)[..., None, :]
        after = self.successor_codebook[candidates.ids]
        return candidates.scores[..., None, :] + before @ after.transpose(-1, -2)
