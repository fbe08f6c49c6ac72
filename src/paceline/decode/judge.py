"""Verdicts for a batch: logits of one pass in, one verdict a text out.

Texts that are plainly greedy are judged together: one argmax over the whole pass, one wait for the device. The others
go through `distribution`, those with the same settings together, and through the acceptance rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.acceptance import COUPLED, RULES, walk_coupled, walk_greedy
from paceline.core.distribution import adjusted, distribution, draw
from paceline.core.protocols import Output, Outputs, TokenLogprob, Verdict
from paceline.core.sequence import Sequence, alike
from paceline.core.tree import DraftTree, path_to
from paceline.decode.device_judge import DEVICE_RULES, DeviceJudge, can_judge, chances_of
from paceline.errors import OptionError


class Judge:
    """Applies one acceptance rule, except to texts that carry their own."""

    def __init__(self, rule: str = "token") -> None:
        if rule != COUPLED and rule not in RULES:
            raise OptionError(f"acceptance must be one of {', '.join((*RULES, COUPLED))}, not {rule!r}")
        self.rule = rule
        self._device = DeviceJudge()

    def verdicts(self, texts: list[Sequence], trees: list[DraftTree], outputs: Outputs) -> list[Verdict]:
        """One verdict a text, in order."""
        rules = {self._rule(text) for text in texts}
        if len(rules) == 1 and rules <= DEVICE_RULES and can_judge(texts, trees, outputs):
            return self._device.verdicts(rules.pop(), texts, trees, outputs)
        verdicts: dict[int, Verdict] = {}
        plain = [index for index, text in enumerate(texts) if self._plain(text)]
        if plain:
            best = _best_of_all(trees, outputs)
            verdicts |= {index: best.verdict(index) for index in plain}
        others = [index for index in range(len(texts)) if index not in verdicts]
        for places in alike([texts[index] for index in others]):
            group = [others[place] for place in places]
            rows = [outputs[index].logits for index in group]
            found = self._drawn([texts[index] for index in group], [trees[index] for index in group], rows)
            verdicts |= dict(zip(group, found))
        return [verdicts[index] for index in range(len(texts))]

    def _plain(self, text: Sequence) -> bool:
        """Whether argmax equality decides. The lossy rule is not that, not even for a greedy text: let it show."""
        return text.sampling.plain_greedy and text.constraint is None and self._rule(text) != "lossy-typical"

    def _rule(self, text: Sequence) -> str:
        return text.acceptance or self.rule

    def _drawn(self, texts: list[Sequence], trees: list[DraftTree], logits: list[Tensor]) -> list[Verdict]:
        """Verdicts of texts that are alike. Where nothing was guessed every rule is one draw, made for all at once."""
        target = target_rows(texts, trees, logits)
        if any(tree.guesses for tree in trees):
            targets = torch.split(target.cpu(), [tree.guesses + 1 for tree in trees])
            return [self._walked(*one) for one in zip(texts, trees, targets)]
        chances = [chances_of(text, tree, self._rule(text)) for text, tree in zip(texts, trees)]
        return [Verdict([], token) for token in draw(target, torch.cat(chances)).tolist()]

    def _walked(self, text: Sequence, tree: DraftTree, target: Tensor) -> Verdict:
        rule = self._rule(text)
        if rule == COUPLED:
            return walk_coupled(tree, target, chances_of(text, tree, rule))
        return RULES[rule](tree, target, text.rng)


def target_rows(texts: list[Sequence], trees: list[DraftTree], logits: list[Tensor]) -> Tensor:
    """Of texts that are alike: the distribution after each text and after each of its guesses, along its own path.

    [guesses + 1 of all texts, vocab], where the logits are.
    """
    rows = [mine[: tree.guesses + 1] for mine, tree in zip(logits, trees)]
    if len(texts) > 1:  # alike, so no path matters
        return distribution(torch.cat(rows), texts[0].sampling)
    text = texts[0]
    paths = _token_paths(trees[0]) if text.sampling.penalised or text.constraint is not None else []
    histories = [text.history(path) for path in paths] if text.sampling.penalised else None
    allowed = None
    if text.constraint is not None:
        allowed = torch.stack([text.constraint.allowed(path) for path in paths])
    return distribution(rows[0], text.sampling, histories, allowed)


def _token_paths(tree: DraftTree) -> list[list[int]]:
    """The guessed tokens before each row: none for the text itself, then up to and including each node."""
    tokens = tree.tokens.tolist()
    return [[]] + [[tokens[step] for step in path_to(tree.parents, node)] for node in range(tree.guesses)]


class _Best:
    """Argmaxes and guesses of a whole pass, on the host."""

    def __init__(self, trees: list[DraftTree], best: list[int], tokens: list[int], sizes: list[int]) -> None:
        self._trees, self._best, self._tokens, self._sizes = trees, best, tokens, sizes

    def verdict(self, index: int) -> Verdict:
        tree = self._trees[index]
        row = sum(self._sizes[:index])
        first = sum(len(other) for other in self._trees[:index])
        guesses = self._tokens[first : first + tree.guesses]
        return walk_greedy(guesses, tree.parents[: tree.guesses], self._best[row : row + tree.guesses + 1])


def _best_of_all(trees: list[DraftTree], outputs: Outputs) -> _Best:
    """One argmax, one copy to the host: guesses and answers travel together."""
    best = outputs.logits.argmax(dim=-1) if outputs.best is None else outputs.best
    guesses = torch.cat([tree.tokens.to(best.device, non_blocking=True) for tree in trees])
    numbers = torch.cat([best, guesses]).tolist()
    return _Best(trees, numbers[: best.shape[0]], numbers[best.shape[0] :], outputs.sizes)


def logprobs_of(text: Sequence, tree: DraftTree, output: Output, verdict: Verdict, wanted: int) -> list[TokenLogprob]:
    """Log-probabilities of the tokens of one round, each under the row that chose it: before temperature and cuts.

    Biases, penalties and grammars count; temperature does not, so that greedy decoding has probabilities too.
    """
    rows = [0] + [node + 1 for node in verdict.path]
    emitted = [int(tree.tokens[node]) for node in verdict.path] + [verdict.token]
    paths = [emitted[:depth] for depth in range(len(rows))]
    histories = [text.history(path) for path in paths] if text.sampling.penalised else None
    allowed = None if text.constraint is None else torch.stack([text.constraint.allowed(path) for path in paths])
    scores = torch.log_softmax(adjusted(output.logits[rows], text.sampling, histories, allowed), dim=-1).cpu()
    found: list[TokenLogprob] = []
    for row, token in zip(scores, emitted):
        best = row.topk(wanted) if wanted else None
        top = tuple(zip(best.indices.tolist(), best.values.tolist())) if best is not None else ()
        found.append(TokenLogprob(token, float(row[token]), top))
    return found
