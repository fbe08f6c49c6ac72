"""Drafters that read the target's states, on the toy: rounds that hand out states, and chi² over wide batches."""

from __future__ import annotations

from collections import Counter

import torch
from scipy.stats import chi2
from torch import Tensor
from torch.nn.functional import one_hot

from paceline.core.draft_length import FixedDraftLength, within_room
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sampling import SamplingParams, distribution
from paceline.core.sequence import Sequence
from paceline.core.stats import SpecStats
from paceline.core.stopping import StopRules
from paceline.core.types import RowOutput, StepResult, VerifyResult
from paceline.core.verify import verify_trees
from paceline.drafting.no_draft import NoDraft
from paceline.engines.local.generate import run
from paceline.engines.local.step import EngineParts
from paceline.engines.local.verifier import Verifier
from paceline.runners.table import TableRunner, TableSequenceCache
from tests.support.drafter_exactness import FALSE_ALARM, batch, distance, toy

COPIES = 160  # of the batch with budgets of 3, 0 and 2, side by side: a head's pass costs the same for one text or many


def shown(logits: Tensor) -> RowOutput:
    """An output of the toy: its state is its logits."""
    return RowOutput(logits, logits, torch.cat([logits] * 3, dim=-1))


def begin(seq: Sequence, drafter: Drafter, target: TableRunner) -> None:
    seq.seq_cache = TableSequenceCache()
    rows = [target._context(seq.ids[: end + 1]) for end in range(len(seq.ids) - 1)]
    drafter.begin(seq, shown(target.table[rows]))


def draft_tokens(seqs: list[Sequence], drafter: Drafter) -> list[DraftTree]:
    """What the drafter proposes, within the texts' budgets and with their slots left as they were."""
    for seq in seqs:
        assert isinstance(seq.seq_cache, TableSequenceCache)
        seq.seq_cache.tokens, seq.seq_cache.length = seq.ids[:-1], len(seq.ids) - 1
    num_draft_tokens = [within_room(seq, 0) for seq in seqs]
    trees = drafter.propose(seqs, num_draft_tokens)
    for seq, tree, budget in zip(seqs, trees, num_draft_tokens):
        assert seq.seq_cache is not None and seq.seq_cache.length == len(seq.ids) - 1, "a slot was not given back"
        assert len(tree) <= budget
    return trees


class Padded:
    """The trees of a round as tensors of one size. Surplus nodes have the parent -2 and are never reached."""

    def __init__(self, seqs: list[Sequence], trees: list[DraftTree], vocab: int) -> None:
        size = max(1, *(len(tree) for tree in trees))
        self.tokens = torch.zeros(len(trees), size, dtype=torch.int64)
        self.parents = torch.full((len(trees), size), -2)
        self.q = torch.zeros(len(trees), size, vocab)
        for index, tree in enumerate(trees):
            count = len(tree)
            self.tokens[index, :count], self.parents[index, :count] = tree.tokens, torch.tensor(tree.parents)
            self.q[index, :count] = one_hot(tree.tokens, vocab) if tree.probs is None else tree.probs
        last = torch.tensor([seq.ids[-2:] for seq in seqs])
        before = torch.cat([last[:, 1:], self.tokens], dim=1).gather(1, (self.parents + 1).clamp_min(0))
        # Of the toy that looks two tokens back: the row of the table after the text and after each node.
        pairs = torch.cat([last[:, None], torch.stack([before, self.tokens], dim=-1)], dim=1)
        self.contexts = pairs[..., 0] * (vocab + 1) + pairs[..., 1]


def write(seqs: list[Sequence], drafter: Drafter, target: TableRunner, rng: torch.Generator) -> None:
    """Rounds without a runner, all texts judged at once, which makes many samples affordable."""
    uniforms = distribution(target.table, SamplingParams(1.0))
    for seq in seqs:
        begin(seq, drafter, target)
    while seqs:
        trees = draft_tokens(seqs, drafter)
        padded = Padded(seqs, trees, target.info.vocab_size)
        uniforms = torch.rand(len(seqs), padded.tokens.shape[1] + 1, generator=rng, dtype=torch.float64)
        output = verify_trees(padded.tokens, padded.parents, padded.q, uniforms[padded.contexts], uniforms)
        results = zip(output.nodes.tolist(), output.counts.tolist(), output.tokens.tolist())
        verified_rows = [VerifyResult(nodes[:count], token) for nodes, count, token in results]
        states = target.table[padded.contexts]
        results = [settle(*each) for each in zip(seqs, trees, verified_rows, states)]
        drafter.observe(seqs, results)
        for seq in [seq for seq in seqs if seq.finished]:
            drafter.end(seq)
        seqs = [seq for seq in seqs if not seq.finished]


def settle(seq: Sequence, tree: DraftTree, verified: VerifyResult, states: Tensor) -> StepResult:
    tokens = tree.tokens.tolist()
    emitted = seq.extend([tokens[node] for node in verified.accepted] + [verified.next_token], len(verified.accepted))
    accepted = min(len(verified.accepted), len(emitted))
    seq.stats.add_step(tree, accepted, len(emitted), len(emitted) <= len(verified.accepted))
    return StepResult(tree, verified, shown(states[: len(tree) + 1]), emitted, accepted)


def check_sampled_with_states(drafter: Drafter, target: TableRunner | None = None, samples: int = 50_000) -> SpecStats:
    """`exactness.check_sampled` for drafters that need states: chi² over all contexts, in batches of 3, 0, 2 guesses.

    Fails a correct drafter with probability FALSE_ALARM.
    """
    target, rng = target or toy(), torch.Generator().manual_seed(11)
    seen, total, seed = Counter[tuple[int, int]](), SpecStats(), 0
    while total.new_tokens < samples:
        seqs = [seq for copy in range(COPIES) for seq in batch(SamplingParams(1.0, seed=seed + 3 * copy), 160)]
        seed += 3 * COPIES
        write(seqs, drafter, target, rng)
        for seq in (seq for seq in seqs if seq.num_draft_tokens):
            total.add(seq.stats)
            for at in range(seq.prompt_length, len(seq.ids)):
                seen[target._context(seq.ids[at - 2 : at]), seq.ids[at]] += 1
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
    seqs = texts_of(prompts, length)
    for _ in run(seqs, EngineParts(target, drafter, FixedDraftLength(k), Verifier())):  # type: ignore[arg-type]
        pass
    return seqs


def assert_unchanged(target: object, drafter: Drafter, prompts: list[list[int]], length: int, k: int) -> SpecStats:
    """The texts are what the target alone writes; returns what was counted."""
    plain = greedy_run(target, NoDraft(), prompts, length, 0)
    drafted = greedy_run(target, drafter, prompts, length, k)
    assert [seq.generated for seq in drafted] == [seq.generated for seq in plain]
    total = SpecStats()
    for seq in drafted:
        total.add(seq.stats)
    return total
