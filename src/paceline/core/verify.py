"""Which draft tokens are accepted, and the target's own token after them.

`verify_tokens` is the reference of everything else. At each node, for each child in order: accept it if u·q(x) < p(x),
else p <- norm(max(p - q, 0)); after the last child, draw from the rest. Chains, trees, greedy and sampled are the
same walk, and the result is distributed exactly as if the target had drawn every token itself.

The rules, by name (`--acceptance`):
  token          verify_tokens, above
  block          verifies a chain as a whole; accepts at least as much as `token`, equally exact
  coupled        the target draws with noise keyed by seed, position and token; a draft token is accepted if it is
                 drawn. The output is then a function of the seed alone: the same with any drafter, any k, any batch,
                 or none, but for draws closer than the rounding of a pass
  lossy-typical  Medusa's typical acceptance. LOSSY: the output is not the target's distribution

A draft token outside the vocabulary is no draft token: it is never accepted and nothing is drawn against it.

Randomness is a row of uniform numbers a tree, one a draft token and one for the last draw, drawn from the sequence's
own source before anything is computed. The vectorised twins take the same numbers, so tests compare them for equality.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.draft_tree import ROOT, DraftTree, chain, depths
from paceline.core.sampling import draw, draw_keyed
from paceline.core.types import VerifyResult

# (tree, target [draft tokens + 1, vocab], uniforms [draft tokens + 1]) -> result.
# target row 0 is the distribution after the sequence, row i + 1 the one after node i.
Verify = Callable[[DraftTree, Tensor, Tensor], VerifyResult]


def verify_tokens(tree: DraftTree, target: Tensor, uniforms: Tensor) -> VerifyResult:
    """The token rule. The reference of all vectorised twins."""
    tokens, numbers = tree.tokens.tolist(), uniforms.tolist()
    accepted: list[int] = []
    remaining, node = target[0], ROOT
    for child in range(tree.num_draft_tokens):
        token = tokens[child]
        if tree.parents[child] != node or not 0 <= token < target.shape[-1]:
            continue
        q = 1.0 if tree.probs is None else float(tree.probs[child, token])
        if numbers[child] * q < float(remaining[token]):
            accepted.append(child)
            remaining, node = target[child + 1], child
        else:
            remaining = residual(remaining, None if tree.probs is None else tree.probs[child], token)
    return _result(accepted, tokens, int(draw(remaining, uniforms[-1])))


def _result(accepted: list[int], tokens: Sequence[int], next_token: int) -> VerifyResult:
    return VerifyResult(accepted, next_token, [tokens[node] for node in accepted])


def residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """The distribution after a draft token drawn from q is rejected: norm(max(p - q, 0)).

    q None is a token that was chosen: one-hot at `token`. Where p and q are equal in floats nothing remains, and p
    itself is the limit.
    """
    if q is None:
        rest = p.clone()
        rest[token] = 0.0
    else:
        rest = (p - q.to(p.device)).clamp_min(0.0)
    total = rest.sum()
    return rest / total if float(total) > 0 else p


def verify_greedy(tokens: Sequence[int], parents: Sequence[int], argmax: Sequence[int]) -> VerifyResult:
    """`verify_tokens` for one-hot rows given as argmaxes: argmax[0] after the sequence, argmax[i + 1] after node i."""
    accepted: list[int] = []
    node, expected = ROOT, argmax[0]
    for child, (token, parent) in enumerate(zip(tokens, parents)):
        if parent == node and token == expected:
            accepted.append(child)
            node, expected = child, argmax[child + 1]
    return _result(accepted, tokens, expected)


# --- block verification -----------------------------------------------------------------------------------------------


def verify_block(tree: DraftTree, target: Tensor, uniforms: Tensor) -> VerifyResult:
    """Accept the LARGEST i whose u_i <= h_i; see docs/how-it-works.md for the derivation.

    A tree that branches has no block rule and takes the token rule; both are exact.
    """
    if not tree.is_chain:
        return verify_tokens(tree, target, uniforms)
    tree = _within_vocabulary(tree, target.shape[-1])
    count, tokens = tree.num_draft_tokens, tree.tokens.tolist()
    ratio, best, rest = 1.0, 0, _block_residual(tree, target, 0, 1.0)
    for i in range(count):
        q = 1.0 if tree.probs is None else float(tree.probs[i, tokens[i]])
        ratio = min(1.0, ratio * float(target[i, tokens[i]]) / q)
        following = target[count] if i + 1 == count else _block_residual(tree, target, i + 1, ratio)
        # Strict, so that a threshold of 0 never accepts: uniform numbers can be exactly 0.
        if float(uniforms[i]) < _block_threshold(ratio, following, last=i + 1 == count):
            best, rest = i + 1, following
    source = rest if float(rest.sum()) > 0 else target[best]
    return _result(list(range(best)), tokens, int(draw(source, uniforms[-1])))


def _within_vocabulary(tree: DraftTree, vocab_size: int) -> DraftTree:
    """A chain up to its first token outside the vocabulary."""
    tokens = tree.tokens[: tree.num_draft_tokens].tolist()
    count = next((node for node, token in enumerate(tokens) if not 0 <= token < vocab_size), None)
    return tree if count is None else chain(tokens[:count], None if tree.probs is None else tree.probs[:count])


def _block_threshold(ratio: float, following: Tensor, *, last: bool) -> float:
    """h_i = Z_i / (Z_i + 1 - r_i), and h_k = r_k."""
    if last:
        return ratio
    mass = float(following.sum())
    return mass / (mass + 1.0 - ratio) if mass + 1.0 - ratio > 0 else 1.0


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
    """The target draws at every depth from its own number; a draft token is accepted if it is the token drawn.

    uniforms[d] is the number for depth d. The drafter's q plays no part, so the output does not depend on the drafts.
    Every draw is keyed, so a draft token drawn from a near q with the same number is nearly always accepted.
    """
    parents = tree.parents[: tree.num_draft_tokens]
    levels = [0] + [depth + 1 for depth in depths(parents)]
    drawn = draw_keyed(target[: len(levels)], uniforms[levels]).tolist()
    return verify_greedy(tree.tokens.tolist(), parents, drawn)


# --- lossy ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LossyTypical:
    """Medusa's typical acceptance: a draft token is accepted where p(x) > min(threshold, alpha·exp(-entropy)).

    LOSSY. It accepts likely tokens without a draw, so the output is more conventional than the target's own.
    """

    threshold: float = 0.09
    alpha: float = 0.3

    def __call__(self, tree: DraftTree, target: Tensor, uniforms: Tensor) -> VerifyResult:
        tokens, lengths, best = tree.tokens.tolist(), {ROOT: 0}, ROOT
        for child in range(tree.num_draft_tokens):
            parent = tree.parents[child]
            if parent not in lengths or not 0 <= tokens[child] < target.shape[-1]:
                continue
            if float(target[parent + 1, tokens[child]]) > self._edge(target[parent + 1]):
                lengths[child] = lengths[parent] + 1
                best = child if lengths[child] > lengths[best] else best
        path: list[int] = []
        node = best
        while node != ROOT:
            path.append(node)
            node = tree.parents[node]
        return _result(path[::-1], tokens, int(draw(target[best + 1], uniforms[-1])))

    def _edge(self, p: Tensor) -> float:
        entropy = float(torch.special.entr(p).sum())
        return min(self.threshold, self.alpha * float(torch.tensor(-entropy).exp()))


# --- the rules by name ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class BatchVerifyResult:
    """Results of a batch, still on the device. nodes[b, :counts[b]] are accepted, tokens[b] is the next token."""

    nodes: Tensor  # int64 [batch, draft tokens]
    counts: Tensor  # int64 [batch]
    tokens: Tensor  # int64 [batch]


# (draft_tokens [batch, k], q [batch, k, vocab] or None, target [batch, k + 1, vocab], uniforms [batch, k + 1])
VerifyChains = Callable[[Tensor, Tensor | None, Tensor, Tensor], BatchVerifyResult]


@dataclass(frozen=True, slots=True)
class AcceptanceRule:
    """One way to verify.

    lossless    the output is distributed as the target's own
    seeded      the numbers are keyed by seed and position instead of drawn in order, and every draw is keyed by token,
                for drafter and target alike
    on_device   the vectorised twin for chains of one length, where there is one
    """

    name: str
    verify: Verify
    lossless: bool = True
    seeded: bool = False
    on_device: VerifyChains | None = None

    @property
    def draw(self) -> Callable[[Tensor, Tensor], Tensor]:
        """How a token is drawn under this rule, by the target and by a drafter."""
        return draw_keyed if self.seeded else draw


# --- vectorised twins -------------------------------------------------------------------------------------------------


def verify_chains(draft_tokens: Tensor, q: Tensor | None, target: Tensor, uniforms: Tensor) -> BatchVerifyResult:
    """`verify_tokens` for a batch of chains of one length, without leaving the device."""
    batch, k = draft_tokens.shape
    rows = torch.arange(batch, device=target.device)
    p_draft = target[:, :k].gather(-1, draft_tokens.unsqueeze(-1)).squeeze(-1).double()
    q_draft = torch.ones_like(p_draft) if q is None else q.gather(-1, draft_tokens.unsqueeze(-1)).squeeze(-1).double()
    accepts = uniforms[:, :k] * q_draft < p_draft
    counts = accepts.long().cumprod(dim=-1).sum(dim=-1)
    p = target[rows, counts]
    stop = counts.clamp_max(max(k - 1, 0))
    if k == 0:
        return BatchVerifyResult(draft_tokens, counts, draw(p, uniforms[:, -1]))
    if q is None:
        rest = p.scatter(-1, draft_tokens[rows, stop].unsqueeze(-1), 0.0)
    else:
        rest = (p - q[rows, stop]).clamp_min(0.0)
    use_p = (counts == k) | (rest.sum(-1) <= 0)
    nodes = torch.arange(k, device=target.device).expand(batch, k)
    return BatchVerifyResult(nodes, counts, draw(torch.where(use_p[:, None], p, rest), uniforms[:, -1]))


def verify_chains_coupled(
    draft_tokens: Tensor, q: Tensor | None, target: Tensor, uniforms: Tensor
) -> BatchVerifyResult:
    """`verify_coupled` for a batch of chains of one length, without leaving the device. q plays no part."""
    batch, k = draft_tokens.shape
    drawn = draw_keyed(target, uniforms)
    counts = (drawn[:, :k] == draft_tokens).long().cumprod(dim=-1).sum(dim=-1)
    nodes = torch.arange(k, device=target.device).expand(batch, k)
    return BatchVerifyResult(nodes, counts, drawn.gather(-1, counts[:, None])[:, 0])


def verify_trees(
    draft_tokens: Tensor, parents: Tensor, q: Tensor | None, target: Tensor, uniforms: Tensor
) -> BatchVerifyResult:
    """`verify_tokens` for a batch of trees of one size. Surplus nodes carry a parent of -2 and are never reached.

    draft_tokens, parents int64 [batch, nodes]; q [batch, nodes, vocab] or None; target [batch, nodes + 1, vocab]
    """
    batch, count = draft_tokens.shape
    node = torch.full((batch,), ROOT, dtype=torch.int64, device=target.device)
    depth = torch.zeros_like(node)
    nodes = torch.zeros(batch, max(count, 1), dtype=torch.int64, device=target.device)
    remaining = target[:, 0].clone()
    for child in range(count):
        reached = parents[:, child] == node
        token = draft_tokens[:, child : child + 1]
        q_draft = torch.ones_like(uniforms[:, 0]) if q is None else q[:, child].gather(-1, token).squeeze(-1).double()
        accepts = uniforms[:, child] * q_draft < remaining.gather(-1, token).squeeze(-1).double()
        taken, refused = reached & accepts, reached & ~accepts
        rest = remaining.scatter(-1, token, 0.0) if q is None else (remaining - q[:, child]).clamp_min(0.0)
        total = rest.sum(-1, keepdim=True)
        rest = torch.where(total > 0, rest / total.clamp_min(1e-38), remaining)
        remaining = torch.where(refused[:, None], rest, remaining)
        remaining = torch.where(taken[:, None], target[:, child + 1], remaining)
        nodes.scatter_(-1, depth[:, None], torch.where(taken, child, nodes.gather(-1, depth[:, None])[:, 0])[:, None])
        depth = depth + taken.long()
        node = torch.where(taken, child, node)
    return BatchVerifyResult(nodes[:, :count], depth, draw(remaining, uniforms[:, -1]))


RULES: dict[str, AcceptanceRule] = {
    rule.name: rule
    for rule in (
        AcceptanceRule("token", verify_tokens, on_device=verify_chains),
        AcceptanceRule("block", verify_block),
        AcceptanceRule("coupled", verify_coupled, seeded=True, on_device=verify_chains_coupled),
        AcceptanceRule("lossy-typical", LossyTypical(), lossless=False),
    )
}
