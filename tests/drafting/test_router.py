"""Every sequence has its own method, in one batch."""

from __future__ import annotations

import pytest

from paceline.core.sequence import Sequence
from paceline.core.types import Capability
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.ngram import Ngram
from paceline.drafting.no_draft import NoDraft
from paceline.drafting.prediction import Prediction
from paceline.drafting.router import DrafterRouter
from paceline.drafting.suffix import Suffix
from paceline.errors import OptionError
from paceline.runners.table import TableRunner
from tests.support.build import sequence
from tests.support.drafter_exactness import check_greedy, check_sampled, greedy_batch


def every_method(blur: float = 0.3) -> DrafterRouter:
    draft = DraftModel(TableRunner(4, order=2, seed=5, blur=blur), 4)
    offered = {
        "none": NoDraft(),
        "ngram": Ngram(),
        "suffix": Suffix(),
        "draft_model": draft,
        "prediction": Prediction(),
    }
    return DrafterRouter(offered, "ngram")


def sequence_of(method: str | None, prediction: list[int] | None = None) -> Sequence:
    return sequence([1, 2, 3, 1, 2], 100, method=method, prediction=prediction)


def test_every_sequence_gets_the_draft_of_its_own_method() -> None:
    drafter = every_method()
    seqs = [
        sequence_of("none"),
        sequence_of(None),
        sequence_of(None, [9, 8]),
        sequence_of("suffix"),
        sequence_of("none"),
    ]
    for seq in seqs:
        drafter.begin(seq, None)
    drafts = [tree.tokens.tolist() for tree in drafter.propose(seqs, [2] * 5)]
    assert drafts == [[], [3, 1], [9, 8], [3, 1], []]


def test_what_is_looked_up_takes_no_drafting_and_a_draft_model_is_not_asked() -> None:
    drafter = every_method()
    seqs = [sequence_of("none"), sequence_of(None), sequence_of(None, [9, 8])]
    for seq in seqs:
        drafter.begin(seq, None)
    found = drafter.look_up(seqs, [2] * 3)
    assert found is not None and [tree.tokens.tolist() for tree in found] == [[], [3, 1], [9, 8]]
    assert drafter.look_up([*seqs, sequence_of("draft_model")], [2] * 4) is None


def test_a_named_method_goes_before_a_prediction() -> None:
    assert every_method().method_of(sequence_of("suffix", [1])) == "suffix"


def test_without_a_prediction_drafter_the_default_drafts() -> None:
    assert DrafterRouter({"ngram": Ngram()}, "ngram").method_of(sequence_of(None, [1])) == "ngram"


def test_an_unknown_method_is_refused_by_name_and_leaves_no_state() -> None:
    drafter = every_method()
    with pytest.raises(OptionError, match="'eagle' is not offered here; there is none, ngram"):
        drafter.begin(sequence_of("eagle"), None)
    drafter.end(sequence_of("eagle"))
    with pytest.raises(OptionError, match="default"):
        DrafterRouter({"none": NoDraft()}, "ngram")


def test_it_needs_what_any_of_them_needs() -> None:
    assert DrafterRouter({"none": NoDraft(), "suffix": Suffix()}, "none").needs == {Capability.TREE}


def test_a_draft_model_beside_other_methods_keeps_its_cache_in_step() -> None:
    seqs = greedy_batch(every_method(blur=0), methods=("draft_model", "none", "suffix"))
    assert seqs[0].stats.acceptance_rate == 1.0, "the draft is the target itself"


def test_greedy_outputs_are_unchanged() -> None:
    check_greedy(every_method(), methods=("draft_model", "ngram", "suffix"))


@pytest.mark.slow
def test_sampled_outputs_have_the_right_distribution() -> None:
    check_sampled(every_method(), methods=("ngram", "none", "suffix"))
