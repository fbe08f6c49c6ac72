"""What tutorials do instead. Kept as mutants that the exactness test must catch."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from paceline.core.draft_tree import DraftTree, chain
from paceline.core.protocols import Drafter
from paceline.core.sampling import draw
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, StepResult, VerifyResult
from paceline.core.verify import RULES, AcceptanceRule, Verify, residual, verify_tokens


def _walk(tree: DraftTree, target: Tensor, uniforms: Tensor, *, uses_q: bool, from_residual: bool) -> VerifyResult:
    """A chain's walk with one thing wrong: the test of a draft token, or what is drawn after a rejection."""
    assert tree.probs is not None or not len(tree)
    tokens = tree.tokens.tolist()
    for node, token in enumerate(tokens):
        assert tree.probs is not None
        q = float(tree.probs[node, token]) if uses_q else 1.0
        if float(uniforms[node]) * q >= float(target[node, token]):
            rest = residual(target[node], tree.probs[node], token) if from_residual else target[node]
            return VerifyResult(list(range(node)), int(draw(rest, uniforms[-1])), tokens[:node])
    return VerifyResult(list(range(len(tree))), int(draw(target[len(tree)], uniforms[-1])), tokens)


def target_prob_above_rand(tree: DraftTree, target: Tensor, uniforms: Tensor) -> VerifyResult:
    """`if target_prob > rand: accept`, q forgotten, and a new draw from p after a rejection."""
    return _walk(tree, target, uniforms, uses_q=False, from_residual=False)


def draft_prob_is_one(tree: DraftTree, target: Tensor, uniforms: Tensor) -> VerifyResult:
    """`p_draft = 1.0` for draft tokens that were drawn; the residual is right, the test is not."""
    return _walk(tree, target, uniforms, uses_q=False, from_residual=True)


def resample_from_target(tree: DraftTree, target: Tensor, uniforms: Tensor) -> VerifyResult:
    """The right test, and after a rejection a draw from p instead of the residual."""
    return _walk(tree, target, uniforms, uses_q=True, from_residual=False)


def changes_a_twentieth(tree: DraftTree, target: Tensor, uniforms: Tensor) -> VerifyResult:
    """The token rule, except that one token in twenty becomes another one."""
    result = verify_tokens(tree, target, uniforms)
    emitted = [*result.tokens, result.next_token]
    for number, token in enumerate(emitted):
        if float(uniforms[number]) * 1000 % 1 < 0.05:  # decimals that the token itself hardly depends on
            other = (token + 1) % target.shape[-1]
            return VerifyResult(result.accepted[:number], other, emitted[:number])
    return result


WRONG_RULES: tuple[Verify, ...] = (target_prob_above_rand, draft_prob_is_one, resample_from_target)


def wrong_rule(verify: Verify) -> AcceptanceRule:
    """The token rule with another verification, on every device."""
    return replace(RULES["token"], verify=verify, on_device=None)


class WrappedDrafter(Drafter):
    """Changes the draft trees of another drafter."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.needs, self.draft_runner = drafter.needs, drafter.draft_runner

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self.drafter.begin(seq, prompt)

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        trees = self.drafter.propose(seqs, num_draft_tokens)
        return [tree if tree.probs is None else self.change(seq, tree) for seq, tree in zip(seqs, trees)]

    def change(self, seq: Sequence, tree: DraftTree) -> DraftTree:
        raise NotImplementedError

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        self.drafter.observe(seqs, results)

    def end(self, seq: Sequence) -> None:
        self.drafter.end(seq)


class OneDistributionForAll(WrappedDrafter):
    """Draws k draft tokens from the first step's distribution, and claims each step's own for them."""

    def change(self, seq: Sequence, tree: DraftTree) -> DraftTree:
        assert tree.probs is not None
        tokens = draw(tree.probs[:1].expand(len(tree), -1), seq.rng.next(len(tree)))
        return chain(tokens, tree.probs)


class PeeksAtItsDraft(WrappedDrafter):
    """Keeps a draft token only if it likes it: whether token j is verified depends on token j, so it is not exact."""

    def change(self, seq: Sequence, tree: DraftTree) -> DraftTree:
        assert tree.probs is not None
        tokens = tree.tokens.tolist()
        stop = next((node for node, token in enumerate(tokens) if token != 0), len(tokens))
        return chain(tree.tokens[:stop], tree.probs[:stop])


class WrongQ(WrappedDrafter):
    """Claims that its draft tokens were drawn at another temperature than they were."""

    def change(self, seq: Sequence, tree: DraftTree) -> DraftTree:
        assert tree.probs is not None
        flat = tree.probs**0.5
        return replace(tree, probs=flat / flat.sum(-1, keepdim=True))


WRONG_DRAFTERS: tuple[type[WrappedDrafter], ...] = (OneDistributionForAll, PeeksAtItsDraft, WrongQ)
