"""Data files and generated data: what is read, what is answered, what a second run reuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.engines.local.engine import LocalEngine
from paceline.errors import OptionError
from paceline.train import data
from paceline.train.collect import CollectOptions, collect, template_parts
from paceline.train.corpus import Corpus, TrainingSequence, shards
from paceline.train.data import DataLine, DataReader, collect_from, read_lines
from paceline.train.engine_writer import EngineWriters
from paceline.train.library_texts import LibraryTexts
from paceline.train.prefetch import prefetched
from paceline.train.sequence_writer import GenerationPlan, answer_plan
from tests.support.tiny import byte_tokenizer
from tests.train.conftest import engine_writers

OPTIONS = CollectOptions(answer_tokens=400, max_num_seqs=4, max_seq_len=96, seed=1)
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "so"}]


def no_writers(model: Any) -> EngineWriters:
    """For data that is complete: building an engine is an error."""

    def build(config: EngineConfig) -> LocalEngine:
        raise AssertionError("nothing is left to generate")

    return EngineWriters(build, model, byte_tokenizer(), OPTIONS)


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def sequences(corpus: Corpus) -> list[list[int]]:
    offsets = corpus.offsets
    return [corpus.tokens[offsets[index] : offsets[index + 1]].tolist() for index in range(len(corpus))]


def test_a_conversation_is_trained_on_from_its_first_answer() -> None:
    tokenizer = byte_tokenizer()
    result = DataReader(tokenizer, 96, 0).read(DataLine("", {"messages": TALK[:2]}))
    assert isinstance(result, TrainingSequence)
    assert tokenizer.decode(result.tokens[result.start :]).startswith("hello")


def test_a_conversation_without_an_answer_and_a_prompt_are_questions() -> None:
    reader = DataReader(byte_tokenizer(), 96, 0)
    assert isinstance(reader.read(DataLine("", {"messages": TALK})), GenerationPlan)
    plan = reader.read(DataLine("", {"prompt": "hi"}))
    assert isinstance(plan, GenerationPlan)
    assert byte_tokenizer().decode(plan.prompt) == "<s>user: hi</s><s>assistant: "
    assert reader.read(DataLine("", {"prompt": "x" * 90})) is None, "no room for an answer"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2: not JSON"),
        ('{"question": 1}', 'line 2: an object with "messages", "text" or "prompt" is needed'),
        ('{"text": ""}', "line 2: the prompt is empty"),
        ('{"messages": [{"content": "hi"}]}', "line 2"),
        ('{"messages": "hi"}', "line 2"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path, target_model: Any) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(OptionError, match=message):
        collect_from(path, engine_writers(target_model), byte_tokenizer(), tmp_path / "sequences", OPTIONS)


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        read_lines(tmp_path / "none.jsonl")
    with pytest.raises(OptionError, match="is empty"):
        read_lines(write(tmp_path / "empty.jsonl"))


@pytest.mark.slow
def test_a_file_is_read_once_and_an_interrupted_run_continues_after_the_last_shard(
    tmp_path: Path, target_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "LINES_PER_SHARD", 2)
    path = write(tmp_path / "my.jsonl", {"text": "abcd"}, {"prompt": "a"}, {"prompt": "b"}, {"text": "efgh"})
    folder = tmp_path / "sequences"
    whole = collect_from(path, engine_writers(target_model), byte_tokenizer(), folder, OPTIONS)
    assert len(shards(folder)) == 2 and len(whole) == 4
    shards(folder)[1].unlink()
    assert sorted(sequences(collect_from(path, engine_writers(target_model), byte_tokenizer(), folder, OPTIONS))) != []
    again = collect_from(path, no_writers(target_model), byte_tokenizer(), folder, OPTIONS)
    assert len(again) == 4 and sequences(again)[:2] == sequences(whole)[:2]
    with pytest.raises(OptionError, match="other data"):
        collect_from(write(path, {"text": "else"}), engine_writers(target_model), byte_tokenizer(), folder, OPTIONS)


# --- generated data -------------------------------------------------------------------------------------------------


@pytest.fixture
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the whole standard library takes seconds and is not what is tested here."""
    function, passage = 'def f():\n    """Say f."""\n', "A passage."
    texts = LibraryTexts((function,), (f"{function}    return 1\n",), (passage,), (passage,))
    for maker in ("seed_makers", "task_makers"):
        monkeypatch.setattr(f"paceline.train.{maker}.library", lambda: texts)


@pytest.mark.usefixtures("small_library")
@pytest.mark.slow
def test_the_target_generates_the_tokens_asked_for_and_a_second_run_only_the_rest(
    tmp_path: Path, target_model: Any
) -> None:
    first = collect(engine_writers(target_model), byte_tokenizer(), tmp_path, OPTIONS)
    assert first.answer_tokens >= 0.9 * OPTIONS.answer_tokens
    assert len({tuple(seq) for seq in sequences(first)}) == len(first)
    assert first.lengths.max() <= 96
    more = collect(
        engine_writers(target_model),
        byte_tokenizer(),
        tmp_path,
        CollectOptions(800, max_num_seqs=4, max_seq_len=96, seed=1),
    )
    assert sequences(more)[: len(first)] == sequences(first) and more.answer_tokens > first.answer_tokens
    again = collect(no_writers(target_model), byte_tokenizer(), tmp_path, OPTIONS)
    assert sequences(again) == sequences(more)


@pytest.mark.usefixtures("small_library")
@pytest.mark.slow
def test_data_of_two_targets_is_not_mixed(tmp_path: Path, target_model: Any, tiny_model: Any) -> None:
    collect(engine_writers(target_model), byte_tokenizer(), tmp_path, OPTIONS)
    with pytest.raises(OptionError, match="another target"):
        collect(
            engine_writers(tiny_model),
            byte_tokenizer(),
            tmp_path,
            CollectOptions(100_000, max_num_seqs=4, max_seq_len=96),
        )


def test_a_chat_template_is_taken_apart_and_a_model_without_one_continues_sequences() -> None:
    tokenizer = byte_tokenizer()
    result = template_parts(tokenizer)
    assert result is not None and result.before == "<s>user: "
    assert tokenizer.decode(result.after) == "</s><s>assistant: "
    tokenizer.chat_template = None
    assert template_parts(tokenizer) is None


def test_an_error_of_the_producer_reaches_the_consumer() -> None:
    def plans() -> Any:
        yield answer_plan([1], 0.0, 8)
        raise OptionError("no more")

    with prefetched(plans(), 2) as ready:
        assert next(ready).prompt == (1,)
        with pytest.raises(OptionError, match="no more"):
            next(ready)
