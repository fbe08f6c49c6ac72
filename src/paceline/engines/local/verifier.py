"""BatchVerifyResult for a batch: logits of one pass in, one verify result a sequence out.

Sequences that are plainly greedy are judged together: one argmax over the whole pass, one wait for the device. The others
go through `distribution`, those with the same settings together, and through the acceptance rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.draft_tree import DraftTree, path_to
from paceline.core.sampling import adjusted, distribution, draw
from paceline.core.sequence import Sequence, alike
from paceline.core.types import ModelOutput, RowOutput, TokenLogprob, VerifyResult
from paceline.core.verify import COUPLED, RULES, verify_coupled, verify_greedy
from paceline.engines.local.verifier_graphs import DEVICE_RULES, GraphVerifier, can_judge, chances_of
from paceline.errors import OptionError


class Verifier:
    """Applies one acceptance rule, except to sequences that carry their own."""

    def __init__(self, rule: str = "token") -> None:
        if rule != COUPLED and rule not in RULES:
            raise OptionError(f"acceptance must be one of {', '.join((*RULES, COUPLED))}, not {rule!r}")
        self.rule = rule
        self._device = GraphVerifier()

    def verified_rows(self, seqs: list[Sequence], trees: list[DraftTree], outputs: ModelOutput) -> list[VerifyResult]:
        """One verify result a sequence, in order."""
        rules = {self._rule(seq) for seq in seqs}
        if len(rules) == 1 and rules <= DEVICE_RULES and can_judge(seqs, trees, outputs):
            return self._device.verified_rows(rules.pop(), seqs, trees, outputs)
        verified_rows: dict[int, VerifyResult] = {}
        plain = [index for index, seq in enumerate(seqs) if self._plain(seq)]
        if plain:
            best = _best_of_all(trees, outputs)
            verified_rows |= {index: best.verified(index) for index in plain}
        others = [index for index in range(len(seqs)) if index not in verified_rows]
        for places in alike([seqs[index] for index in others]):
            group = [others[place] for place in places]
            rows = [outputs[index].logits for index in group]
            found = self._drawn([seqs[index] for index in group], [trees[index] for index in group], rows)
            verified_rows |= dict(zip(group, found))
        return [verified_rows[index] for index in range(len(seqs))]

    def _plain(self, seq: Sequence) -> bool:
        """Whether argmax equality decides. The lossy rule is not that, not even for a greedy sequence: let it show."""
        return seq.sampling.plain_greedy and seq.constraint is None and self._rule(seq) != "lossy-typical"

    def _rule(self, seq: Sequence) -> str:
        return seq.acceptance or self.rule

    def _drawn(self, seqs: list[Sequence], trees: list[DraftTree], logits: list[Tensor]) -> list[VerifyResult]:
        """BatchVerifyResult of sequences that are alike. Where nothing was guessed every rule is one draw, made for all at once."""
        target = target_rows(seqs, trees, logits)
        if any(tree.num_draft_tokens for tree in trees):
            targets = torch.split(target.cpu(), [tree.num_draft_tokens + 1 for tree in trees])
            return [self._walked(*one) for one in zip(seqs, trees, targets)]
        uniforms = [chances_of(seq, tree, self._rule(seq)) for seq, tree in zip(seqs, trees)]
        return [VerifyResult([], token) for token in draw(target, torch.cat(uniforms)).tolist()]

    def _walked(self, seq: Sequence, tree: DraftTree, target: Tensor) -> VerifyResult:
        rule = self._rule(seq)
        if rule == COUPLED:
            return verify_coupled(tree, target, chances_of(seq, tree, rule))
        return RULES[rule](tree, target, seq.rng)


def target_rows(seqs: list[Sequence], trees: list[DraftTree], logits: list[Tensor]) -> Tensor:
    """Of sequences that are alike: the distribution after each sequence and after each of its draft tokens, along its own path.

    [draft tokens + 1 of all sequences, vocab], where the logits are.
    """
    rows = [mine[: tree.num_draft_tokens + 1] for mine, tree in zip(logits, trees)]
    if len(seqs) > 1:  # alike, so no path matters
        return distribution(torch.cat(rows), seqs[0].sampling)
    seq = seqs[0]
    paths = _token_paths(trees[0]) if seq.sampling.penalised or seq.constraint is not None else []
    histories = [seq.history(path) for path in paths] if seq.sampling.penalised else None
    allowed = None
    if seq.constraint is not None:
        allowed = torch.stack([seq.constraint.allowed(path) for path in paths])
    return distribution(rows[0], seq.sampling, histories, allowed)


def _token_paths(tree: DraftTree) -> list[list[int]]:
    """The guessed tokens before each row: none for the sequence itself, then up to and including each node."""
    tokens = tree.tokens.tolist()
    return [[]] + [[tokens[step] for step in path_to(tree.parents, node)] for node in range(tree.num_draft_tokens)]


class _Best:
    """Argmaxes and draft tokens of a whole pass, on the host."""

    def __init__(self, trees: list[DraftTree], best: list[int], tokens: list[int], sizes: list[int]) -> None:
        self._trees, self._best, self._tokens, self._sizes = trees, best, tokens, sizes

    def verified(self, index: int) -> VerifyResult:
        tree = self._trees[index]
        row = sum(self._sizes[:index])
        first = sum(len(other) for other in self._trees[:index])
        draft_tokens = self._tokens[first : first + tree.num_draft_tokens]
        return verify_greedy(draft_tokens, tree.parents[: tree.num_draft_tokens], self._best[row : row + tree.num_draft_tokens + 1])


def _best_of_all(trees: list[DraftTree], outputs: ModelOutput) -> _Best:
    """One argmax, one copy to the host: draft tokens and answers travel together."""
    best = outputs.logits.argmax(dim=-1) if outputs.best is None else outputs.best
    draft_tokens = torch.cat([tree.tokens.to(best.device, non_blocking=True) for tree in trees])
    numbers = torch.cat([best, draft_tokens]).tolist()
    return _Best(trees, numbers[: best.shape[0]], numbers[best.shape[0] :], outputs.sizes)


def logprobs_of(seq: Sequence, tree: DraftTree, output: RowOutput, verified: VerifyResult, wanted: int) -> list[TokenLogprob]:
    """Log-probabilities of the tokens of one step, each under the row that chose it: before temperature and cuts.

    Biases, penalties and grammars count; temperature does not, so that greedy decoding has probabilities too.
    """
    rows = [0] + [node + 1 for node in verified.accepted]
    emitted = [int(tree.tokens[node]) for node in verified.accepted] + [verified.next_token]
    paths = [emitted[:depth] for depth in range(len(rows))]
    histories = [seq.history(path) for path in paths] if seq.sampling.penalised else None
    allowed = None if seq.constraint is None else torch.stack([seq.constraint.allowed(path) for path in paths])
    scores = torch.log_softmax(adjusted(output.logits[rows], seq.sampling, histories, allowed), dim=-1).cpu()
    found: list[TokenLogprob] = []
    for row, token in zip(scores, emitted):
        best = row.topk(wanted) if wanted else None
        top = tuple(zip(best.indices.tolist(), best.values.tolist())) if best is not None else ()
        found.append(TokenLogprob(token, float(row[token]), top))
    return found
