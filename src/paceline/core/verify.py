"""Which draft tokens stand, and the target's own token after them.

`accept` is the rule everything else is held against. At each node, for each child in order: keep it if
u·q(x) < p(x), else p <- norm(max(p - q, 0)); when no child is left, draw from what remains. Chains, trees, greedy and
sampled are the same walk, and the result is distributed exactly as if the target had drawn every token itself.

Other rules, by name (`--acceptance`):
  token          accept, above
  block          judges a chain as a whole; accepts at least as much as `token`, equally exact
  coupled        the target draws from its own numbers, keyed by seed and position; a draft token stands if it is that token.
                 The sequence is then a function of the seed alone: the same with any drafter, any k, any batch, or none
  lossy-typical  Medusa's typical acceptance. LOSSY: the output is not the target's distribution

Randomness is a row of uniform numbers a tree, one a node and one for the last draw, taken from the sequence's own
generator before anything is looked at. The vectorised twins take the same numbers, so a test can hold them to equality.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from paceline.core.draft_tree import ROOT, DraftTree
from paceline.core.sampling import draw
from paceline.core.types import VerifyResult

Rule = Callable[[DraftTree, Tensor, Generator], VerifyResult]


def accept(tree: DraftTree, target: Tensor, rng: Generator) -> VerifyResult:
    """The token rule. target [nodes + 1, vocab]: row 0 after the sequence, row i + 1 after node i."""
    return verify_tokens(tree, target, draw_uniforms(tree, rng))


def draw_uniforms(tree: DraftTree, rng: Generator) -> Tensor:
    """One number a node that can be accepted, and one for the target's own token."""
    return torch.rand(tree.num_draft_tokens + 1, generator=rng, dtype=torch.float64, device=rng.device).cpu()


def verify_tokens(tree: DraftTree, target: Tensor, uniforms: Tensor) -> VerifyResult:
    """The walk, with its random numbers given. This is the reference of all vectorised twins."""
    tokens, numbers = tree.tokens.tolist(), uniforms.tolist()
    path: list[int] = []
    remaining, node = target[0], ROOT
    for child in range(tree.num_draft_tokens):
        if tree.parents[child] != node:
            continue
        token = tokens[child]
        guess = 1.0 if tree.probs is None else float(tree.probs[child, token])
        if numbers[child] * guess < float(remaining[token]):
            path.append(child)
            remaining, node = target[child + 1], child
        else:
            remaining = residual(remaining, None if tree.probs is None else tree.probs[child], token)
    return VerifyResult(path, int(draw(remaining, uniforms[-1])))


def residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """What is left of p once a draft token drawn from q has been turned down: norm(max(p - q, 0)).

    q None is a draft token that was chosen: one-hot at `token`. Where p and q are equal in floats nothing is left, and p
    itself is the limit.
    """
    if q is None:
        left = p.clone()
        left[token] = 0.0
    else:
        left = (p - q.to(p.device)).clamp_min(0.0)
    total = left.sum()
    return left / total if float(total) > 0 else p


def verify_greedy(tokens: Sequence[int], parents: Sequence[int], best: Sequence[int]) -> VerifyResult:
    """`accept` for one-hot rows given as argmaxes, on the host: best[0] after the sequence, best[i + 1] after node i."""
    path: list[int] = []
    node, wanted = ROOT, best[0]
    for child, (token, parent) in enumerate(zip(tokens, parents)):
        if parent == node and token == wanted:
            path.append(child)
            node, wanted = child, best[child + 1]
    return VerifyResult(path, wanted)


# --- block verification -----------------------------------------------------------------------------------------------


def verify_block_rule(tree: DraftTree, target: Tensor, rng: Generator) -> VerifyResult:
    """Verifier a chain as a whole. A tree that branches has no block rule and takes the token rule; both are exact."""
    uniforms = draw_uniforms(tree, rng)
    return verify_block(tree, target, uniforms) if tree.is_chain else verify_tokens(tree, target, uniforms)


def verify_block(tree: DraftTree, target: Tensor, uniforms: Tensor) -> VerifyResult:
    """Accept the LARGEST i whose u_i <= h_i; see docs/how-it-works.md for the derivation."""
    draft_tokens, tokens = tree.num_draft_tokens, tree.tokens.tolist()
    ratio, best, left = 1.0, 0, _block_residual(tree, target, 0, 1.0)
    for i in range(draft_tokens):
        token = tokens[i]
        guess = 1.0 if tree.probs is None else float(tree.probs[i, token])
        ratio = min(1.0, ratio * float(target[i, token]) / guess)
        if i + 1 == draft_tokens:
            threshold, rest = ratio, target[draft_tokens]
        else:
            rest = _block_residual(tree, target, i + 1, ratio)
            mass = float(rest.sum())
            threshold = mass / (mass + 1.0 - ratio) if mass + 1.0 - ratio > 0 else 1.0
        # Strict, so that a threshold of 0 never accepts: uniform numbers can be exactly 0.
        if float(uniforms[i]) < threshold:
            best, left = i + 1, rest
    source = left if float(left.sum()) > 0 else target[best]
    return VerifyResult(list(range(best)), int(draw(source, uniforms[-1])))


def _block_residual(tree: DraftTree, target: Tensor, i: int, ratio: float) -> Tensor:
    """max(r_i·p_{i+1} - q_{i+1}, 0), not normalised."""
    scaled = ratio * target[i]
    if i >= tree.num_draft_tokens:
        return scaled
    if tree.probs is not None:
        return (scaled - tree.probs[i].to(target.device)).clamp_min(0.0)
    scaled[int(tree.tokens[i])] = 0.0
    return scaled


# --- coupled ----------------------------------------------------------------------------------------------------------


def verify_coupled(tree: DraftTree, target: Tensor, uniforms: Tensor) -> VerifyResult:
    """The target draws at every depth from its own number; a draft token stands if it is the token drawn.

    chance[d] is the number for depth d. The drafter's q plays no part, so nothing of the drafting shows in the sequence.
    """
    path: list[int] = []
    tokens, node = tree.tokens.tolist(), ROOT
    while True:
        token = int(draw(target[node + 1], uniforms[len(path)]))
        match = [c for c in range(tree.num_draft_tokens) if tree.parents[c] == node and tokens[c] == token]
        if not match:
            return VerifyResult(path, token)
        node = match[0]
        path.append(node)


# --- lossy ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LossyTypical:
    """Medusa's typical acceptance: a draft token stands where p(x) > min(threshold, alpha·exp(-entropy)).

    LOSSY. It accepts likely tokens without a draw, so the sequence is more conventional than the target's own.
    """

    threshold: float = 0.09
    alpha: float = 0.3

    def __call__(self, tree: DraftTree, target: Tensor, rng: Generator) -> VerifyResult:
        uniforms = draw_uniforms(tree, rng)
        tokens, lengths, best = tree.tokens.tolist(), {ROOT: 0}, ROOT
        for child in range(tree.num_draft_tokens):
            parent = tree.parents[child]
            if parent in lengths and float(target[parent + 1, tokens[child]]) > self._edge(target[parent + 1]):
                lengths[child] = lengths[parent] + 1
                best = child if lengths[child] > lengths[best] else best
        path: list[int] = []
        node = best
        while node != ROOT:
            path.append(node)
            node = tree.parents[node]
        return VerifyResult(path[::-1], int(draw(target[best + 1], uniforms[-1])))

    def _edge(self, p: Tensor) -> float:
        entropy = float(torch.special.entr(p).sum())
        return min(self.threshold, self.alpha * float(torch.tensor(-entropy).exp()))


LOSSLESS_RULES: dict[str, Rule] = {"token": accept, "block": verify_block_rule}
RULES: dict[str, Rule] = {**LOSSLESS_RULES, "lossy-typical": LossyTypical()}
COUPLED = "coupled"  # needs seed and position instead of a generator; decode/judge.py calls verify_coupled itself
RULE_NAMES = (*RULES, COUPLED)


# --- vectorised twins -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class BatchVerifyResult:
    """BatchVerifyResult of a batch, still on the device. nodes[b, :counts[b]] is the path, tokens[b] the own token."""

    nodes: Tensor  # int64 [batch, draft tokens]
    counts: Tensor  # int64 [batch]
    tokens: Tensor  # int64 [batch]


def verify_chains(draft_tokens: Tensor, q: Tensor | None, target: Tensor, uniforms: Tensor) -> BatchVerifyResult:
    """`verify_tokens` for a batch of chains of one length, without leaving the device.

    draft tokens int64 [batch, k]; q [batch, k, vocab] or None; target [batch, k + 1, vocab]; chance [batch, k + 1]
    """
    batch, k = draft_tokens.shape
    rows = torch.arange(batch, device=target.device)
    p_guess = target[:, :k].gather(-1, draft_tokens.unsqueeze(-1)).squeeze(-1).double()
    q_guess = torch.ones_like(p_guess) if q is None else q.gather(-1, draft_tokens.unsqueeze(-1)).squeeze(-1).double()
    stands = uniforms[:, :k] * q_guess < p_guess
    counts = stands.long().cumprod(dim=-1).sum(dim=-1)
    p = target[rows, counts]
    stop = counts.clamp_max(max(k - 1, 0))
    if k == 0:
        return BatchVerifyResult(draft_tokens, counts, draw(p, uniforms[:, -1]))
    if q is None:
        left = p.scatter(-1, draft_tokens[rows, stop].unsqueeze(-1), 0.0)
    else:
        left = (p - q[rows, stop]).clamp_min(0.0)
    use_p = (counts == k) | (left.sum(-1) <= 0)
    nodes = torch.arange(k, device=target.device).expand(batch, k)
    return BatchVerifyResult(nodes, counts, draw(torch.where(use_p[:, None], p, left), uniforms[:, -1]))


def verify_chains_coupled(draft_tokens: Tensor, target: Tensor, uniforms: Tensor) -> BatchVerifyResult:
    """`verify_coupled` for a batch of chains of one length, without leaving the device.

    draft tokens int64 [batch, k]; target [batch, k + 1, vocab]; chance [batch, k + 1], one number a depth
    """
    batch, k = draft_tokens.shape
    drawn = draw(target, uniforms)
    counts = (drawn[:, :k] == draft_tokens).long().cumprod(dim=-1).sum(dim=-1)
    nodes = torch.arange(k, device=target.device).expand(batch, k)
    return BatchVerifyResult(nodes, counts, drawn.gather(-1, counts[:, None])[:, 0])


def verify_trees(draft_tokens: Tensor, parents: Tensor, q: Tensor | None, target: Tensor, uniforms: Tensor) -> BatchVerifyResult:
    """`verify_tokens` for a batch of trees of one size. Surplus nodes carry a parent of -2 and are never reached.

    draft tokens, parents int64 [batch, nodes]; q [batch, nodes, vocab] or None; target [batch, nodes + 1, vocab]
    """
    batch, count = draft_tokens.shape
    node = torch.full((batch,), ROOT, dtype=torch.int64, device=target.device)
    depth = torch.zeros_like(node)
    nodes = torch.zeros(batch, max(count, 1), dtype=torch.int64, device=target.device)
    remaining = target[:, 0].clone()
    for child in range(count):
        reached = parents[:, child] == node
        token = draft_tokens[:, child : child + 1]
        q_guess = torch.ones_like(uniforms[:, 0]) if q is None else q[:, child].gather(-1, token).squeeze(-1).double()
        stands = uniforms[:, child] * q_guess < remaining.gather(-1, token).squeeze(-1).double()
        taken, refused = reached & stands, reached & ~stands
        left = remaining.scatter(-1, token, 0.0) if q is None else (remaining - q[:, child]).clamp_min(0.0)
        total = left.sum(-1, keepdim=True)
        left = torch.where(total > 0, left / total.clamp_min(1e-38), remaining)
        remaining = torch.where(refused[:, None], left, remaining)
        remaining = torch.where(taken[:, None], target[:, child + 1], remaining)
        nodes.scatter_(-1, depth[:, None], torch.where(taken, child, nodes.gather(-1, depth[:, None])[:, 0])[:, None])
        depth = depth + taken.long()
        node = torch.where(taken, child, node)
    return BatchVerifyResult(nodes[:, :count], depth, draw(remaining, uniforms[:, -1]))
