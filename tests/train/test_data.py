"""Data files and texts the target writes: what is read, what is answered, what a second run finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import OptionError
from paceline.train import collect as collecting
from paceline.train import data
from paceline.train.batch_generator import Plan
from paceline.train.collect import CollectOptions, collect, template_of
from paceline.train.corpus import Corpus, Text, shards
from paceline.train.data import Line, Reader, collect_from, read_lines
from paceline.train.seeds import Library
from tests.support.tiny import byte_tokenizer

OPTIONS = CollectOptions(tokens=400, rows=4, longest=96, seed=1)
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "so"}]


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def texts(corpus: Corpus) -> list[list[int]]:
    offsets = corpus.offsets
    return [corpus.tokens[offsets[index] : offsets[index + 1]].tolist() for index in range(len(corpus))]


def test_what_is_learnt_of_a_conversation_starts_with_its_first_answer() -> None:
    tokenizer = byte_tokenizer()
    found = Reader(tokenizer, 96, 0).read(Line("", {"messages": TALK[:2]}))
    assert isinstance(found, Text)
    assert tokenizer.decode(found.tokens[found.start :]).startswith("hello")


def test_a_conversation_without_an_answer_and_a_prompt_are_questions() -> None:
    reader = Reader(byte_tokenizer(), 96, 0)
    assert isinstance(reader.read(Line("", {"messages": TALK})), Plan)
    asked = reader.read(Line("", {"prompt": "hi"}))
    assert isinstance(asked, Plan)
    assert byte_tokenizer().decode(asked.prompt) == "<s>user: hi</s><s>assistant: "
    assert reader.read(Line("", {"prompt": "x" * 90})) is None, "no room for an answer"


@pytest.mark.parametrize(
    ("line", "output"),
    [
        ("{not json", "line 2: not JSON"),
        ('{"question": 1}', 'line 2: an object with "messages", "text" or "prompt" is needed'),
        ('{"text": ""}', "line 2: the prompt is empty"),
        ('{"messages": [{"content": "hi"}]}', "line 2"),
        ('{"messages": "hi"}', "line 2"),
    ],
)
def test_a_bad_line_is_named(line: str, output: str, tmp_path: Path, target_model: Any) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(OptionError, match=output):
        collect_from(path, target_model, byte_tokenizer(), tmp_path / "texts", OPTIONS)


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        read_lines(tmp_path / "none.jsonl")
    with pytest.raises(OptionError, match="is empty"):
        read_lines(write(tmp_path / "empty.jsonl"))


def test_a_file_is_read_once_and_a_killed_run_goes_on_behind_the_last_shard(
    tmp_path: Path, target_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "LINES_A_SHARD", 2)
    path = write(tmp_path / "my.jsonl", {"text": "abcd"}, {"prompt": "a"}, {"prompt": "b"}, {"text": "efgh"})
    folder = tmp_path / "texts"
    whole = collect_from(path, target_model, byte_tokenizer(), folder, OPTIONS)
    assert len(shards(folder)) == 2 and len(whole) == 4
    shards(folder)[1].unlink()
    assert sorted(texts(collect_from(path, target_model, byte_tokenizer(), folder, OPTIONS))) != []
    monkeypatch.setattr(data, "Writer", None)  # nothing is left to write
    again = collect_from(path, target_model, byte_tokenizer(), folder, OPTIONS)
    assert len(again) == 4 and texts(again)[:2] == texts(whole)[:2]
    with pytest.raises(OptionError, match="other data"):
        collect_from(write(path, {"text": "else"}), target_model, byte_tokenizer(), folder, OPTIONS)


# --- the target writes its own ----------------------------------------------------------------------------------------


@pytest.fixture
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the whole standard library takes seconds and is not what is tested here."""
    monkeypatch.setattr(
        "paceline.train.seeds.library", lambda: Library(('def f():\n    """Say f."""\n',), ("A passage.",))
    )


@pytest.mark.usefixtures("small_library")
def test_the_target_writes_as_much_as_is_asked_and_a_second_run_only_the_rest(
    tmp_path: Path, target_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = collect(target_model, byte_tokenizer(), tmp_path, OPTIONS)
    assert first.answer_tokens >= 0.9 * OPTIONS.tokens
    assert len({tuple(text) for text in texts(first)}) == len(first)
    assert first.lengths.max() <= 96
    more = collect(target_model, byte_tokenizer(), tmp_path, CollectOptions(800, rows=4, longest=96, seed=1))
    assert texts(more)[: len(first)] == texts(first) and more.answer_tokens > first.answer_tokens
    monkeypatch.setattr(collecting, "Writer", None)
    again = collect(target_model, byte_tokenizer(), tmp_path, OPTIONS)
    assert texts(again) == texts(more)


@pytest.mark.usefixtures("small_library")
def test_texts_of_two_targets_are_not_mixed(tmp_path: Path, target_model: Any, tiny_model: Any) -> None:
    collect(target_model, byte_tokenizer(), tmp_path, OPTIONS)
    with pytest.raises(OptionError, match="another target"):
        collect(tiny_model, byte_tokenizer(), tmp_path, CollectOptions(100_000, rows=4, longest=96))


def test_a_chat_template_is_taken_apart_and_a_model_without_one_continues_texts() -> None:
    tokenizer = byte_tokenizer()
    found = template_of(tokenizer)
    assert found is not None and found.before == "<s>user: "
    assert tokenizer.decode(found.after) == "</s><s>assistant: "
    tokenizer.chat_template = None
    assert template_of(tokenizer) is None


def test_an_error_of_the_planner_reaches_whoever_asks() -> None:
    def plans() -> Any:
        yield Plan((1,), 0, 0, (), 0.0, 8)
        raise OptionError("no more")

    ready = collecting.prefetched(plans(), 2)
    assert next(ready).prompt == (1,)
    with pytest.raises(OptionError, match="no more"):
        next(ready)
