"""The two questions every drafter must answer: is a greedy text unchanged, and is a sampled one distributed as it
should be? Asked on the toy model, whose every distribution is known, in a batch whose texts have 3, 0 and 2 guesses."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from scipy.stats import chi2

from paceline.core.budget import FixedBudget, within_room
from paceline.core.distribution import SamplingParams, distribution
from paceline.core.protocols import Drafter, Output, Round, Verdict
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.tally import Tally
from paceline.core.tree import DraftTree
from paceline.decode.generate import run
from paceline.decode.judge import Judge
from paceline.decode.step import Machinery
from paceline.drafting.nothing import Nothing
from paceline.runners.table import TableRunner

BUDGETS = (3, 0, 2)
COPIES = 4  # of a batch with these budgets, where many samples are drawn: drafters work for several texts at once
PROMPT = [0, 1, 2, 0, 1, 3, 0, 1]
Chances = list[list[float]]  # a row of probabilities a context
FALSE_ALARM = 1e-6  # the chance that a correct drafter fails the test of its distribution


def toy(order: int = 2) -> TableRunner:
    return TableRunner(vocab_size=4, order=order, seed=5)


def batch(
    sampling: SamplingParams,
    length: int,
    *,
    prediction: list[int] | None = None,
    methods: tuple[str | None, ...] = (None, None, None),
    copies: int = 1,
) -> list[Sequence]:
    """Texts with budgets of 3, 0 and 2 in turn. Those without guesses only have to be there, so they are short."""
    texts = []
    for number, (place, budget) in enumerate([*enumerate(BUDGETS)] * copies):
        own = SamplingParams(sampling.temperature, seed=None if sampling.seed is None else sampling.seed + number)
        text = Sequence(PROMPT[place:], own, StopRules(length if budget else length // 4))
        text.draft_tokens, text.prediction, text.method = budget, prediction, methods[place]
        texts.append(text)
    return texts


def written_by(drafter: Drafter, **about: Any) -> list[Sequence]:
    """The batch written greedily, through all of the real machinery."""
    texts = batch(SamplingParams(), 60, **about)
    for _ in run(texts, Machinery(toy(), drafter, FixedBudget(3), Judge())):
        pass
    return texts


def check_greedy(drafter: Drafter, **about: Any) -> Tally:
    """Every text is the plain one; and the drafter did guess something right, or this shows nothing."""
    plain, drafted = written_by(Nothing()), written_by(drafter, **about)
    assert [text.written for text in drafted] == [text.written for text in plain]
    assert drafted[1].tally.drafted == 0, "a budget of 0 is no guess"
    total = Tally()
    for text in drafted:
        total.add(text.tally)
    assert total.accepted > 0
    return total


def check_sampled(drafter: Drafter, samples: int = 50_000, length: int = 500, **about: Any) -> Tally:
    """The tokens after each context are distributed as the table says: chi² over all contexts, of at least `samples`
    tokens that speculating texts wrote. Fails a correct drafter with probability FALSE_ALARM."""
    target, seen, total, seed = toy(), Counter[tuple[int, int]](), Tally(), 0
    chances = distribution(target.table, SamplingParams(1.0)).tolist()
    while total.new_tokens < samples:
        seed += len(BUDGETS) * COPIES
        texts = batch(SamplingParams(1.0, seed=seed), length, copies=COPIES, **about)
        write(texts, drafter, target, chances, random.Random(seed))
        for text in (text for text in texts if text.draft_tokens):
            total.add(text.tally)
            for at in range(text.prompt_length, len(text.ids)):
                seen[target._context(text.ids[at - 2 : at]), text.ids[at]] += 1
    assert total.accepted > 0.05 * total.new_tokens, "hardly anything was guessed right: this shows little"
    statistic, freedom = distance(chances, seen)
    threshold = float(chi2.isf(FALSE_ALARM, freedom))
    assert statistic < threshold, f"chi² {statistic:.1f} of {freedom} degrees of freedom (limit {threshold:.1f})"
    return total


def write(texts: list[Sequence], drafter: Drafter, target: TableRunner, chances: Chances, rng: random.Random) -> None:
    """Rounds in plain Python, without runner or tensors: fifty thousand samples are then a matter of seconds."""
    for text in texts:
        drafter.begin(text, None)
    while texts:
        trees = drafter.propose(texts, [within_room(text, 0) for text in texts])
        rounds = [one_round(text, tree, target, chances, rng) for text, tree in zip(texts, trees)]
        drafter.observe(texts, rounds)
        for text in [text for text in texts if text.finished]:
            drafter.end(text)
        texts = [text for text in texts if not text.finished]


def one_round(text: Sequence, tree: DraftTree, target: TableRunner, chances: Chances, rng: random.Random) -> Round:
    tokens = tree.tokens.tolist()
    recent = {-1: text.ids[-2:]}
    for node, (token, parent) in enumerate(zip(tokens, tree.parents)):
        recent[node] = [recent[parent][-1], token]
    rows = [target._context(recent[node]) for node in range(-1, len(tokens))]
    verdict = judged(tree, [chances[row] for row in rows], rng)
    emitted = text.extend([tokens[node] for node in verdict.path] + [verdict.token], len(verdict.path))
    accepted = min(len(verdict.path), len(emitted))
    text.tally.add_round(tree, accepted, len(emitted), len(emitted) <= len(verdict.path))
    output = Output(target.table[rows] if tree.probes else target.table[rows[:1]])
    return Round(tree, verdict, output, emitted, accepted)


def judged(tree: DraftTree, target: Chances, rng: random.Random) -> Verdict:
    """The acceptance rule once more, in plain numbers: keep a child if u·q(x) < p(x), else p <- norm(max(p - q, 0))."""
    tokens = tree.tokens.tolist()
    drawn_from = None if tree.probs is None else tree.probs.tolist()
    path: list[int] = []
    p, node = target[0], -1
    for child in range(tree.guesses):
        if tree.parents[child] != node:
            continue
        token = tokens[child]
        q = [float(x == token) for x in range(len(p))] if drawn_from is None else drawn_from[child]
        if rng.random() * q[token] < p[token]:
            path.append(child)
            p, node = target[child + 1], child
        else:
            left = [max(a - b, 0.0) for a, b in zip(p, q)]
            p = [x / sum(left) for x in left] if sum(left) > 0 else p
    return Verdict(path, rng.choices(range(len(p)), p)[0])


def distance(chances: Chances, seen: Counter[tuple[int, int]]) -> tuple[float, int]:
    """chi² between counted and expected successors of every context, and its degrees of freedom."""
    statistic, freedom = 0.0, 0
    for context in {context for context, _ in seen}:
        counts = [seen[context, token] for token in range(len(chances[context]))]
        expected = [sum(counts) * p for p in chances[context]]
        if min(expected) >= 5:  # else it is too rare for the statistic to have its limit's distribution
            statistic += sum((found - wanted) ** 2 / wanted for found, wanted in zip(counts, expected))
            freedom += len(counts) - 1
    assert freedom >= 18, "too few contexts were visited"
    return statistic, freedom
