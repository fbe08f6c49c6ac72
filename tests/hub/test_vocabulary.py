"""Two vocabularies compared token by token."""

from __future__ import annotations

from paceline.hub.vocabulary import byte_level_alphabet, compare
from tests.support.tiny import byte_tokenizer


def test_the_same() -> None:
    comparison = compare(byte_tokenizer(), byte_tokenizer())
    assert comparison.same and comparison.same_template and comparison.special == ()
    assert comparison.shared_strings == comparison.target_size


def test_equal_size_is_not_equal_vocabulary() -> None:
    comparison = compare(byte_tokenizer(), byte_tokenizer(swapped=4))
    assert (comparison.target_size, comparison.draft_size) == (259, 259)
    assert comparison.differing == 4 and not comparison.same
    assert [difference.id for difference in comparison.first] == [0, 1, 2, 3]
    message = comparison.explained("target", "draft")
    assert "4 of 259" in message and "id 0" in message and "ngram" in message


def test_other_special_tokens_and_template_are_told() -> None:
    other = byte_tokenizer()
    other.pad_token, other.chat_template = "</s>", "another"
    comparison = compare(byte_tokenizer(), other)
    assert any("pad_token" in line for line in comparison.special)
    assert not comparison.same_template


def test_the_byte_level_alphabet_has_one_character_for_each_byte() -> None:
    alphabet = byte_level_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["A"] == 65 and alphabet["Ġ"] == 32
