"""Two vocabularies compared token by token."""

from __future__ import annotations

from paceline.hub.vocabulary import compare
from tests.support.tiny import byte_tokenizer


def test_the_same() -> None:
    found = compare(byte_tokenizer(), byte_tokenizer())
    assert found.same and found.same_template and found.special == ()
    assert found.shared_strings == found.target_size


def test_equal_size_is_not_equal_vocabulary() -> None:
    found = compare(byte_tokenizer(), byte_tokenizer(swapped=4))
    assert (found.target_size, found.draft_size) == (259, 259)
    assert found.differing == 4 and not found.same
    assert [difference.id for difference in found.first] == [0, 1, 2, 3]
    words = found.explained("target", "draft")
    assert "4 of 259" in words and "id 0" in words and "ngram" in words


def test_other_special_tokens_and_template_are_told() -> None:
    other = byte_tokenizer()
    other.pad_token, other.chat_template = "</s>", "another"
    found = compare(byte_tokenizer(), other)
    assert any("pad_token" in line for line in found.special)
    assert not found.same_template
