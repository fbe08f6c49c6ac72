"""The drafter that earns the most per second, chosen from the past alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.types import Capability, RowOutput, StepResult, VerifyResult
from paceline.drafting.auto import LOOKUP, RETRY, AutoDrafter, Trust
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.suffix import Suffix
from paceline.drafting.suffix_automaton import Forecast
from paceline.errors import OptionError
from paceline.runners.table import TableRunner
from tests.support.drafter_exactness import check_greedy, check_sampled


@dataclass
class Clock:
    """Time that passes only when told."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Stub:
    """DraftOutput zeros, takes some seconds, and remembers what it was asked."""

    clock: Clock
    seconds: float = 0.0
    expected: float = 0.0
    needs: frozenset[Capability] = frozenset()
    asked: list[list[int]] = field(default_factory=list)
    observed: int = 0

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        pass

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        self.asked.append(num_draft_tokens)
        self.clock.now += self.seconds if any(num_draft_tokens) else 0.0
        return [draft_tree.chain([0] * budget) for budget in num_draft_tokens]

    def forecast(self, seq: Sequence, budget: int) -> Forecast:
        return Forecast(draft_tree.chain([1] * budget), self.expected)

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        self.observed += 1

    def end(self, seq: Sequence) -> None:
        pass


def text_of() -> Sequence:
    return Sequence([1], SamplingParams(), StopRules(1000))


def play(drafter: AutoDrafter, clock: Clock, seq: Sequence, stands: dict[int, int]) -> str:
    """One round of 4 guesses, a pass of one second; `stands`: how many guesses of each kind are accepted."""
    from_draft = drafter.propose([seq], [4])[0]
    clock.now += 1.0
    accepted = stands[int(from_draft.tokens[0])]
    verified = VerifyResult(list(range(accepted)), 0)
    drafter.observe([seq], [StepResult(from_draft, verified, RowOutput(torch.zeros(5, 2)), [0] * (accepted + 1), accepted)])
    return "lookup" if int(from_draft.tokens[0]) else "model"


def test_a_good_forecast_goes_before_a_model_and_a_poor_one_does_not() -> None:
    clock = Clock()
    lookup, model = Stub(clock, expected=3.5), Stub(clock, seconds=0.5)
    drafter, seq = AutoDrafter(lookup, {"model": model}, clock), text_of()
    drafter.begin(seq, None)
    kinds = [play(drafter, clock, seq, {0: 2, 1: 4}) for _ in range(10)]
    assert kinds[-5:] == ["lookup"] * 5
    lookup.expected = 0.1
    kinds = [play(drafter, clock, seq, {0: 2, 1: 0}) for _ in range(10)]
    assert kinds[-5:] == ["model"] * 5


def test_a_model_that_takes_too_long_is_left_alone_and_tried_again_now_and_then() -> None:
    clock = Clock()
    lookup, model = Stub(clock, expected=0.5), Stub(clock, seconds=20.0)
    drafter, seq = AutoDrafter(lookup, {"model": model}, clock), text_of()
    drafter.begin(seq, None)
    kinds = [play(drafter, clock, seq, {0: 4, 1: 1}) for _ in range(3 * RETRY)]
    assert 2 <= kinds.count("model") <= 4


def test_forecasts_that_prove_empty_are_trusted_less() -> None:
    clock = Clock()
    lookup, model = Stub(clock, expected=3.0), Stub(clock, seconds=0.1)
    drafter, seq = AutoDrafter(lookup, {"model": model}, clock), text_of()
    drafter.begin(seq, None)
    kinds = [play(drafter, clock, seq, {0: 2, 1: 0}) for _ in range(30)]
    assert kinds.count("model") > 20
    trust = Trust()
    trust.add(0, 3)
    low = trust.value
    for _ in range(50):
        trust.add(0, 0)
    assert low < 0.5 < 0.95 < trust.value


def test_only_the_chosen_drafter_guesses_and_all_stay_in_step() -> None:
    clock = Clock()
    lookup, one, two = Stub(clock), Stub(clock, seconds=0.1), Stub(clock, seconds=5.0)
    drafter, seq = AutoDrafter(lookup, {"one": one, "two": two}, clock), text_of()
    drafter.begin(seq, None)
    for _ in range(12):
        play(drafter, clock, seq, {0: 2, 1: 0})
    assert all(first[0] + second[0] <= 4 for first, second in zip(one.asked, two.asked))
    assert sum(sum(stub.asked[-1]) for stub in (one, two)) == 4
    assert one.observed == two.observed == lookup.observed == 12


def test_texts_choose_for_themselves() -> None:
    clock = Clock()
    lookup, model = Suffix(), Stub(clock, seconds=0.1)
    drafter = AutoDrafter(lookup, {"model": model}, clock)
    repeating, fresh = text_of(), text_of()
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


def combined_with_a_draft() -> AutoDrafter:
    """Real drafters; time stands still, so the choice is made by what was accepted and is the same in every run."""
    draft = DraftModel(TableRunner(4, order=2, seed=5, blur=0.4), 4)
    return AutoDrafter(Suffix(), {"draft": draft}, Clock())


def test_greedy_texts_are_unchanged() -> None:
    check_greedy(combined_with_a_draft())
    check_greedy(AutoDrafter(Suffix(), {}))


def test_sampled_texts_have_the_right_distribution() -> None:
    check_sampled(combined_with_a_draft())


def test_method_auto_puts_a_lookup_beside_the_draft(tiny_folder: Path) -> None:
    prompt = "to be or not to be, to be or not, to be or"
    output = [
        SpeculativeDecoder(str(tiny_folder), draft, method=method, num_draft_tokens=4).generate(prompt, max_new_tokens=60)
        for method, draft in (("none", None), ("auto", str(tiny_folder)), ("auto", None))
    ]
    assert output[0].token_ids == output[1].token_ids == output[2].token_ids
    assert output[1].stats.accepted > 0 and output[2].stats.accepted > 0
