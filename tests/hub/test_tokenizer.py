"""Ids <-> characters: no half characters, nothing of a stop string, no surprises in prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from paceline.errors import ModelError, PromptError
from paceline.hub.tokenizer import Tokenizer, load_tokenizer
from tests.support.tiny import byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer())
WORDS = st.text(st.sampled_from("abcé€😀 \n"), max_size=30)


def streamed(text: str, stops: tuple[str, ...] = ()) -> list[str]:
    stream = TOKENIZER.stream(stops)
    outputs = [stream.feed([token]) for token in TOKENIZER.encode(text)]
    return [*outputs, stream.flush()]


@pytest.mark.slow
@given(WORDS.filter(bool))
def test_pieces_join_to_the_text_without_half_characters(text: str) -> None:
    outputs = streamed(text)
    assert "".join(outputs) == text
    assert all("�" not in output for output in outputs)


@pytest.mark.slow
@given(WORDS.filter(bool), st.text(st.sampled_from("abc"), min_size=1, max_size=3))
def test_nothing_of_a_stop_string_is_shown(text: str, stop: str) -> None:
    assert "".join(streamed(text, (stop,))) == text.split(stop)[0]


def test_what_might_be_a_stop_string_is_held_back() -> None:
    stream = TOKENIZER.stream(("abc",))
    assert [stream.feed(TOKENIZER.encode(character)) for character in "xabd"] == ["x", "", "", "abd"]


HIDDEN = 7


@pytest.mark.parametrize("ids", [[3, HIDDEN, 4, 5], [HIDDEN, 3, 4], [3, 4, HIDDEN, HIDDEN, 5], [3, HIDDEN, HIDDEN]])
def test_a_space_behind_a_hidden_token_is_not_lost(ids: list[int]) -> None:
    """Decoders of SentencePiece models strip the first space of what they are given."""
    words = ["<unk>", "<s>", "</s>", "▁Hello", "▁world", "▁again", "!"]
    bpe = models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], unk_token="<unk>")
    model = tokenizers.Tokenizer(bpe)
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(steps)
    model.add_special_tokens(["<s>", "</s>", "[TOOL_CALLS]"])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>"))
    stream = tokenizer.stream()
    assert "".join(stream.feed([token]) for token in ids) + stream.flush() == tokenizer.decode(ids)


def test_chat_messages_go_through_the_template() -> None:
    ids = TOKENIZER.encode([{"role": "user", "content": "hi"}])
    assert TOKENIZER.hf_tokenizer.decode(ids) == "<s>user: hi</s><s>assistant: "


@pytest.mark.parametrize("prompt", ["", [], None, 7, [1, "a"], [{}], "half \ud800"])
def test_what_is_no_prompt(prompt: object) -> None:
    with pytest.raises(PromptError):
        TOKENIZER.encode(prompt)  # type: ignore[arg-type]


def test_a_model_without_a_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match="no chat template"):
        Tokenizer(tokenizer).encode([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("files", [(), ("tokenizer.json",)])
def test_a_tokenizer_that_cannot_be_read_says_which_files_are_missing_or_what_is_wrong(
    tmp_path: Path, files: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for file in files:
        (tmp_path / file).write_text("{ damaged JSON")
    with pytest.raises(ModelError, match="small has no usable tokenizer") as raised:
        load_tokenizer(tmp_path, "small")
    assert "\n" not in str(raised.value)
    assert ("has none of its files, tokenizer.json" in str(raised.value)) is not bool(files)
