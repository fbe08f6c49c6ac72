"""Drafters that read the target's states, on the toy: rounds that hand out states, and chi² over wide batches."""

from __future__ import annotations

from collections import Counter

import torch
from scipy.stats import chi2
from torch import Tensor
from torch.nn.functional import one_hot

from paceline.core.acceptance import accept_trees
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
from paceline.runners.table import TableRunner, TableSlot
from tests.drafting.exactness import FALSE_ALARM, batch, distance, toy

COPIES = 160  # of the batch with budgets of 3, 0 and 2, side by side: a head's pass costs the same for one text or many


def shown(logits: Tensor) -> Output:
    """An output of the toy: its state is its logits."""
    return Output(logits, logits, torch.cat([logits] * 3, dim=-1))


def begin(text: Sequence, drafter: Drafter, target: TableRunner) -> None:
    text.slot = TableSlot()
    rows = [target._context(text.ids[: end + 1]) for end in range(len(text.ids) - 1)]
    drafter.begin(text, shown(target.table[rows]))


def guesses(texts: list[Sequence], drafter: Drafter) -> list[DraftTree]:
    """What the drafter proposes, within the texts' budgets and with their slots left as they were."""
    for text in texts:
        assert isinstance(text.slot, TableSlot)
        text.slot.tokens, text.slot.length = text.ids[:-1], len(text.ids) - 1
    budgets = [within_room(text, 0) for text in texts]
    trees = drafter.propose(texts, budgets)
    for text, tree, budget in zip(texts, trees, budgets):
        assert text.slot is not None and text.slot.length == len(text.ids) - 1, "a slot was not given back"
        assert len(tree) <= budget
    return trees


class Padded:
    """The trees of a round as tensors of one size. Surplus nodes have the parent -2 and are never reached."""

    def __init__(self, texts: list[Sequence], trees: list[DraftTree], vocab: int) -> None:
        size = max(1, *(len(tree) for tree in trees))
        self.tokens = torch.zeros(len(trees), size, dtype=torch.int64)
        self.parents = torch.full((len(trees), size), -2)
        self.q = torch.zeros(len(trees), size, vocab)
        for index, tree in enumerate(trees):
            count = len(tree)
            self.tokens[index, :count], self.parents[index, :count] = tree.tokens, torch.tensor(tree.parents)
            self.q[index, :count] = one_hot(tree.tokens, vocab) if tree.probs is None else tree.probs
        last = torch.tensor([text.ids[-2:] for text in texts])
        before = torch.cat([last[:, 1:], self.tokens], dim=1).gather(1, (self.parents + 1).clamp_min(0))
        # Of the toy that looks two tokens back: the row of the table after the text and after each node.
        pairs = torch.cat([last[:, None], torch.stack([before, self.tokens], dim=-1)], dim=1)
        self.contexts = pairs[..., 0] * (vocab + 1) + pairs[..., 1]


def write(texts: list[Sequence], drafter: Drafter, target: TableRunner, rng: torch.Generator) -> None:
    """Rounds without a runner, all texts judged at once, which makes many samples affordable."""
    chances = distribution(target.table, SamplingParams(1.0))
    for text in texts:
        begin(text, drafter, target)
    while texts:
        trees = guesses(texts, drafter)
        padded = Padded(texts, trees, target.card.vocab_size)
        chance = torch.rand(len(texts), padded.tokens.shape[1] + 1, generator=rng, dtype=torch.float64)
        said = accept_trees(padded.tokens, padded.parents, padded.q, chances[padded.contexts], chance)
        results = zip(said.nodes.tolist(), said.counts.tolist(), said.tokens.tolist())
        verdicts = [Verdict(nodes[:count], token) for nodes, count, token in results]
        states = target.table[padded.contexts]
        rounds = [settle(*each) for each in zip(texts, trees, verdicts, states)]
        drafter.observe(texts, rounds)
        for text in [text for text in texts if text.finished]:
            drafter.end(text)
        texts = [text for text in texts if not text.finished]


def settle(text: Sequence, tree: DraftTree, verdict: Verdict, states: Tensor) -> Round:
    tokens = tree.tokens.tolist()
    emitted = text.extend([tokens[node] for node in verdict.path] + [verdict.token], len(verdict.path))
    accepted = min(len(verdict.path), len(emitted))
    text.tally.add_round(tree, accepted, len(emitted), len(emitted) <= len(verdict.path))
    return Round(tree, verdict, shown(states[: len(tree) + 1]), emitted, accepted)


def check_sampled_with_states(drafter: Drafter, target: TableRunner | None = None, samples: int = 50_000) -> Tally:
    """`exactness.check_sampled` for drafters that need states: chi² over all contexts, in batches of 3, 0, 2 guesses.

    Fails a correct drafter with probability FALSE_ALARM.
    """
    target, rng = target or toy(), torch.Generator().manual_seed(11)
    seen, total, seed = Counter[tuple[int, int]](), Tally(), 0
    while total.new_tokens < samples:
        texts = [text for copy in range(COPIES) for text in batch(SamplingParams(1.0, seed=seed + 3 * copy), 160)]
        seed += 3 * COPIES
        write(texts, drafter, target, rng)
        for text in (text for text in texts if text.draft_tokens):
            total.add(text.tally)
            for at in range(text.prompt_length, len(text.ids)):
                seen[target._context(text.ids[at - 2 : at]), text.ids[at]] += 1
    assert total.accepted > 0.05 * total.new_tokens, "hardly anything was guessed right: this shows little"
    statistic, freedom = distance(distribution(target.table, SamplingParams(1.0)).tolist(), seen)
    limit = float(chi2.isf(FALSE_ALARM, freedom))
    print(f"chi² {statistic:.1f} of {freedom} degrees of freedom, limit {limit:.1f}, error probability {FALSE_ALARM}")
    assert statistic < limit
    return total


def texts_of(prompts: list[list[int]], length: int, **sampling: float) -> list[Sequence]:
    return [Sequence(list(prompt), SamplingParams(**sampling), StopRules(length)) for prompt in prompts]


def greedy_run(target: object, drafter: Drafter, prompts: list[list[int]], length: int, k: int) -> list[Sequence]:
    """Texts written together, through all of the real machinery."""
    texts = texts_of(prompts, length)
    for _ in run(texts, Machinery(target, drafter, FixedBudget(k), Judge())):  # type: ignore[arg-type]
        pass
    return texts


def assert_unchanged(target: object, drafter: Drafter, prompts: list[list[int]], length: int, k: int) -> Tally:
    """The texts are what the target alone writes; returns what was counted."""
    plain = greedy_run(target, Nothing(), prompts, length, 0)
    drafted = greedy_run(target, drafter, prompts, length, k)
    assert [text.written for text in drafted] == [text.written for text in plain]
    total = Tally()
    for text in drafted:
        total.add(text.tally)
    return total
