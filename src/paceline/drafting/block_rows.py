"""The draft tokens of a block, chosen from its rows: each row alone, along a path of candidates, or one after another.

The rows of a DFlash block are independent. DFlash 2's selector and DSpark's Markov head read the token before, so a
block is walked from its anchor. In every kind the logits of a depth are final before its token is drawn: their softmax
is the q it is drawn from. All of it is tensor work without a look at a value, so a CUDA graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.device.argmax import argmax_rows
from paceline.heads.candidate_selector import CandidateSelector, TokenCandidates
from paceline.heads.dflash import DFlashHead
from paceline.heads.markov_head import MarkovHead
from paceline.layers.cpu_selector import CompiledSelector


@dataclass(frozen=True, slots=True, eq=False)
class GreedyBlock:
    """The likeliest tokens of a block, ids of the target, and how sure the head is of each. Both [sequences, depth]."""

    tokens: Tensor
    confidence: Tensor | None = None  # None: not wanted


@dataclass(frozen=True, slots=True, eq=False)
class RankedRows:
    """The likeliest tokens of every depth after each token that may come before, the likeliest first.

    scores, places  [sequences, depth, tokens before, ranks]: log-probability, and place among the depth's tokens
    tokens          int64 [sequences, depth, places], ids of the target
    """

    scores: Tensor
    places: Tensor
    tokens: Tensor


class DraftRows:
    """The rows of one block for every sequence: each depth is predicted without the tokens before it."""

    def __init__(self, head: DFlashHead, states: Tensor, anchors: Tensor) -> None:
        """states [sequences, depth, hidden_size] of the rows that draft; anchors [sequences], ids of the target."""
        self.head, self.states, self.anchors = head, states, anchors
        self.unary = head.logits(states)  # [sequences, depth, draft_vocab_size]

    @property
    def depth(self) -> int:
        return self.states.shape[1]

    def logits(self, depth: int, previous: Tensor) -> Tensor:
        """Logits of one depth [sequences, draft_vocab_size] after these tokens, ids of the target. In rising order."""
        return self.unary[:, depth]

    def confidence(self, depth: int, previous: Tensor, logits: Tensor) -> Tensor:
        """How sure the head is that its token of this depth is accepted, known before it is drawn. [sequences]"""
        return likeliest_prob(logits)

    def greedy(self, with_confidence: bool = False) -> GreedyBlock:
        tokens = self.head.to_target_ids(argmax_rows(self.unary))
        return GreedyBlock(tokens, likeliest_prob(self.unary) if with_confidence else None)

    def ranked(self, branches: int) -> RankedRows:
        """Without the tokens before: every token of a depth has the same alternatives behind it."""
        best = torch.log_softmax(self.unary.float(), dim=-1).topk(min(branches, self.unary.shape[-1]), dim=-1)
        ranks = best.indices.shape[-1]
        places = torch.arange(ranks, device=best.indices.device).expand(*best.indices.shape[:2], ranks, ranks)
        scores = best.values[:, :, None].expand(-1, -1, ranks, -1)
        return RankedRows(scores, places, self.head.to_target_ids(best.indices))


class SelectedRows(DraftRows):
    """A path through the candidates of every row. What is no candidate has no probability."""

    def __init__(self, head: DFlashHead, selector: CandidateSelector, states: Tensor, anchors: Tensor) -> None:
        super().__init__(head, states, anchors)
        self.selector = selector

    @cached_property
    def candidates(self) -> TokenCandidates:
        return self.selector.candidates(self.unary)

    @cached_property
    def candidate_tokens(self) -> Tensor:
        """Ids of the target, [sequences, depth, top_k]."""
        return self.head.to_target_ids(self.candidates.ids)

    def logits(self, depth: int, previous: Tensor) -> Tensor:
        here = slice(depth, depth + 1)
        scores = self._scores(here, previous[:, None, None])[:, 0, 0]
        nothing = torch.full_like(self.unary[:, depth], -torch.inf)
        return nothing.scatter(1, self.candidates.ids[:, depth], scores.to(nothing.dtype))

    def greedy(self, with_confidence: bool = False) -> GreedyBlock:
        """All pairs of neighbours are scored at once; the walk only looks them up."""
        if self.selector.compiled is not None:
            return self._compiled_greedy(self.selector.compiled, with_confidence)
        scores = self._scores(slice(0, 1), self.anchors[:, None, None])[:, 0]  # [sequences, 1, top_k]
        places, confidences = [scores.argmax(dim=-1)], [likeliest_prob(scores)]
        if self.depth > 1:
            pairs = self._scores(slice(1, None), self.candidate_tokens[:, :-1])  # [.., before, after]
            after, confidence = pairs.argmax(dim=-1), likeliest_prob(pairs)
            for depth in range(self.depth - 1):
                confidences.append(confidence[:, depth].gather(1, places[-1]))
                places.append(after[:, depth].gather(1, places[-1]))
        tokens = self.candidate_tokens.gather(2, torch.stack(places, dim=1))[..., 0]
        return GreedyBlock(tokens, torch.cat(confidences, dim=1) if with_confidence else None)

    def _compiled_greedy(self, compiled: CompiledSelector, with_confidence: bool) -> GreedyBlock:
        gates, anchors = self.selector.hidden_projection(self.states).float(), self.anchors.tolist()
        paths = [compiled.path(*parts) for parts in zip(self.unary.float(), gates, anchors)]
        tokens = torch.stack([path.tokens for path in paths])
        return GreedyBlock(tokens, torch.stack([path.confidence for path in paths]) if with_confidence else None)

    def ranked(self, branches: int) -> RankedRows:
        first = self._scores(slice(0, 1), self.anchors[:, None, None]).expand(-1, -1, self.candidates.ids.shape[-1], -1)
        pairs = torch.cat([first, self._scores(slice(1, None), self.candidate_tokens[:, :-1])], dim=1)
        best = torch.log_softmax(pairs.float(), dim=-1).topk(min(branches, pairs.shape[-1]), dim=-1)
        return RankedRows(best.values, best.indices, self.candidate_tokens)

    def _scores(self, depths: slice, predecessors: Tensor) -> Tensor:
        """Scores [sequences, depths, predecessors, top_k]"""
        candidates = TokenCandidates(self.candidates.scores[:, depths], self.candidates.ids[:, depths])
        return self.selector.pair_scores(self.states[:, depths], candidates, predecessors)


class MarkovRows(DraftRows):
    """Every row adds to its logits what the token before it says."""

    def __init__(self, head: DFlashHead, markov: MarkovHead, states: Tensor, anchors: Tensor) -> None:
        super().__init__(head, states, anchors)
        self.markov = markov
        self._memory: Tensor | None = None

    def logits(self, depth: int, previous: Tensor) -> Tensor:
        memory = None if depth == 0 else self._memory
        step = self.markov.step(self.states[:, depth], self.markov.previous(previous), memory)
        self._memory = step.memory
        return self.unary[:, depth] + step.bias

    def greedy(self, with_confidence: bool = False) -> GreedyBlock:
        tokens, confidences, previous = [], [], self.anchors
        for depth in range(self.depth):
            logits = self.logits(depth, previous)
            if with_confidence:
                confidences.append(self.confidence(depth, previous, logits))
            previous = self.head.to_target_ids(logits.argmax(dim=-1))
            tokens.append(previous)
        return GreedyBlock(torch.stack(tokens, dim=1), torch.stack(confidences, dim=1) if with_confidence else None)

    def confidence(self, depth: int, previous: Tensor, logits: Tensor) -> Tensor:
        """By the confidence head where the head has one."""
        confidence_head = self.head.confidence_head
        if confidence_head is None:
            return likeliest_prob(logits)
        features = self.states[:, depth]
        if self.head.config.confidence_reads_markov:
            features = torch.cat([features, self.markov.previous(previous)], dim=-1)
        return torch.sigmoid(confidence_head(features).float())


def likeliest_prob(logits: Tensor) -> Tensor:
    """The probability of the likeliest token of each row."""
    return torch.exp(logits.amax(dim=-1).float() - logits.float().logsumexp(dim=-1))


def block_rows(head: DFlashHead, states: Tensor, anchors: Tensor) -> DraftRows:
    """The rows of a block as this head predicts them."""
    if head.candidate_selector is not None:
        return SelectedRows(head, head.candidate_selector, states, anchors)
    if head.markov_head is not None:
        return MarkovRows(head, head.markov_head, states, anchors)
    return DraftRows(head, states, anchors)
