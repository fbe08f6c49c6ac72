"""How much of its vocabulary a draft model chooses from, by what sequences have written."""

from __future__ import annotations

import pytest

from paceline.core.draft_vocabulary import RECENT_TOKENS, WHOLE_VOCABULARY, draft_vocabulary

QWEN, LLAMA, SMOL = 151_936, 128_256, 49_152  # sizes of vocabularies
QUARTER, HALF = 38_912, 76_800  # of Qwen's, rounded up
END_OF_TURN = 151_645
FREQUENT = [13 * index % 30_000 for index in range(RECENT_TOKENS)]


def with_rare(count: int, token: int) -> list[int]:
    """The last tokens of a sequence, of which so many are rare."""
    return [token] * count + FREQUENT[count:]


def test_a_text_of_frequent_tokens_needs_a_quarter_in_whole_tiles() -> None:
    assert draft_vocabulary(QWEN, [FREQUENT]) == QUARTER
    assert draft_vocabulary(LLAMA, [FREQUENT]) == 32_768
    assert QUARTER % 1024 == HALF % 1024 == 0 and QUARTER >= QWEN / 4 and HALF >= QWEN / 2


@pytest.mark.parametrize(
    ("token", "rows"),
    [(QUARTER - 1, QUARTER), (QUARTER, HALF), (HALF - 1, HALF), (HALF, WHOLE_VOCABULARY), (110_000, WHOLE_VOCABULARY)],
)
def test_many_rare_tokens_need_a_part_that_has_them(token: int, rows: int) -> None:
    assert draft_vocabulary(QWEN, [with_rare(100, token)]) == rows


def test_a_few_tokens_may_be_missed_more_of_them_where_less_is_saved() -> None:
    assert draft_vocabulary(QWEN, [with_rare(5, 100_000)]) == QUARTER
    assert draft_vocabulary(QWEN, [with_rare(6, 100_000)]) == draft_vocabulary(QWEN, [with_rare(8, 100_000)]) == HALF
    assert draft_vocabulary(QWEN, [with_rare(9, 100_000)]) == WHOLE_VOCABULARY
    assert draft_vocabulary(QWEN, [[5, 6, 100_000]]) == WHOLE_VOCABULARY


def test_special_tokens_do_not_count() -> None:
    assert draft_vocabulary(QWEN, [with_rare(100, END_OF_TURN)]) == QUARTER
    assert draft_vocabulary(LLAMA, [with_rare(100, 128_009)]) == 32_768
    short = [END_OF_TURN] * 200 + [100_000] * 3 + FREQUENT[:53]  # nor do they hide what is missed
    assert draft_vocabulary(QWEN, [short]) == WHOLE_VOCABULARY


def test_a_small_vocabulary_is_read_whole() -> None:
    assert draft_vocabulary(SMOL, [[1, 2, 3]]) == draft_vocabulary(65_535, [[1, 2, 3]]) == WHOLE_VOCABULARY
    assert draft_vocabulary(65_536, [[1, 2, 3]]) == 16_384


def test_every_sequence_must_find_its_tokens() -> None:
    assert draft_vocabulary(QWEN, [FREQUENT, with_rare(50, 60_000)]) == HALF
    assert draft_vocabulary(QWEN, [with_rare(50, 100_000), FREQUENT]) == WHOLE_VOCABULARY


def test_only_the_last_tokens_of_a_sequence_matter() -> None:
    assert draft_vocabulary(QWEN, [[100_000] * 500 + FREQUENT]) == QUARTER
