"""`paceline train` said wrongly, and what it shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.train import told
from paceline.errors import OptionError
from paceline.train.loop import History, Measurement, TrainingProgress
from paceline.train.report import Facts, plot, write_card
from paceline.train.run import ON_CPU, ON_GPU, TrainOptions
from tests.train.conftest import arguments


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["eagle", "--layer", "2"], "--layer is not for eagle; it takes --width, --vocabulary, --unroll"),
        (["exit", "--vocabulary", "9"], "--vocabulary is not for exit"),
        (["medusa", "--steps", "-1"], "--steps cannot be -1"),
        (["draft", "--resume"], "holds no training to resume"),
        (["exit", "--target", "TARGET", "--layer", "4", "--texts", "TEXTS", "--tokens", "1"], "after layer 1 to 3"),
        (["draft", "--target", "TARGET", "--width", "30", "--texts", "TEXTS", "--tokens", "1"], "that 8 divides"),
        (["eagle", "--target", "TARGET", "--data", "none.jsonl"], "none.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_is_said_and_exits_2(
    words: list[str], output: str, tmp_path: Path, target_folder: Path, texts_folder: Path, train: Callable[..., Any]
) -> None:
    places = {"TARGET": str(target_folder), "TEXTS": str(texts_folder)}
    status, shown = train(*(places.get(word, word) for word in words), "--out", tmp_path / "out")
    assert status == 2
    assert output in shown.err and shown.err.count("\n") < 6


def test_progress_is_told_where_there_is_no_terminal(
    target_folder: Path, texts_folder: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    data = tmp_path / "my.jsonl"
    data.write_text("".join(json.dumps({"text": letter * 40 + "!"}) + "\n" for letter in "abcdefgh"))
    words = ["--target", target_folder, "--data", data, "--steps", 2, "--batch-tokens", 256, "--minutes", 5]
    status, shown = train("exit", "--out", tmp_path / "out", *words)
    assert status == 0
    assert "training exit on 7 texts, 1 held out" in shown.err and "step 1, loss" in shown.err
    assert "2 steps" in shown.out and "model.safetensors" in shown.out
    assert "my.jsonl" in (tmp_path / "out" / "README.md").read_text()
    status, shown = train("medusa", "--out", tmp_path / "out", "--resume")
    assert status == 2 and "holds a training of exit, not of medusa" in shown.err
    status, shown = train("exit", "--out", tmp_path / "out", *words, "--overwrite")
    assert status == 0, "the same data, found again"


def test_a_reduced_vocabulary_is_written_in_the_layouts_that_know_it(
    target_folder: Path, texts_folder: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    from transformers import AutoModelForCausalLM

    from paceline.heads.medusa import MedusaHeads
    from paceline.heads.registry import load_head

    words = arguments(target_folder, texts_folder, 2)
    assert train("medusa", "--out", tmp_path / "heads", *words, "--vocabulary", 40, "--heads", 2)[0] == 0
    for place in (tmp_path / "heads", tmp_path / "heads" / "vllm"):
        assert load_head(place, MedusaHeads).config.draft_vocab_size == 40
    sizes = ("--vocabulary", 100, "--width", 16, "--layers", 1)
    assert train("draft", "--out", tmp_path / "draft", *words, *sizes)[0] == 0
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert draft.get_output_embeddings().weight.shape == (100, 16)


def test_amounts_are_filled_in_by_device_and_minutes_lift_the_limit_of_steps() -> None:
    plain = TrainOptions("eagle", "out")
    assert plain.usual("cuda").batch_tokens == ON_GPU.batch_tokens
    assert plain.usual("cpu").steps == ON_CPU.steps
    assert TrainOptions("eagle", "out", minutes=1).usual("cpu").steps > 10**8
    assert TrainOptions("eagle", "out", minutes=1, steps=9).usual("cpu").steps == 9
    assert TrainOptions("eagle", "out", tokens=5).usual("cuda").usual("cuda").tokens == 5
    with pytest.raises(OptionError, match="eagle, medusa, draft, exit"):
        TrainOptions("llama", "out")


def test_a_line_of_progress_holds_everything() -> None:
    line = told(TrainingProgress(12, 0.5, 1.25, 1e-3, 4096.0, 3725.0, Measurement(10, 1.9, [0.6, 0.3])))
    assert line == "step 12, loss 1.250, 4096 tokens/s, 1:02:05 left; held out 1.90 tokens a pass (60% 30%)"


def test_a_card_of_a_training_without_steps_and_a_curve_are_written(tmp_path: Path) -> None:
    write_card(tmp_path, Facts("eagle", "tiny", "none", 10, {}, {"code": 2.0}), History())
    assert "Further results" in (tmp_path / "README.md").read_text()
    history = History([2.0, 1.0], [Measurement(0, 1.0, [0.0]), Measurement(2, 1.5, [0.5])], 10, 1.0)
    assert plot(history, tmp_path / "curve.png") and (tmp_path / "curve.png").is_file()
