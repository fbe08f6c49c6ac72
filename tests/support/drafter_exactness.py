"""The two questions every drafter must answer: is a greedy text unchanged, and is a sampled one distributed as it
should be? Asked on the toy model, whose every distribution is known, in a batch whose texts have 3, 0 and 2 guesses."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from scipy.stats import chi2

from paceline.core.draft_length import FixedDraftLength, within_room
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sampling import SamplingParams, distribution
from paceline.core.sequence import Sequence
from paceline.core.stats import SpecStats
from paceline.core.stopping import StopRules
from paceline.core.types import RowOutput, StepResult, VerifyResult
from paceline.drafting.no_draft import NoDraft
from paceline.engines.local.generate import run
from paceline.engines.local.step import EngineParts
from paceline.engines.local.verifier import Verifier
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
    seqs = []
    for seq_id, (place, budget) in enumerate([*enumerate(BUDGETS)] * copies):
        own = SamplingParams(sampling.temperature, seed=None if sampling.seed is None else sampling.seed + seq_id)
        seq = Sequence(PROMPT[place:], own, StopRules(length if budget else length // 4))
        seq.num_draft_tokens, seq.params.prediction, seq.params.method = budget, prediction, methods[place]
        seqs.append(seq)
    return seqs


def written_by(drafter: Drafter, **about: Any) -> list[Sequence]:
    """The batch written greedily, through all of the real machinery."""
    seqs = batch(SamplingParams(), 60, **about)
    for _ in run(seqs, EngineParts(toy(), drafter, FixedDraftLength(3), Verifier())):
        pass
    return seqs


def check_greedy(drafter: Drafter, **about: Any) -> SpecStats:
    """Every text is the plain one; and the drafter did guess something right, or this shows nothing."""
    plain, drafted = written_by(NoDraft()), written_by(drafter, **about)
    assert [seq.generated for seq in drafted] == [seq.generated for seq in plain]
    assert drafted[1].stats.drafted == 0, "a budget of 0 is no guess"
    total = SpecStats()
    for seq in drafted:
        total.add(seq.stats)
    assert total.accepted > 0
    return total


def check_sampled(drafter: Drafter, samples: int = 50_000, length: int = 500, **about: Any) -> SpecStats:
    """The tokens after each context are distributed as the table says: chi² over all contexts, of at least `samples`
    tokens that speculating texts wrote. Fails a correct drafter with probability FALSE_ALARM."""
    target, seen, total, seed = toy(), Counter[tuple[int, int]](), SpecStats(), 0
    uniforms = distribution(target.table, SamplingParams(1.0)).tolist()
    while total.new_tokens < samples:
        seed += len(BUDGETS) * COPIES
        seqs = batch(SamplingParams(1.0, seed=seed), length, copies=COPIES, **about)
        write(seqs, drafter, target, uniforms, random.Random(seed))
        for seq in (seq for seq in seqs if seq.num_draft_tokens):
            total.add(seq.stats)
            for at in range(seq.prompt_length, len(seq.ids)):
                seen[target._context(seq.ids[at - 2 : at]), seq.ids[at]] += 1
    assert total.accepted > 0.05 * total.new_tokens, "hardly anything was guessed right: this shows little"
    statistic, freedom = distance(uniforms, seen)
    threshold = float(chi2.isf(FALSE_ALARM, freedom))
    assert statistic < threshold, f"chi² {statistic:.1f} of {freedom} degrees of freedom (limit {threshold:.1f})"
    return total


def write(seqs: list[Sequence], drafter: Drafter, target: TableRunner, uniforms: Chances, rng: random.Random) -> None:
    """Rounds in plain Python, without runner or tensors: fifty thousand samples are then a matter of seconds."""
    for seq in seqs:
        drafter.begin(seq, None)
    while seqs:
        trees = drafter.propose(seqs, [within_room(seq, 0) for seq in seqs])
        results = [one_round(seq, tree, target, uniforms, rng) for seq, tree in zip(seqs, trees)]
        drafter.observe(seqs, results)
        for seq in [seq for seq in seqs if seq.finished]:
            drafter.end(seq)
        seqs = [seq for seq in seqs if not seq.finished]


def one_round(seq: Sequence, tree: DraftTree, target: TableRunner, uniforms: Chances, rng: random.Random) -> StepResult:
    tokens = tree.tokens.tolist()
    recent = {-1: seq.ids[-2:]}
    for node, (token, parent) in enumerate(zip(tokens, tree.parents)):
        recent[node] = [recent[parent][-1], token]
    rows = [target._context(recent[node]) for node in range(-1, len(tokens))]
    verified = judged(tree, [uniforms[row] for row in rows], rng)
    emitted = seq.extend([tokens[node] for node in verified.accepted] + [verified.next_token], len(verified.accepted))
    accepted = min(len(verified.accepted), len(emitted))
    seq.stats.add_step(tree, accepted, len(emitted), len(emitted) <= len(verified.accepted))
    output = RowOutput(target.table[rows] if tree.probes else target.table[rows[:1]])
    return StepResult(tree, verified, output, emitted, accepted)


def judged(tree: DraftTree, target: Chances, rng: random.Random) -> VerifyResult:
    """The acceptance rule once more, in plain numbers: keep a child if u·q(x) < p(x), else p <- norm(max(p - q, 0))."""
    tokens = tree.tokens.tolist()
    drawn_from = None if tree.probs is None else tree.probs.tolist()
    path: list[int] = []
    p, node = target[0], -1
    for child in range(tree.num_draft_tokens):
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
    return VerifyResult(path, rng.choices(range(len(p)), p)[0])


def distance(uniforms: Chances, seen: Counter[tuple[int, int]]) -> tuple[float, int]:
    """chi² between counted and expected successors of every context, and its degrees of freedom."""
    statistic, freedom = 0.0, 0
    for context in {context for context, _ in seen}:
        counts = [seen[context, token] for token in range(len(uniforms[context]))]
        expected = [sum(counts) * p for p in uniforms[context]]
        if min(expected) >= 5:  # else it is too rare for the statistic to have its limit's distribution
            statistic += sum((found - wanted) ** 2 / wanted for found, wanted in zip(counts, expected))
            freedom += len(counts) - 1
    assert freedom >= 18, "too few contexts were visited"
    return statistic, freedom
