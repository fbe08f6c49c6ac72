"""What draft tokens are worth, and which of them are sent."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.core.confidence import ConfidenceTable
from paceline.core.cost_model import CostCurve, CostModel, StepTiming
from paceline.core.draft_tree import DraftTree, chain, empty, select, with_source
from paceline.core.draft_value import DraftValue
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, StepResult, VerifyResult
from tests.support.build import sequence

NO_OUTPUT = RowOutput(torch.empty(0, 0))


def value_of(slope: float, base: float = 1.0) -> DraftValue:
    return DraftValue(CostModel(CostCurve({width: base + slope * (width - 1) for width in range(1, 20)})))


def sent(value: DraftValue, tree: DraftTree, seq: Sequence | None = None) -> list[int]:
    return value.cut([seq or sequence([1], 100)], [tree]).trees[0].tokens.tolist()


def test_a_draft_is_sent_as_far_as_its_tokens_are_worth_more_than_they_cost() -> None:
    """One more token costs half a step: it is sent while it is accepted more often than that."""
    tree = chain([5, 6, 7, 8], confidence=[0.91, 0.81, 0.81, 0.99])  # survival .93, .75, .61, .60 by the bins' centres
    assert sent(value_of(0.001), tree) == [5, 6, 7, 8]
    assert sent(value_of(0.6), tree) == [5, 6]
    assert sent(value_of(1.0), tree) == []


def test_a_step_in_the_cost_is_spread_over_the_tokens_behind_it() -> None:
    """Width 2 costs half a step more and widths up to 9 cost no more than that: all or nothing, and all pays."""
    value = DraftValue(CostModel(CostCurve({1: 1.0, **dict.fromkeys(range(2, 10), 1.5), 10: 9.0})))
    assert sent(value, chain([1, 2, 3], confidence=[0.45, 0.99, 0.99])) == [1, 2, 3]


def test_a_tree_keeps_the_parents_of_what_is_sent() -> None:
    tree = DraftTree(torch.tensor([1, 2, 3, 4]), [-1, -1, 1, 0], confidence=[0.25, 0.75, 0.91, 0.91])
    kept = value_of(0.5).cut([sequence([1], 100)], [tree]).trees[0]
    assert kept.tokens.tolist() == [2, 3] and kept.parents == [-1, 0] and kept.confidence == [0.75, 0.91]


def test_the_surer_sequence_of_a_batch_gets_the_room() -> None:
    value = value_of(0.3, base=4.0)
    seqs = [sequence([1], 100), sequence([1], 100)]
    trees = [chain([1, 2], confidence=[0.91, 0.91]), chain([3, 4], confidence=[0.11, 0.91])]
    assert [tree.tokens.tolist() for tree in value.cut(seqs, trees).trees] == [[1, 2], []]


def test_what_may_not_be_cut_stays_whole() -> None:
    """Drawn siblings, drafts without a confidence, and the k that a client asked for."""
    probs = torch.full((2, 2), 0.5)
    value, unsure = value_of(5.0), [0.01, 0.01]
    assert sent(value, DraftTree(torch.tensor([0, 1]), [-1, -1], probs, confidence=unsure)) == [0, 1]
    assert sent(value, chain([0, 1])) == [0, 1]
    assert sent(value, chain([0, 1], confidence=unsure), sequence([1], 100, num_draft_tokens=2)) == [0, 1]
    assert sent(value, chain([0, 1], probs, unsure)) == []


def test_a_token_that_was_not_sent_teaches_what_its_confidence_means() -> None:
    """The target's own next token shows whether the first draft token that was held back was right."""
    value, seq = value_of(2.0), sequence([1], 1000)
    tree = chain([5, 6], confidence=[0.55, 0.55])
    assert sent(value, tree) == []
    for _ in range(30):
        value.learn(seq, tree, StepResult(chain([]), VerifyResult([], 5, []), NO_OUTPUT, [5]))
    assert value.record(seq).table.rate(0.55) > 0.8


def test_a_token_that_was_drawn_and_not_sent_teaches_nothing() -> None:
    value, seq, probs = value_of(2.0), sequence([1], 1000), torch.full((2, 9), 1 / 9)
    tree = chain([5, 6], probs, [0.55, 0.55])
    value.learn(seq, tree, StepResult(select(tree, [0]), VerifyResult([0], 6, [5]), NO_OUTPUT, [5, 6]))
    once = ConfidenceTable()
    once.observe(0.55, True)
    assert value.record(seq).table.rate(0.55) == once.rate(0.55)


def test_a_chain_goes_on_while_the_next_token_is_worth_making() -> None:
    value, seq = value_of(0.2), sequence([1], 100)
    value.record(seq).draft.add(1, 0.1)
    assert value.goes_on(seq, [0.91]) and not value.goes_on(seq, [0.45])
    assert not value.goes_on(seq, [0.91] * 20), "survival falls with every token"
    assert value.goes_on(sequence([1], 100, num_draft_tokens=8), [0.01]), "as many as the client asked for"


def test_where_drafts_are_accepted_a_token_is_worth_less_time() -> None:
    value = value_of(0.1)
    assert value.token_seconds(1) == 1.0
    for _ in range(200):
        value.stepped(StepTiming(0.0, 1.3, 4, 3, 1), [step_of("", 3)], draft_seconds=0.0)
    assert value.token_seconds(1) == pytest.approx(1.3 / 4, rel=0.02)


def step_of(source: str, num_accepted: int) -> StepResult:
    """A step whose draft tokens were all accepted."""
    tokens = [5] * num_accepted
    tree = with_source(chain(tokens) if tokens else empty(), source)
    return StepResult(tree, VerifyResult(list(range(num_accepted)), 6, tokens), NO_OUTPUT, [*tokens, 6])


def test_where_lookups_know_nothing_a_token_is_worth_what_it_takes_there() -> None:
    """Half of the steps are looked up and bring eight tokens, the others are plain: a head would save plain steps."""
    value = value_of(0.0)
    value.worth.draft_beside_lookups(["head"])
    plain, drafted = StepTiming(0.0, 1.0, 1, 0, 1, 0), StepTiming(0.5, 1.0, 2, 1, 1)
    for _ in range(200):
        value.stepped(StepTiming(0.0, 1.0, 8, 7, 1), [step_of("lookup", 7)], draft_seconds=0.0)
        value.stepped(plain, [step_of("", 0)], draft_seconds=0.0)
    assert value.token_seconds(1) == value.worth.of("lookup", 1) == pytest.approx(2 / 9, rel=0.03)
    assert value.worth.of("head", 1) == pytest.approx(1.0, rel=0.02)
    for _ in range(200):
        value.stepped(drafted, [step_of("head", 1)], draft_seconds=0.5)
    assert value.worth.of("head", 1) == pytest.approx(1.5 / 2, rel=0.02), "and once it drafts, what it takes itself"


def test_a_source_without_confidences_has_a_best_length_by_depth() -> None:
    value, seq, tree = value_of(0.1), sequence([1], 1000), chain([5, 6, 7, 8])
    for _ in range(60):
        value.learn(seq, tree, StepResult(tree, VerifyResult([0, 1], 3, [5, 6]), NO_OUTPUT, [5, 6, 3]))
    assert value.best_length(seq, 8) == 2


def asked(value: DraftValue, seq: Sequence, sent: int, slope: float, rounds: int = 40) -> int:
    """What a source is asked for of at most 15 draft tokens, after drafts of which `sent` at most were sent."""
    record = value.record(seq)
    for _ in range(rounds):
        length = value.useful_length(seq, 15)
        record.draft.add(length, 0.3 + slope * length)
        record.stats.of(1).add(1.0, 0.1)
        record.depths.observe(length, [0.5] * min(length, sent))
    return value.useful_length(seq, 15)


def test_a_source_is_asked_for_what_is_sent_where_length_takes_time() -> None:
    seq = sequence([1], 1000)
    assert asked(value_of(0.1), seq, sent=3, slope=0.05) in (3, 4)
    assert asked(value_of(0.1), seq, sent=3, slope=0.0) == 15, "one pass, whatever its length"
    assert asked(value_of(0.1), seq, sent=15, slope=0.05) == 15, "all of it is sent"


def test_first_drafts_show_what_a_source_is_worth_at_its_best() -> None:
    """A short one would look poor, and the source might not be asked again for long."""
    value, seq = value_of(0.1), sequence([1], 1000)
    assert [asked(value, seq, sent=1, slope=0.05, rounds=1) for _ in range(3)] == [15, 15, 15]
    assert asked(value, seq, sent=1, slope=0.05, rounds=1) < 15


def test_a_source_that_makes_fewer_than_there_is_room_for_is_asked_for_what_is_sent_too() -> None:
    """A block of 16 rows has 15 draft tokens; a sequence has room for 16."""
    value, seq, lengths = value_of(0.1), sequence([1], 1000), []
    record = value.record(seq)
    for _ in range(30):
        lengths.append(value.useful_length(seq, 16))
        made = min(lengths[-1], 15)
        record.draft.add(made, 0.3 + 0.05 * made)
        record.stats.of(1).add(1.0, 0.1)
        record.depths.observe(made, [0.5] * min(made, 3))
    assert lengths[0] == 16 and lengths[-1] in (3, 4)


def test_a_source_that_was_asked_for_little_is_asked_for_more_when_all_of_it_is_sent() -> None:
    value, seq = value_of(0.1), sequence([1], 1000)
    assert asked(value, seq, sent=2, slope=0.05) <= 5
    assert asked(value, seq, sent=15, slope=0.05, rounds=12) == 15


def test_one_sequence_is_cut_as_in_a_batch() -> None:
    """Beside another one that drafts nothing and costs nothing: the same nodes, tokens and seconds."""
    dice = random.Random(4)
    for _ in range(200):
        passes = {1: 1.0}
        for width in range(2, 20):
            passes[width] = passes[width - 1] + dice.choice((0.0, 0.05, 0.3, 0.9))
        value, count = DraftValue(CostModel(CostCurve(passes))), dice.randrange(1, 9)
        parents = [dice.randrange(-1, node) if node else -1 for node in range(count)]
        confidence = [dice.choice((0.01, 0.3, 0.6, 0.9, 0.99)) for _ in parents]
        seq, tree = sequence([1], 100), DraftTree(torch.arange(count), parents, confidence=confidence)
        nodes = [candidate.node for candidate in value._sent(1, [value.survival(seq, tree)], 1)]
        drafts = value.cut([seq], [tree])
        assert drafts.trees[0].tokens.tolist() == sorted(nodes)
        assert drafts.added == pytest.approx(value._added([len(nodes)]))


def test_a_tree_is_asked_for_whole_although_its_width_was_met_in_slower_single_steps() -> None:
    """15 nodes, some of them alternatives of one depth, which take as long to make whatever their number."""
    value, seq = value_of(0.002), sequence([1], 100)
    parents = [-1, 0, 1, 0, 2, -1, 4, 1, 2, 6, -1, 4, 9, 6, 0]
    for accepted in (4, 3, 5, 2) * 4:
        tree = DraftTree(torch.arange(15), parents, source="head")
        verified = VerifyResult(list(range(accepted)), 1, [1] * accepted)
        value.learn(seq, tree, StepResult(tree, verified, NO_OUTPUT, [1], accepted))
        value.record(seq, "head").drafts.of(1).add(15, 0.2)
        value.costs.verify.add(16, 1.1)
    assert value.best_length(seq, 15, "head") == 15


def test_a_source_is_known_for_sequences_of_another_kind_too() -> None:
    value = value_of(0.01)
    value.record(sequence([1], 100), "head").stats.of(1).add(3.0, 0.2)
    value.record(sequence([1], 100)).stats.of(1).add(3.0, 0.2)
    predicted = sequence([1], 100, prediction=[1, 2])
    assert value.record(predicted, "head").stats.of(1).tokens == 3.0
    assert value.record(predicted).stats.of(1).num_drafts == 0, "without a name it may be another drafter"
