"""A prediction of the client: followed, departed from and found again."""

from __future__ import annotations

import pytest

from paceline.core.sequence import Sequence
from paceline.drafting.prediction import Prediction, PredictionCount, prediction_count
from paceline.errors import OptionError
from tests.support.build import sequence
from tests.support.drafter_exactness import check_greedy, check_sampled, greedy_batch


def begun(drafter: Prediction, prediction: list[int] | None) -> Sequence:
    seq = sequence([1, 2], 100, prediction=prediction)
    drafter.begin(seq, None)
    return seq


def draft_tokens(drafter: Prediction, seq: Sequence, num_draft_tokens: int = 3) -> list[int]:
    return list(drafter.propose([seq], [num_draft_tokens])[0].tokens.tolist())


def test_the_prediction_is_drafted_from_start_to_end() -> None:
    drafter = Prediction()
    seq = begun(drafter, [10, 11, 12, 13, 14])
    assert draft_tokens(drafter, seq) == [10, 11, 12]
    seq.ids += [10, 11, 12, 13]
    assert draft_tokens(drafter, seq) == [14]
    seq.ids += [14]
    assert draft_tokens(drafter, seq) == []
    seq.ids += [15, 16]
    assert draft_tokens(drafter, seq) == []


def test_after_a_replaced_token_the_position_is_found_again() -> None:
    drafter = Prediction()
    seq = begun(drafter, [10, 11, 12, 13, 14, 15, 16])
    seq.ids += [10, 99]
    assert draft_tokens(drafter, seq) == []
    seq.ids += [12]
    assert draft_tokens(drafter, seq) == [], "one token could be chance"
    seq.ids += [13]
    assert draft_tokens(drafter, seq) == [14, 15, 16]


def test_of_several_positions_the_first_one_ahead_counts() -> None:
    drafter = Prediction()
    seq = begun(drafter, [10, 11, 20, 30, 31, 40, 10, 11, 21, 10, 11, 22])
    seq.ids += [10, 11, 20, 30, 31, 99]
    assert draft_tokens(drafter, seq) == []
    seq.ids += [10, 11]
    assert draft_tokens(drafter, seq, 1) == [21]


def test_an_output_that_starts_differently_joins_later() -> None:
    drafter = Prediction()
    seq = begun(drafter, [10, 11, 12, 13])
    seq.ids += [50, 51, 10, 11]
    assert draft_tokens(drafter, seq) == [12, 13]


def test_a_sequence_without_a_prediction_gets_no_draft_tokens() -> None:
    drafter = Prediction()
    assert draft_tokens(drafter, begun(drafter, None)) == []
    assert draft_tokens(drafter, begun(drafter, [])) == []


def test_accepted_and_rejected_tokens_are_counted() -> None:
    plain = greedy_batch(Prediction())[0].generated
    followed = greedy_batch(Prediction(), prediction=plain)[0]
    assert prediction_count(followed).rejected == 0
    assert prediction_count(followed).accepted == followed.stats.accepted > 30
    wrong = [(token + 1) % 4 for token in plain]
    rejected = greedy_batch(Prediction(), prediction=wrong)[0]
    assert prediction_count(rejected).rejected > 0
    assert rejected.generated == plain
    assert prediction_count(greedy_batch(Prediction())[0]) == PredictionCount(0, 0)


def test_impossible_options_are_refused() -> None:
    with pytest.raises(OptionError):
        Prediction(longest=1, shortest=2)


def test_greedy_outputs_are_unchanged() -> None:
    check_greedy(Prediction(), prediction=[2, 0, 1, 3, 3, 1, 0, 2, 2, 1] * 6)


@pytest.mark.slow
def test_sampled_outputs_have_the_right_distribution() -> None:
    check_sampled(Prediction(longest=3, shortest=1), prediction=[0, 1, 2, 3, 3, 1, 0, 2, 2, 1] * 20)
