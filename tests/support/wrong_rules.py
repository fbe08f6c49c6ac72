"""What tutorials do instead. Kept only to show that the test of exactness notices."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from paceline.core.draft_tree import DraftTree, chain
from paceline.core.sampling import draw
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, StepResult, VerifyResult
from paceline.core.verify import draw_uniforms, residual
from paceline.drafting.draft_model import DraftModel


def _walk(tree: DraftTree, target: Tensor, rng: Generator, *, judged_by_q: bool, from_residual: bool) -> VerifyResult:
    """A chain's walk with one thing wrong: the test of a guess, or what is drawn after a refusal."""
    uniforms = draw_uniforms(tree, rng)
    assert tree.probs is not None or not len(tree)
    for node, token in enumerate(tree.tokens.tolist()):
        assert tree.probs is not None
        guess = float(tree.probs[node, token]) if judged_by_q else 1.0
        if float(uniforms[node]) * guess >= float(target[node, token]):
            left = residual(target[node], tree.probs[node], token) if from_residual else target[node]
            return VerifyResult(list(range(node)), int(draw(left, uniforms[-1])))
    return VerifyResult(list(range(len(tree))), int(draw(target[len(tree)], uniforms[-1])))


def target_prob_above_rand(tree: DraftTree, target: Tensor, rng: Generator) -> VerifyResult:
    """`if target_prob > rand: accept`, q forgotten, and a new draw from p after a refusal."""
    return _walk(tree, target, rng, judged_by_q=False, from_residual=False)


def draft_prob_is_one(tree: DraftTree, target: Tensor, rng: Generator) -> VerifyResult:
    """`p_draft = 1.0` for guesses that were drawn; the residual is right, the test is not."""
    return _walk(tree, target, rng, judged_by_q=False, from_residual=True)


def resample_from_target(tree: DraftTree, target: Tensor, rng: Generator) -> VerifyResult:
    """The right test, and after a refusal a draw from p instead of the residual."""
    return _walk(tree, target, rng, judged_by_q=True, from_residual=False)


class OneDistributionForAll(DraftModel):
    """Draws k guesses from the first step's distribution, and claims each step's own for them."""

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [self._again(seq, tree) for seq, tree in zip(seqs, super().propose(seqs, num_draft_tokens))]

    def _again(self, seq: Sequence, tree: DraftTree) -> DraftTree:
        if tree.probs is None:
            return tree
        uniforms = torch.rand(len(tree), generator=seq.rng, dtype=torch.float64)
        return chain(draw(tree.probs[:1].expand(len(tree), -1), uniforms), tree.probs)


class PeeksAtItsGuess(DraftModel):
    """Keeps a guess only if it likes it: whether token j is verified depends on token j. Anticipating, so not exact."""

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [self._liked(tree) for tree in super().propose(seqs, num_draft_tokens)]

    def _liked(self, tree: DraftTree) -> DraftTree:
        tokens = tree.tokens.tolist()
        stop = next((node for node, token in enumerate(tokens) if token != 0), len(tokens))
        return chain(tree.tokens[:stop], None if tree.probs is None else tree.probs[:stop])

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        """Its cache holds guesses that were never shown: cut back to what the text has."""
        for seq in seqs:
            seq_cache = self._seq_caches.get(seq.seq_id)
            if seq_cache is not None:
                self.runner.truncate(seq_cache, min(self._before[seq.seq_id], len(seq.ids) - 1))

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        pass
