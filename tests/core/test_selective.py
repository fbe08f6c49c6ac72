"""Drafts that state their confidence: exact over the real engine, cut through a user's decoder, never lost for good."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline import SpeculativeDecoder
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
