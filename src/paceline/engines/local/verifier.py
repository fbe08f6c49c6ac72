"""Verification of a batch: the logits of one pass in, one result a sequence out.

Plainly greedy sequences are verified together: one argmax over the whole pass, one copy to the host. The others go
through `distribution`, those with the same settings together, and through the acceptance rule of their sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from paceline.core.draft_tree import DraftTree, path_to
from paceline.core.sampling import adjusted, distribution
from paceline.core.sequence import ScoreProcessor, Sequence, group_by_sampling
from paceline.core.types import ModelOutput, RowOutput, TokenLogprob, VerifyResult
from paceline.core.verify import verify_greedy
from paceline.device.argmax import argmax_rows
from paceline.engines.local.verifier_graphs import GraphVerifier, can_verify_on_device


class Verifier:
    """Applies to each sequence its own acceptance rule."""

    def __init__(self) -> None:
        self._on_device = GraphVerifier()

    def verify(self, seqs: list[Sequence], trees: list[DraftTree], output: ModelOutput) -> list[VerifyResult]:
        """One result a sequence, in order."""
        if can_verify_on_device(seqs, trees, output):
            return self._on_device.verify(seqs, trees, output)
        results: dict[int, VerifyResult] = {}
        greedy = [index for index, seq in enumerate(seqs) if _argmax_decides(seq)]
        if greedy:
            argmaxes = Argmaxes.of(trees, output)
            results |= {index: argmaxes.verify(index) for index in greedy}
        others = [index for index in range(len(seqs)) if index not in results]
        for places in group_by_sampling([seqs[index] for index in others]):
            group = [others[place] for place in places]
            results |= dict(zip(group, self._sampled(group, seqs, trees, output)))
        return [results[index] for index in range(len(seqs))]

    def _sampled(
        self, group: list[int], seqs: list[Sequence], trees: list[DraftTree], output: ModelOutput
    ) -> list[VerifyResult]:
        """Results of sequences with the same settings. Where nothing is drafted every rule is one draw, batched."""
        members, drafts = [seqs[index] for index in group], [trees[index] for index in group]
        target = target_rows(members, drafts, [output[index].logits for index in group])
        uniforms = [seq.verify_uniforms(tree.num_draft_tokens + 1) for seq, tree in zip(members, drafts)]
        if not any(tree.num_draft_tokens for tree in drafts):
            drawn = members[0].params.rule.draw(target, torch.cat(uniforms))
            return [VerifyResult([], token) for token in drawn.tolist()]
        targets = torch.split(target.cpu(), [tree.num_draft_tokens + 1 for tree in drafts])
        return [seq.params.rule.verify(*row) for seq, row in zip(members, zip(drafts, targets, uniforms))]


def _argmax_decides(seq: Sequence) -> bool:
    """Whether argmax equality decides. A lossy rule is not that, not even for a greedy sequence: it must show."""
    return seq.sampling.plain_greedy and not seq.params.reads_paths and seq.params.rule.lossless


def target_rows(seqs: list[Sequence], trees: list[DraftTree], logits: list[Tensor]) -> Tensor:
    """The target's distribution after each sequence and after each of its draft tokens, along its own path.

    The sequences have the same sampling settings. [draft tokens + 1 of all sequences, vocab], where the logits are.
    """
    rows = [own[: tree.num_draft_tokens + 1] for own, tree in zip(logits, trees)]
    if len(seqs) > 1:  # the same settings, so no path matters
        return distribution(torch.cat(rows), seqs[0].sampling)
    seq = seqs[0]
    constraint = seq.params.constraint
    paths = _token_paths(trees[0]) if seq.sampling.penalised or seq.params.reads_paths else []
    if seq.params.processor is not None:
        return processed_rows(seq.params.processor, paths, rows[0], greedy=seq.sampling.greedy)
    histories = [seq.history(path) for path in paths] if seq.sampling.penalised else None
    allowed = None if constraint is None else torch.stack([constraint.allowed(path) for path in paths])
    return distribution(rows[0], seq.sampling, histories, allowed)


def processed_rows(processor: ScoreProcessor, paths: list[list[int]], logits: Tensor, *, greedy: bool) -> Tensor:
    """The distribution of each row as a processor shapes it. [rows, vocab]"""
    scores = torch.stack([processor.process(path, row) for path, row in zip(paths, logits.float())])
    if greedy:
        return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    return torch.softmax(scores, dim=-1)


def _token_paths(tree: DraftTree) -> list[list[int]]:
    """The draft tokens before each row: none for the sequence itself, then up to and including each node."""
    tokens = tree.tokens.tolist()
    paths: list[list[int]] = [[]]
    return paths + [[tokens[step] for step in path_to(tree.parents, node)] for node in range(tree.num_draft_tokens)]


@dataclass(frozen=True, slots=True)
class Argmaxes:
    """Argmaxes and draft tokens of a whole pass, on the host."""

    trees: list[DraftTree]
    argmax: list[int]  # of every row of the pass
    tokens: list[int]  # of every node of the trees
    first_rows: list[int]  # of each sequence among those of the pass
    first_nodes: list[int]  # of each sequence among those of the trees

    @classmethod
    def of(cls, trees: list[DraftTree], output: ModelOutput) -> Argmaxes:
        """One argmax, one copy to the host: draft tokens and argmaxes travel together."""
        argmax = argmax_rows(output.logits) if output.best is None else output.best
        drafted = [tree.tokens.to(argmax.device, non_blocking=True) for tree in trees if len(tree)]
        numbers = (torch.cat([argmax, *drafted]) if drafted else argmax).tolist()
        first_nodes = list(accumulate(map(len, trees), initial=0))
        first_rows = list(accumulate(output.sizes, initial=0))
        return cls(trees, numbers[: argmax.shape[0]], numbers[argmax.shape[0] :], first_rows, first_nodes)

    def verify(self, index: int) -> VerifyResult:
        tree, row, first = self.trees[index], self.first_rows[index], self.first_nodes[index]
        tokens = self.tokens[first : first + tree.num_draft_tokens]
        argmax = self.argmax[row : row + tree.num_draft_tokens + 1]
        return verify_greedy(tokens, tree.parents[: tree.num_draft_tokens], argmax)


def logprobs_of(seq: Sequence, output: RowOutput, result: VerifyResult, top: int) -> list[TokenLogprob]:
    """Log-probabilities of the tokens of one step, each under the row that chose it, before temperature and top-p.

    Biases, penalties and grammars count; temperature does not, so that greedy decoding has probabilities too.
    """
    rows = [0] + [node + 1 for node in result.accepted]
    emitted = [*result.tokens, result.next_token]
    paths = [emitted[:depth] for depth in range(len(rows))]
    constraint = seq.params.constraint
    histories = [seq.history(path) for path in paths] if seq.sampling.penalised else None
    allowed = None if constraint is None else torch.stack([constraint.allowed(path) for path in paths])
    scores = torch.log_softmax(adjusted(output.logits[rows], seq.sampling, histories, allowed), dim=-1).cpu()
    logprobs: list[TokenLogprob] = []
    for row, token in zip(scores, emitted):
        pairs = _alternatives(row, seq.params.logprob_token_ids, top)
        logprobs.append(TokenLogprob(token, float(row[token]), pairs))
    return logprobs


def _alternatives(scores: Tensor, chosen: tuple[int, ...], top: int) -> tuple[tuple[int, float], ...]:
    """The chosen tokens with their log-probabilities, or the likeliest ones. scores: [vocab]"""
    if chosen:
        return tuple(zip(chosen, scores[list(chosen)].tolist()))
    best = scores.topk(top) if top else None
    return tuple(zip(best.indices.tolist(), best.values.tolist())) if best is not None else ()
