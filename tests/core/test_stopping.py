"""End tokens, stop strings and lengths, also inside an accepted run; and what a text does with them."""

from __future__ import annotations

import torch

from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stopping import Stop, StopRules

LETTERS = "abcdefghij"


def decode(ids: list[int]) -> str:
    return "".join(LETTERS[token] for token in ids)


def test_an_end_token_inside_a_run_cuts_there() -> None:
    assert StopRules(99, frozenset({5})).check([1, 2, 5, 7], fresh=3) == Stop(3, "stop")


def test_only_fresh_tokens_are_looked_at() -> None:
    assert StopRules(99, frozenset({5})).check([5, 1, 2], fresh=2) is None


def test_the_length_cuts_inside_a_run() -> None:
    assert StopRules(3).check([1, 2, 3, 4, 5], fresh=3) == Stop(3, "length")


def test_an_end_token_at_the_last_place_is_a_stop() -> None:
    assert StopRules(3, frozenset({9})).check([1, 2, 9], fresh=1) == Stop(3, "stop")


def test_a_stop_string_over_several_tokens() -> None:
    rules = StopRules(99, stop_strings=("cde",), decode=decode)
    assert rules.check([0, 1, 2, 3], fresh=1) is None
    assert rules.check([0, 1, 2, 3, 4, 5], fresh=2) == Stop(5, "stop")


def text(**rules: object) -> Sequence:
    return Sequence([0, 1], SamplingParams(), StopRules(**{"max_new_tokens": 9, **rules}))  # type: ignore[arg-type]


def test_extend_keeps_what_belongs_to_the_text() -> None:
    one = text(eos_token_ids=frozenset({7}))
    assert one.extend([3, 7, 4], accepted=2) == [3, 7]
    assert (one.finish_reason, one.ids, one.from_draft) == ("stop", [0, 1, 3, 7], [True, True])


def test_room_is_what_may_still_be_written() -> None:
    one = text()
    one.extend([3, 4], accepted=1)
    assert (one.room, one.new_tokens, one.written, one.from_draft) == (7, 2, [3, 4], [True, False])


def test_a_text_without_a_seed_leaves_torchs_generator_in_charge() -> None:
    torch.manual_seed(5)
    first, after = text().seed, torch.rand(())
    torch.manual_seed(5)
    again, after_again = text().seed, torch.rand(())
    assert first == again and after == after_again
    assert text().seed != text().seed
