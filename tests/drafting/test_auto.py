"""The drafter that saves the most time, chosen before anything is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.core import draft_tree
from paceline.core.cost_model import CostCurve, CostModel
from paceline.core.draft_tree import DraftTree
from paceline.core.draft_value import DraftValue
from paceline.core.looped_steps import LoopedStep, LoopedSteps
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, RowOutput, StepResult, VerifyResult
from paceline.drafting.auto import AutoDrafter
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.registry import build_drafter
from paceline.drafting.suffix import Suffix
from paceline.errors import OptionError
from paceline.heads.shipped import shipped_head
from paceline.hub.default import DIRECTORY
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.runners.table import TableRunner
from tests.support.build import sequence
from tests.support.drafter_exactness import assert_unchanged, check_greedy, check_sampled, context_for
from tests.support.toy import ToyRunner


@dataclass
class Clock:
    """Time that passes only when told."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Stub(Drafter):
    """Drafts a token of its own, `most` times at most, takes some seconds, and records the draft lengths of each
    call."""

    clock: Clock
    token: int = 0
    seconds: float = 0.0
    confidence: float | None = None
    needs: frozenset[Capability] = frozenset()
    lengths: list[list[int]] = field(default_factory=list)
    observed: int = 0
    most: int = 10_000

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        self.lengths.append(num_draft_tokens)
        self.clock.now += self.seconds if any(num_draft_tokens) else 0.0
        return [self._chain(min(k, self.most)) for k in num_draft_tokens]

    def _chain(self, k: int) -> DraftTree:
        return draft_tree.chain([self.token] * k, confidence=None if self.confidence is None else [self.confidence] * k)

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        self.observed += 1


def sequence_of() -> Sequence:
    return sequence([1], 10_000)


def play(drafter: AutoDrafter, clock: Clock, seq: Sequence, accepted_by_token: dict[int, int]) -> int:
    """One step of 4 draft tokens and a pass of one second; how many are accepted depends on who drafted."""
    tree = drafter.propose([seq], [4])[0]
    clock.now += 1.0 + 0.05 * len(tree)
    tokens = tree.tokens.tolist()
    token = tokens[0] if tokens else 9
    accepted = min(accepted_by_token[token], len(tokens))
    verified = VerifyResult(list(range(accepted)), 8, tokens[:accepted])
    drafter.observe([seq], [StepResult(tree, verified, RowOutput(torch.zeros(5, 2)), [0] * (accepted + 1), accepted)])
    return token


LOOKUP, MODEL = 1, 0
NO_OUTPUT = RowOutput(torch.empty(0, 0))


def pair(seconds: float, confidence: float = 0.8) -> tuple[AutoDrafter, Clock, Stub, Stub]:
    clock = Clock()
    lookup, model = Stub(clock, LOOKUP, 0.001, confidence), Stub(clock, MODEL, seconds)
    return AutoDrafter({"lookup": lookup}, {"model": model}, clock), clock, lookup, model


def test_a_good_lookup_goes_before_a_model_and_a_poor_one_does_not() -> None:
    drafter, clock, _, _ = pair(seconds=0.5)
    seq = sequence_of()
    drafter.begin(seq, None)
    sources = [play(drafter, clock, seq, {MODEL: 2, LOOKUP: 4}) for _ in range(60)]
    assert sources[-30:].count(LOOKUP) >= 29
    sources = [play(drafter, clock, seq, {MODEL: 3, LOOKUP: 0}) for _ in range(200)]
    assert sources[-60:].count(MODEL) >= 50


@pytest.mark.slow
def test_a_model_that_takes_too_long_is_left_alone_and_tried_again_now_and_then() -> None:
    drafter, clock, _, _ = pair(seconds=20.0)
    seq = sequence_of()
    drafter.begin(seq, None)
    sources = [play(drafter, clock, seq, {MODEL: 4, LOOKUP: 1}) for _ in range(1500)]
    assert 2 <= sources.count(MODEL) <= 12


def test_only_the_chosen_drafter_drafts_and_all_observe() -> None:
    clock = Clock()
    lookup, quick, slow = Stub(clock, LOOKUP, 0.001, 0.3), Stub(clock, 0, 0.1), Stub(clock, 2, 5.0)
    drafter, seq = AutoDrafter({"lookup": lookup}, {"quick": quick, "slow": slow}, clock), sequence_of()
    drafter.begin(seq, None)
    sources = [play(drafter, clock, seq, {0: 3, 1: 0, 2: 3}) for _ in range(80)]
    assert len(quick.lengths) + len(slow.lengths) <= 80 and sources[-40:].count(0) >= 38
    assert quick.observed == slow.observed == lookup.observed == 80


def test_sequences_choose_for_themselves() -> None:
    """The model gains a token or two for both; one of them repeats itself, which a lookup sees."""
    clock = Clock()
    model = Stub(clock, 0, seconds=0.1)
    drafter = AutoDrafter({"suffix": Suffix()}, {"model": model}, clock)
    repeating, fresh = sequence_of(), sequence_of()
    repeating.ids, fresh.ids = [7, 8, 9, 10] * 12, list(range(20, 60))
    for seq in (repeating, fresh):
        drafter.begin(seq, None)
    for _ in range(40):
        play(drafter, clock, fresh, {0: 1, 9: 0})
    trees = drafter.propose([repeating, fresh], [4, 4])
    assert trees[0].tokens.tolist() == [7, 8, 9, 10] and trees[0].source == "suffix"
    assert set(trees[1].tokens.tolist()) == {0} and trees[1].source == "model"


def test_of_two_lookups_the_one_that_was_right_is_followed() -> None:
    """Both state the same confidence; what it means is measured for each."""
    clock = Clock()
    right, wrong = Stub(clock, 1, 0.0, 0.7), Stub(clock, 2, 0.0, 0.7)
    drafter, seq = AutoDrafter({"wrong": wrong, "right": right}, {}, clock), sequence_of()
    drafter.begin(seq, None)
    sources = [play(drafter, clock, seq, {1: 3, 2: 0}) for _ in range(40)]
    assert sources[-30:] == [1] * 30


@dataclass
class Looping(Stub):
    """Takes steps in a row of `seconds` each, the first `start` more; notes whether it was told to end."""

    start: float = 0.0
    accepted: int = 2  # of the draft tokens of a step
    told: list[bool | None] = field(default_factory=list)

    def draft_loop(
        self, target: Any, seqs: list[Sequence], num_draft_tokens: list[int], num_steps: int
    ) -> LoopedSteps | None:
        return self._steps(num_steps, len(seqs))

    def _steps(self, num_steps: int, num_seqs: int) -> LoopedSteps:
        self.clock.now += self.start
        for _ in range(num_steps):
            self.clock.now += self.seconds
            verified = VerifyResult(list(range(self.accepted)), 8, [0] * self.accepted)
            self.told.append((yield [LoopedStep([0] * 9, verified)] * num_seqs))


@pytest.mark.parametrize(
    ("length", "start", "ends"),
    [(3, 0.1, False), (16, 0.1, True), (19, 11.0, True), (16, 11.0, False), (19, 30.0, False)],
    ids=["the step under way has it", "a long one", "what follows is asked for too", "not worth it", "slow starts"],
)
def test_a_lookup_ends_steps_in_a_row_for_what_lies_behind_the_one_under_way(
    length: int, start: float, ends: bool
) -> None:
    clock = Clock()
    lookup, model = Stub(clock, LOOKUP, 0.0, 0.5, most=length), Looping(clock, MODEL, 1.2, start=start)
    drafter, seq = AutoDrafter({"lookup": lookup}, {"model": model}, clock), sequence_of()
    value = DraftValue(CostModel(CostCurve({width: 1.0 + 0.01 * width for width in range(1, 18)})))
    drafter.use_value(value)
    drafter.begin(seq, None)
    for _ in range(9):
        value.record(seq, "model").stats.of(1).add(2.0, 0.2)
    steps = drafter.draft_loop(ToyRunner(), [seq], [16], 4)
    assert steps is not None, "the model is better than a lookup of even chances"
    next(steps)
    steps.send(None)  # how slowly it starts is known from the second step on
    lookup.confidence = 0.99
    steps.send(None)
    assert model.told == [False, ends]


def looping_auto(seq: Sequence, start: float) -> AutoDrafter:
    """A model that usually brings two tokens for a fifth of a step, and whose steps in a row start slowly."""
    clock = Clock()
    model = Looping(clock, MODEL, 1.2, start=start)
    drafter = AutoDrafter({"lookup": Stub(clock, LOOKUP, 0.0, 0.01)}, {"model": model}, clock)
    value = DraftValue(CostModel(CostCurve({width: 1.0 + 0.01 * width for width in range(1, 18)})))
    drafter.use_value(value)
    drafter.begin(seq, None)
    for _ in range(9):
        value.record(seq, "model").stats.of(1).add(2.0, 0.2)
    return drafter


def test_how_slowly_steps_in_a_row_start_is_not_learnt_where_a_prompt_is_read_first() -> None:
    seq = sequence(list(range(40)), 10_000)
    drafter = looping_auto(seq, 30.0)
    restarts = []
    for _ in range(2):
        steps = drafter.draft_loop(ToyRunner(), [seq], [8], 4)
        assert steps is not None and drafter._shared is not None and len(list(steps)) == 4
        restarts.append(drafter._shared.turns["model"].restart)
    assert restarts == [0.0, pytest.approx(30.0)]


@pytest.mark.parametrize(("num_steps", "loops"), [(50, True), (2, False)])
def test_steps_in_a_row_that_start_slowly_must_be_many(num_steps: int, loops: bool) -> None:
    seq = sequence_of()
    drafter = looping_auto(seq, 8.0)
    for _ in range(12):
        steps = drafter.draft_loop(ToyRunner(), [seq], [8], num_steps)
        if steps is not None:
            assert len(list(steps)) == num_steps
    assert (drafter.draft_loop(ToyRunner(), [seq], [8], num_steps) is not None) == loops


@pytest.mark.parametrize(("easy", "stays"), [(8, True), (2, False)], ids=["easy for both", "for lookups alone"])
def test_steps_in_a_row_go_on_where_what_lookups_know_is_easy_for_the_model_too(easy: int, stays: bool) -> None:
    """One step of five lies where the lookup is nearly certain of ten tokens. There the model brings more than usual,
    or does not."""
    clock = Clock()
    lookup, model = Stub(clock, LOOKUP, 0.0, 0.01, most=10), Looping(clock, MODEL, 1.2)
    drafter, seq = AutoDrafter({"lookup": lookup}, {"model": model}, clock), sequence_of()
    value = DraftValue(CostModel(CostCurve({width: 1.0 + 0.01 * width for width in range(1, 18)})))
    drafter.use_value(value)
    drafter.begin(seq, None)
    usual = value.record(seq, "model").stats.of(1)
    for _ in range(9):
        usual.add(2.0, 0.2)
    steps = drafter.draft_loop(ToyRunner(), [seq], [10], 100)
    assert steps is not None
    next(steps)
    for step in range(96):
        is_easy = step % 5 == 0
        lookup.confidence, model.accepted = (0.99, easy) if is_easy else (0.01, 2)
        steps.send(None)
        usual.add(float(model.accepted), 0.2)
    assert model.told[0], "what was easy so far is not known"
    assert model.told[-1] is not stays


def test_needs_are_joined_and_names_are_checked() -> None:
    clock = Clock()
    assert AutoDrafter({"suffix": Suffix()}, {}).needs == {Capability.TREE}
    with pytest.raises(OptionError, match="name of its own"):
        AutoDrafter({"suffix": Suffix()}, {"suffix": Stub(clock)})


def auto_with_a_draft_model() -> AutoDrafter:
    """Real drafters; the clock does not move, so the choice depends on acceptance alone, in every run."""
    draft = DraftModel(TableRunner(4, order=2, seed=5, blur=0.4), 4)
    return AutoDrafter({"suffix": Suffix()}, {"draft_model": draft}, Clock())


def test_greedy_outputs_are_unchanged() -> None:
    check_greedy(auto_with_a_draft_model())
    check_greedy(AutoDrafter({"suffix": Suffix()}, {}))


@pytest.mark.slow
def test_sampled_outputs_have_the_right_distribution() -> None:
    check_sampled(auto_with_a_draft_model())


@pytest.mark.slow
def test_lookups_draft_beside_the_draft_model(tiny_model: Any, tiny_folder: Path) -> None:
    target = HuggingFaceRunner(tiny_model, "tiny")
    for draft_model, names in ((str(tiny_folder), ["draft_model"]), (None, [])):
        drafter = build_drafter("auto", context_for(target, draft_model))
        assert isinstance(drafter, AutoDrafter) and list(drafter.others) == names
        assert list(drafter.lookups) == ["prediction", "suffix"]
        assert (drafter.draft_runner is None) == (draft_model is None)
        assert assert_unchanged(target, drafter, [[5, 7, 9, 5, 7, 9, 5, 7]], 60, 4).accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dflash", "eagle"])
def test_a_head_that_the_user_names_drafts_beside_the_lookups(method: str, default_folder: Path) -> None:
    head = shipped_head(method, DIRECTORY)
    assert head is not None
    with SpeculativeDecoder(str(default_folder), method="auto", draft_model=str(head), dtype="int8") as decoder:
        named = decoder.generate("Count from one to ten in words:", max_new_tokens=32, temperature=0.0)
    with SpeculativeDecoder(str(default_folder), method="none", dtype="int8") as decoder:
        plain = decoder.generate("Count from one to ten in words:", max_new_tokens=32, temperature=0.0)
    assert named.token_ids == plain.token_ids and named.stats.drafted > 0


def test_sequences_that_have_ended_are_not_looked_up_again_in_steps_in_a_row() -> None:
    """What a drafter has let go of would come back, and nobody would let go of it again."""
    clock, suffix = Clock(), Suffix()
    model = Looping(clock, MODEL, 1.2)
    drafter = AutoDrafter({"suffix": suffix}, {"model": model}, clock)
    value = DraftValue(CostModel(CostCurve({width: 1.0 + 0.01 * width for width in range(1, 18)})))
    drafter.use_value(value)
    ended, running = sequence(list(range(12)), 1), sequence(list(range(20, 32)), 1000)
    for seq in (ended, running):
        drafter.begin(seq, None)
        for _ in range(9):
            value.record(seq, "model").stats.of(2).add(2.0, 0.2)
    steps = drafter.draft_loop(ToyRunner(), [ended, running], [4, 4], 4)
    assert steps is not None
    next(steps)
    ended.extend([5], 0)
    drafter.end(ended)
    for _ in range(3):
        next(steps)
    assert drafter._shared is not None and ended.seq_id not in suffix._states
    assert set(drafter._shared._promised) == set(drafter._shared.turns["model"].read) == {running.seq_id}


def test_a_drafter_whose_steps_in_a_row_were_cut_short_gets_long_ones_again() -> None:
    """Short outputs leave few steps in a row, which do not earn a slow start. Probes alone must end that."""
    seq = sequence_of()
    drafter = looping_auto(seq, 8.0)
    chooser = drafter._shared
    assert chooser is not None
    for _ in range(12):
        if (steps := drafter.draft_loop(ToyRunner(), [seq], [8], 2)) is not None:
            list(steps)
    turns = chooser.turns["model"]
    assert turns.cost_of_beginning(seq) > 1.8, "more than it brings"
    for _ in range(6):
        turns.probed = seq.seq_id
        chooser.loop_ended("model", 3)
    assert turns.cost_of_beginning(seq) < 1.2


def test_a_sequence_that_nothing_was_proposed_for_is_observed_all_the_same() -> None:
    """A request without draft tokens beside a fixed number of them."""
    drafter, seq = AutoDrafter({"lookup": Stub(Clock(), LOOKUP)}, {}, Clock()), sequence_of()
    drafter.begin(seq, None)
    drafter.observe([seq], [StepResult(draft_tree.empty(), VerifyResult([], 1), NO_OUTPUT, [1])])
    drafter.end(seq)
