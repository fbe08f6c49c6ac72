"""Drafts that state their confidence: exact over the real engine, cut through a user's decoder, never lost for good."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.core.confidence import EDGES
from paceline.core.cost_model import CostCurve, CostModel, StepTiming
from paceline.core.draft_length import AdaptiveDraftLength
from paceline.core.draft_tree import DraftTree, chain
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, StepResult, VerifyResult
from paceline.runners.table import TableRunner
from tests.support.build import sequence
from tests.support.exactness import Outcome, draft_model, measured, ngram
from tests.support.wrong_rules import WrappedDrafter

NO_OUTPUT = RowOutput(torch.empty(0, 0))
SLOPE, DRAFT = 0.03, 0.01  # of a plain step: what a token adds to the pass of a batch, what a draft token takes


class MadeUpClock(AdaptiveDraftLength):
    """The adaptive policy on a machine whose costs are the same in every run."""

    def __init__(self) -> None:
        super().__init__(CostModel(CostCurve({width: 1 + SLOPE * (width - 1) for width in range(1, 200)})), 4)
        self.sent: set[int] = set()

    def observe(self, seqs: list[Sequence], results: list[StepResult], timing: StepTiming) -> None:
        self.sent |= {result.tree.num_draft_tokens for result in results}
        draft = DRAFT * max(result.tree.num_draft_tokens for result in results)
        made_up = replace(timing, draft_seconds=draft, verify_seconds=1 + SLOPE * (timing.nodes - 1), clean=True)
        super().observe(seqs, results, made_up)


def checked(outcome: Outcome, policy: MadeUpClock) -> None:
    print(outcome)
    assert outcome.passed
    assert outcome.stats.accepted > 0.1 * outcome.stats.new_tokens and len(policy.sent) >= 3, "this shows little"


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
def test_drawn_drafts_that_are_cut_by_their_confidence_leave_the_distribution_as_it_is(rule: str) -> None:
    policy = MadeUpClock()
    checked(measured(rule, draft_model, 4_000, policy=policy), policy)


@pytest.mark.slow
def test_chosen_drafts_that_are_cut_by_their_confidence_leave_the_distribution_as_it_is() -> None:
    policy = MadeUpClock()
    checked(measured("token", ngram, 4_000, policy=policy), policy)


class StatesWhatItDrew(WrappedDrafter):
    """States the probability of the very token it drew: whether token j is sent then depends on token j."""

    def change(self, seq: Sequence, tree: DraftTree) -> DraftTree:
        assert tree.probs is not None
        drawn = [float(row[token]) for row, token in zip(tree.probs, tree.tokens.tolist())]
        return replace(tree, confidence=drawn)


def peeking(target: TableRunner) -> Drafter:
    return StatesWhatItDrew(draft_model(target))


@pytest.mark.slow
def test_a_confidence_that_looks_at_the_token_it_belongs_to_is_caught() -> None:
    """The wrong rule that the tests above exist for: the same harness rejects it."""
    outcome = measured("token", peeking, 4_000, policy=MadeUpClock())
    print(outcome)
    assert not outcome.passed


class HalfRight(Drafter):
    """Drafts three tokens that are right and five that are not; its confidence tells them apart, not how often."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [self._draft(seq.num_new_tokens, k) for seq, k in zip(seqs, num_draft_tokens)]

    def _draft(self, done: int, k: int) -> DraftTree:
        right, wrong = self.tokens[done : done + 3], [(token + 1) % 7 for token in self.tokens[done + 3 : done + 8]]
        return chain([*right, *wrong][:k], confidence=([0.93] * len(right) + [0.55] * len(wrong))[:k])


@pytest.mark.slow
def test_a_decoder_learns_which_confidence_to_send(tiny_folder: Path) -> None:
    prompt, limit = "to be or not to be, ", 400
    with SpeculativeDecoder(tiny_folder, num_draft_tokens=0) as plain:
        expected = plain.generate(prompt, max_new_tokens=limit, ignore_eos=True)
    with SpeculativeDecoder(tiny_folder, drafter=HalfRight(expected.token_ids)) as decoder:
        result = decoder.generate(prompt, max_new_tokens=limit, ignore_eos=True)
    assert result.token_ids == expected.token_ids
    stats = result.stats
    assert stats.accepted > limit / 4, "drafts were sent"
    assert stats.accepted > 0.6 * stats.drafted, "without the calibrated cut, three of eight would be accepted"


def play(policy: AdaptiveDraftLength, steps: int, *, gains: bool, hiccup: int | None = None) -> list[int]:
    """Blocks of 8 tokens that take a fifth of a plain step to make, all of them accepted or none; the ks asked for."""
    seq, ks = sequence([1], 100_000), list[int]()
    for step in range(steps):
        [k] = policy.plan([seq])
        tree = chain([2] * min(k, 8), confidence=[0.8] * min(k, 8))
        [kept] = policy.cut([seq], [tree])
        emitted = [2] * (len(kept) + 1) if gains else [3]
        accepted = list(range(len(kept))) if gains else []
        result = StepResult(kept, VerifyResult(accepted, emitted[-1], emitted[:-1]), NO_OUTPUT, seq.extend(emitted, 0))
        late = 0.5 if step == hiccup else 0.0
        policy.observe([seq], [result], StepTiming((0.001 if k else 0.0) + late, 0.005, 1 + len(kept), len(kept), 1))
        ks.append(k)
    return ks


def flat() -> AdaptiveDraftLength:
    return AdaptiveDraftLength(CostModel(CostCurve(dict.fromkeys(range(1, 18), 0.005))))


def test_a_block_is_asked_for_whole_while_it_gains_and_rests_where_it_does_not() -> None:
    assert min(play(flat(), 60, gains=True)[2:]) == 16, "what is sent of it is decided later"
    hopeless = play(flat(), 600, gains=False)
    lost = 0.001 * sum(k > 0 for k in hopeless[200:])
    assert 0 < lost < 0.02 * 400 * 0.005, "probes, within a small share of the time"


@pytest.mark.parametrize("step", [0, 1, 2, 5, 30])
def test_one_hiccup_of_half_a_second_does_not_end_asking(step: int) -> None:
    ks = play(flat(), 160, gains=True, hiccup=step)
    assert sum(k > 0 for k in ks[step + 64 :]) > 0.95 * len(ks[step + 64 :])


# --- batches ----------------------------------------------------------------------------------------------------------


def pass_seconds(rows: int) -> float:
    """Of the target, as on a card: rows cost little up to a tile, and more beyond it."""
    return 1e-3 * (1.15 + 0.033 * (rows - 1) if rows <= 8 else 1.4 + 0.052 * (rows - 8))


def draft_seconds(num_seqs: int) -> float:
    """Of one more draft token for all sequences."""
    return 1e-3 * (0.5 + 0.025 * (num_seqs - 1))


def chain_length(policy: AdaptiveDraftLength, seqs: list[Sequence], k: int, confidence: float) -> int:
    """Draft tokens that a device makes which ends its chains by itself."""
    limits = policy.draft_value().chain_limits(seqs)
    assert limits is not None
    rate = limits.rates[bisect_right(EDGES, confidence)]
    made, survival = 1, rate
    while made < k and len(seqs) * survival * rate >= limits.least:
        made, survival = made + 1, survival * rate
    return made


def speed_of_batch(num_seqs: int, accepted: float, steps: int) -> float:
    """Tokens a second of the policy over those of plain decoding; each draft token is accepted this often."""
    policy = AdaptiveDraftLength(CostModel(CostCurve({rows: pass_seconds(rows) for rows in range(1, 40)})), 7, 32)
    random, seqs, seconds, tokens = Random(num_seqs), [sequence([1], 100_000) for _ in range(num_seqs)], 0.0, 0
    for _ in range(steps):
        k = max(policy.plan(seqs))
        made = chain_length(policy, seqs, k, accepted) if k else 0
        trees = [chain([2] * made, confidence=[accepted] * made) for _ in seqs]
        if made:
            policy.sent(seqs, trees)
        results = [_drawn(seq, tree, accepted, random) for seq, tree in zip(seqs, trees)]
        nodes, took = num_seqs * (1 + made), pass_seconds(num_seqs * (1 + made)) + made * draft_seconds(num_seqs)
        policy.observe(seqs, results, StepTiming(0.0, took, nodes, made, num_seqs, num_seqs, looped=made > 0))
        seconds, tokens = seconds + took, tokens + sum(len(result.emitted) for result in results)
    return tokens / seconds * pass_seconds(num_seqs) / num_seqs


def _drawn(seq: Sequence, tree: DraftTree, accepted: float, random: Random) -> StepResult:
    count = 0
    while count < len(tree) and random.random() < accepted:
        count += 1
    last = 2 if count == len(tree) else 3
    verified = VerifyResult(list(range(count)), last, [2] * count)
    return StepResult(tree, verified, NO_OUTPUT, seq.extend([2] * count + [last], count))


@pytest.mark.parametrize("num_seqs", [1, 2, 4, 8])
@pytest.mark.parametrize("accepted", [0.3, 0.5, 0.7])
def test_a_batch_whose_drafts_lose_is_decoded_plainly(num_seqs: int, accepted: float) -> None:
    """What a draft gains alone says nothing of a batch: there its tokens save a fraction of that."""
    assert speed_of_batch(num_seqs, accepted, 600) > 0.97


@pytest.mark.slow
@pytest.mark.parametrize(("num_seqs", "gain"), [(1, 1.5), (2, 1.4), (4, 1.25), (8, 1.07)])
def test_a_batch_whose_drafts_win_is_drafted_for(num_seqs: int, gain: float) -> None:
    assert speed_of_batch(num_seqs, 0.95, 600) > gain


READING, PROMPT = 2e-5, 150  # seconds of a drafter for a token it has not read; tokens of a prompt


class Batches:
    """Sequences that come and go on a card; a drafter that lacks their prompts reads them when it first drafts."""

    def __init__(self, num_seqs: int, accepted: float) -> None:
        self.num_seqs, self.accepted, self.random = num_seqs, accepted, Random(1)
        costs = CostModel(CostCurve({rows: pass_seconds(rows) for rows in range(1, 80)}), catch_up=READING)
        self.policy = AdaptiveDraftLength(costs, 7, 32)
        self.num_read: dict[int, int] = {}

    def speed(self, num_waves: int) -> float:
        """Tokens a second over those of plain decoding."""
        seconds, plain = 0.0, 0.0
        for _ in range(num_waves):
            seqs = [sequence([1] * PROMPT, 256) for _ in range(self.num_seqs)]
            while seqs:
                took, emitted = self._step(seqs)
                seconds, plain = seconds + took, plain + pass_seconds(len(seqs)) * emitted / len(seqs)
                seqs = [seq for seq in seqs if not seq.finished]
        return plain / seconds

    def _step(self, seqs: list[Sequence]) -> tuple[float, int]:
        """Its seconds and tokens. A device takes steps in a row where all sequences have draft tokens."""
        policy, ks = self.policy, self.policy.plan(seqs)
        if all(ks):
            made = chain_length(policy, seqs, max(ks), self.accepted)
            ks = [min(made, k) for k in ks]
        trees = [chain([2] * k, confidence=[self.accepted] * k) for k in ks]
        reading = READING * sum(len(seq.ids) - self.num_read.get(seq.seq_id, 0) for seq, k in zip(seqs, ks) if k)
        if all(ks):
            policy.sent(seqs, trees)
        elif any(ks):
            trees = policy.cut(seqs, trees)
        results = [_drawn(seq, tree, self.accepted, self.random) for seq, tree in zip(seqs, trees)]
        self.num_read |= {seq.seq_id: len(seq.ids) for seq, k in zip(seqs, ks) if k}
        counts = [len(tree) for tree in trees]
        drafting, verifying = reading + max(ks) * draft_seconds(len(seqs)), pass_seconds(len(seqs) + sum(counts))
        parts = (0.0, drafting + verifying) if all(ks) else (drafting, verifying)
        sizes = (len(seqs) + sum(counts), max(counts), len(seqs), sum(count > 0 for count in counts))
        policy.observe(seqs, results, StepTiming(*parts, *sizes, looped=all(ks)))
        return drafting + verifying, sum(len(result.emitted) for result in results)


@pytest.mark.slow
@pytest.mark.parametrize(("num_seqs", "first"), [(2, 0.97), (4, 0.95), (8, 0.92)])
@pytest.mark.parametrize("accepted", [0.3, 0.5])
def test_probes_of_a_batch_pay_for_the_prompts_that_a_drafter_reads_for_them(
    num_seqs: int, first: float, accepted: float
) -> None:
    """Every new sequence has a prompt that it has not read: if that were free, probes would take 6% of the time."""
    batches = Batches(num_seqs, accepted)
    assert batches.speed(2) > first
    assert batches.speed(6) > 0.975


@pytest.mark.parametrize(("num_seqs", "gain"), [(2, 1.3), (4, 1.1)])
def test_a_batch_whose_drafts_win_reads_the_prompts(num_seqs: int, gain: float) -> None:
    batches = Batches(num_seqs, 0.95)
    batches.speed(3)
    assert batches.speed(6) > gain


def asked_step_by_step(accepted: float, steps: int) -> list[int]:
    """Of every step: how many of eight sequences a drafter is asked for, where the host takes every step itself."""
    policy = AdaptiveDraftLength(CostModel(CostCurve({rows: pass_seconds(rows) for rows in range(1, 80)})), 7)
    random, seqs, asked = Random(1), [sequence([1], 100_000) for _ in range(8)], list[int]()
    for _ in range(steps):
        ks = policy.plan(seqs)
        trees = policy.cut(seqs, [chain([2] * k, confidence=[accepted] * k) for k in ks])
        results = [_drawn(seq, tree, accepted, random) for seq, tree in zip(seqs, trees)]
        counts, drafting = [len(tree) for tree in trees], sum(k > 0 for k in ks)
        timing = StepTiming(4e-4 * drafting, pass_seconds(8 + sum(counts)), 8 + sum(counts), max(counts), 8, drafting)
        policy.observe(seqs, results, timing)
        asked.append(drafting)
    return asked


@pytest.mark.slow
def test_one_sequence_of_a_batch_is_enough_to_find_out_that_drafts_lose() -> None:
    later = asked_step_by_step(0.05, 800)[100:]
    assert set(later) == {0, 1} and sum(later) < 0.05 * len(later)


@pytest.mark.slow
def test_what_one_sequence_wins_lets_all_of_a_batch_be_drafted_for() -> None:
    later = asked_step_by_step(0.97, 300)[100:]
    assert sum(later) > 0.9 * 8 * len(later)
