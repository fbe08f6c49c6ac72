"""Every text its own method, in one batch."""

from __future__ import annotations

import pytest

from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.types import Capability
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.ngram import Ngram
from paceline.drafting.no_draft import NoDraft
from paceline.drafting.prediction import Prediction
from paceline.drafting.router import DrafterRouter
from paceline.drafting.suffix import Suffix
from paceline.errors import OptionError
from paceline.runners.table import TableRunner
from tests.support.drafter_exactness import check_greedy, check_sampled, written_by


def every_method(blur: float = 0.3) -> DrafterRouter:
    draft = DraftModel(TableRunner(4, order=2, seed=5, blur=blur), 4)
    offered = {"none": NoDraft(), "ngram": Ngram(), "suffix": Suffix(), "draft": draft, "prediction": Prediction()}
    return DrafterRouter(offered, "ngram")


def text_of(method: str | None, prediction: list[int] | None = None) -> Sequence:
    seq = Sequence([1, 2, 3, 1, 2], SamplingParams(), StopRules(100))
    seq.params.method, seq.params.prediction = method, prediction
    return seq


def test_every_text_gets_the_guesses_of_its_own_method_in_its_own_place() -> None:
    drafter = every_method()
    seqs = [text_of("none"), text_of(None), text_of(None, [9, 8]), text_of("suffix"), text_of("none")]
    for seq in seqs:
        drafter.begin(seq, None)
    found = [tree.tokens.tolist() for tree in drafter.propose(seqs, [2] * 5)]
    assert found == [[], [3, 1], [9, 8], [3, 1], []]


def test_a_named_method_goes_before_a_prediction() -> None:
    assert every_method().method_of(text_of("suffix", [1])) == "suffix"


def test_without_a_prediction_drafter_the_default_drafts() -> None:
    assert DrafterRouter({"ngram": Ngram()}, "ngram").method_of(text_of(None, [1])) == "ngram"


def test_an_unknown_method_is_refused_by_name_and_leaves_nothing_behind() -> None:
    drafter = every_method()
    with pytest.raises(OptionError, match="'eagle' is not offered here; there is none, ngram"):
        drafter.begin(text_of("eagle"), None)
    drafter.end(text_of("eagle"))
    with pytest.raises(OptionError, match="default"):
        DrafterRouter({"none": NoDraft()}, "ngram")


def test_it_needs_what_any_of_them_needs() -> None:
    assert DrafterRouter({"none": NoDraft(), "suffix": Suffix()}, "none").needs == {Capability.TREE}


def test_a_draft_model_beside_other_methods_keeps_its_cache_in_step() -> None:
    seqs = written_by(every_method(blur=0), methods=("draft", "none", "suffix"))
    assert seqs[0].stats.acceptance_rate == 1.0, "the draft is the target itself"


def test_greedy_texts_are_unchanged() -> None:
    check_greedy(every_method(), methods=("draft", "ngram", "suffix"))


def test_sampled_texts_have_the_right_distribution() -> None:
    check_sampled(every_method(), methods=("ngram", "none", "suffix"))
