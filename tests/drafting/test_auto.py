"""The drafter that earns the most per second, chosen from the past alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, RowOutput, StepResult, VerifyResult
from paceline.drafting.auto import LOOKUP, RETRY_STEPS, AutoDrafter, ForecastCalibration
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.registry import build_drafter
from paceline.drafting.suffix import Suffix
from paceline.drafting.suffix_automaton import Forecast
from paceline.errors import OptionError
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.runners.table import TableRunner
from tests.support.build import sequence
from tests.support.drafter_exactness import assert_unchanged, check_greedy, check_sampled, context_for


@dataclass
class Clock:
    """Time that passes only when told."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Stub(Drafter):
    """Drafts zeros, takes some seconds, and records the draft lengths of each call."""

    clock: Clock
    seconds: float = 0.0
    expected: float = 0.0
    needs: frozenset[Capability] = frozenset()
    lengths: list[list[int]] = field(default_factory=list)
    observed: int = 0

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        self.lengths.append(num_draft_tokens)
        self.clock.now += self.seconds if any(num_draft_tokens) else 0.0
        return [draft_tree.chain([0] * k) for k in num_draft_tokens]

    def forecast(self, seq: Sequence, num_draft_tokens: int) -> Forecast:
        return Forecast(draft_tree.chain([1] * num_draft_tokens), self.expected)

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        self.observed += 1


def sequence_of() -> Sequence:
    return sequence([1], 1000)


def play(drafter: AutoDrafter, clock: Clock, seq: Sequence, accepted_by_token: dict[int, int]) -> str:
    """One step of 4 draft tokens and a pass of one second; how many are accepted depends on the first token."""
    tree = drafter.propose([seq], [4])[0]
    clock.now += 1.0
    accepted = accepted_by_token[int(tree.tokens[0])]
    verified = VerifyResult(list(range(accepted)), 0)
    drafter.observe([seq], [StepResult(tree, verified, RowOutput(torch.zeros(5, 2)), [0] * (accepted + 1), accepted)])
    return "lookup" if int(tree.tokens[0]) else "model"


def test_a_good_forecast_goes_before_a_model_and_a_poor_one_does_not() -> None:
    clock = Clock()
    lookup, model = Stub(clock, expected=3.5), Stub(clock, seconds=0.5)
    drafter, seq = AutoDrafter(lookup, {"model": model}, clock), sequence_of()
    drafter.begin(seq, None)
    kinds = [play(drafter, clock, seq, {0: 2, 1: 4}) for _ in range(10)]
    assert kinds[-5:] == ["lookup"] * 5
    lookup.expected = 0.1
    kinds = [play(drafter, clock, seq, {0: 2, 1: 0}) for _ in range(10)]
    assert kinds[-5:] == ["model"] * 5


def test_a_model_that_takes_too_long_is_left_alone_and_tried_again_now_and_then() -> None:
    clock = Clock()
    lookup, model = Stub(clock, expected=0.5), Stub(clock, seconds=20.0)
    drafter, seq = AutoDrafter(lookup, {"model": model}, clock), sequence_of()
    drafter.begin(seq, None)
    kinds = [play(drafter, clock, seq, {0: 4, 1: 1}) for _ in range(3 * RETRY_STEPS)]
    assert 2 <= kinds.count("model") <= 4


def test_forecasts_that_fail_are_weighted_less() -> None:
    clock = Clock()
    lookup, model = Stub(clock, expected=3.0), Stub(clock, seconds=0.1)
    drafter, seq = AutoDrafter(lookup, {"model": model}, clock), sequence_of()
    drafter.begin(seq, None)
    kinds = [play(drafter, clock, seq, {0: 2, 1: 0}) for _ in range(30)]
    assert kinds.count("model") > 20
    calibration = ForecastCalibration()
    calibration.add(0, 3)
    low = calibration.ratio
    for _ in range(50):
        calibration.add(0, 0)
    assert low < 0.5 < 0.95 < calibration.ratio


def test_only_the_chosen_drafter_drafts_and_all_stay_in_step() -> None:
    clock = Clock()
    lookup, one, two = Stub(clock), Stub(clock, seconds=0.1), Stub(clock, seconds=5.0)
    drafter, seq = AutoDrafter(lookup, {"one": one, "two": two}, clock), sequence_of()
    drafter.begin(seq, None)
    for _ in range(12):
        play(drafter, clock, seq, {0: 2, 1: 0})
    assert all(first[0] + second[0] <= 4 for first, second in zip(one.lengths, two.lengths))
    assert sum(sum(stub.lengths[-1]) for stub in (one, two)) == 4
    assert one.observed == two.observed == lookup.observed == 12


def test_sequences_choose_for_themselves() -> None:
    clock = Clock()
    lookup, model = Suffix(), Stub(clock, seconds=0.1)
    drafter = AutoDrafter(lookup, {"model": model}, clock)
    repeating, fresh = sequence_of(), sequence_of()
    repeating.ids, fresh.ids = [7, 8, 9, 10] * 12, list(range(40))
    for seq in (repeating, fresh):
        drafter.begin(seq, None)
    trees = drafter.propose([repeating, fresh], [4, 4])
    assert trees[0].tokens.tolist() == [7, 8, 9, 10]
    assert trees[1].tokens.tolist() == [0, 0, 0, 0]


def test_needs_are_joined_and_names_are_checked() -> None:
    clock = Clock()
    assert AutoDrafter(Suffix(), {}).needs == {Capability.TREE}
    with pytest.raises(OptionError, match=LOOKUP):
        AutoDrafter(Suffix(), {LOOKUP: Stub(clock)})


def auto_with_a_draft_model() -> AutoDrafter:
    """Real drafters; the clock does not move, so the choice depends on acceptance alone, in every run."""
    draft = DraftModel(TableRunner(4, order=2, seed=5, blur=0.4), 4)
    return AutoDrafter(Suffix(), {"draft_model": draft}, Clock())


def test_greedy_outputs_are_unchanged() -> None:
    check_greedy(auto_with_a_draft_model())
    check_greedy(AutoDrafter(Suffix(), {}))


@pytest.mark.slow
def test_sampled_outputs_have_the_right_distribution() -> None:
    check_sampled(auto_with_a_draft_model())


def test_a_lookup_drafts_beside_the_draft_model(tiny_model: Any, tiny_folder: Path) -> None:
    target = HuggingFaceRunner(tiny_model, "tiny")
    for draft_model, names in ((str(tiny_folder), ["draft_model"]), (None, [])):
        drafter = build_drafter("auto", context_for(target, draft_model))
        assert isinstance(drafter, AutoDrafter) and list(drafter.others) == names
        assert (drafter.draft_runner is None) == (draft_model is None)
        assert assert_unchanged(target, drafter, [[5, 7, 9, 5, 7, 9, 5, 7]], 60, 4).accepted > 0
