"""Verdicts for a batch: logits of one pass in, one verdict a text out.

Texts that are plainly greedy are judged together: one argmax over the whole pass, one wait for the device. The others
go through `distribution` and the acceptance rule, one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.acceptance import COUPLED, RULES, position_uniform, walk_coupled, walk_greedy
from paceline.core.distribution import adjusted, distribution
from paceline.core.protocols import Output, Outputs, TokenLogprob, Verdict
from paceline.core.sequence import Sequence
from paceline.core.tree import DraftTree, path_to
from paceline.decode.device_judge import DeviceJudge, can_judge
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
        if can_judge(texts, trees, outputs) and all(self._rule(text) == "token" for text in texts):
            return self._device.verdicts(texts, trees, outputs)
        plain = [text.sampling.plain_greedy and text.constraint is None for text in texts]
        # The lossy rule is not argmax equality, not even for a greedy text: let it show.
        plain = [ours and self._rule(text) != "lossy-typical" for ours, text in zip(plain, texts)]
        best = _best_of_all(trees, outputs) if any(plain) else None
        verdicts: list[Verdict] = []
        for index, (text, tree) in enumerate(zip(texts, trees)):
            if plain[index] and best is not None:
                verdicts.append(best.verdict(index))
            else:
                verdicts.append(self._drawn(text, tree, outputs[index]))
        return verdicts

    def _rule(self, text: Sequence) -> str:
        return text.acceptance or self.rule

    def _drawn(self, text: Sequence, tree: DraftTree, output: Output) -> Verdict:
        target, rule = target_rows(text, tree, output.logits), self._rule(text)
        if rule == COUPLED:
            first = text.new_tokens
            chance = [position_uniform(text.seed, first + depth) for depth in range(tree.guesses + 1)]
            return walk_coupled(tree, target, chance)
        return RULES[rule](tree, target, text.rng)


def target_rows(text: Sequence, tree: DraftTree, logits: Tensor) -> Tensor:
    """The distribution after the text and after each guess, along its own path. [guesses + 1, vocab], on the CPU."""
    rows = logits[: tree.guesses + 1]
    paths = _token_paths(tree) if text.sampling.penalised or text.constraint is not None else []
    histories = [text.history(path) for path in paths] if text.sampling.penalised else None
    allowed = None
    if text.constraint is not None:
        allowed = torch.stack([text.constraint.allowed(path) for path in paths])
    return distribution(rows, text.sampling, histories, allowed).cpu()


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
