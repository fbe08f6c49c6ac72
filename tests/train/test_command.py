"""`paceline train`: wrong arguments, progress, options, files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.train import progress_line
from paceline.errors import OptionError
from paceline.train.collect import CollectOptions, length_buckets
from paceline.train.loop import HeldOutMeasurement, TrainingHistory, TrainingProgress
from paceline.train.options import flags_of
from paceline.train.registry import trainer_names, trainer_spec
from paceline.train.report import DrafterFacts, plot, write_readme
from paceline.train.run import TrainOptions
from tests.train.conftest import small_training

DATA = ["--sequences", "SEQUENCES", "--answer-tokens", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eagle", "--exit-layer", "2"], "unrecognized arguments: --exit-layer"),
        (["exit-adapter", "--draft-vocab-size", "9"], "unrecognized arguments: --draft-vocab-size"),
        (["llama"], "invalid choice: 'llama'"),
        (["medusa", "--steps", "-1"], "--steps cannot be -1"),
        (["medusa", "--steps", "0"], "--steps must be above 0; leave it out for the usual amount"),
        (["medusa", "--minutes", "0"], "--minutes must be above 0"),
        (["eagle", "no/such-model", "--data", "none.jsonl"], "none.jsonl cannot be read"),
        (["dflash", "--optimizer", "sgd"], "there is no optimizer 'sgd'; choose adamw or muon"),
        (["dflash2", "--block-attention", "both"], "--block-attention is bidirectional or causal, not both"),
        (["dflash", "--block-size", "1"], "--block-size is 2 or more"),
        (["dflash", "--greedy-share", "2"], "--greedy-share lies between 0 and 1, not at 2.0"),
        (["eagle", "TARGET", "--continue-from", "nowhere", *DATA], "there is no directory nowhere"),
        (["draft-model", "--resume"], "holds no training to resume"),
        (["exit-adapter", "TARGET", "--exit-layer", "4", *DATA], "after layer 1 to 3"),
        (["draft-model", "TARGET", "--hidden-size", "30", *DATA], "that 8 divides"),
        (["eagle", "TARGET", "--data", "none.jsonl"], "none.jsonl cannot be read"),
    ],
)
def test_impossible_arguments_get_a_clear_error_and_exit_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    target_folder: Path,
    sequences_folder: Path,
    train: Callable[..., Any],
) -> None:
    folders = {"TARGET": str(target_folder), "SEQUENCES": str(sequences_folder)}
    status, output = train(*(folders.get(argument, argument) for argument in arguments), "--out", tmp_path / "out")
    assert status == 2
    assert message in output.err and "Traceback" not in output.err


@pytest.mark.slow
def test_progress_is_printed_where_there_is_no_terminal(
    target_folder: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    data = tmp_path / "my.jsonl"
    data.write_text("".join(json.dumps({"text": letter * 40 + "!"}) + "\n" for letter in "abcdefgh"))
    arguments = [target_folder, "--from", data, "--steps", 2, "--batch-tokens", 256, "--minutes", 5]
    status, output = train("exit-adapter", "--out", tmp_path / "out", *arguments)
    assert status == 0
    assert "training exit-adapter on 7 sequences, 1 held out" in output.err and "step 1, loss" in output.err
    assert "2 steps" in output.out and "model.safetensors" in output.out
    assert "my.jsonl" in (tmp_path / "out" / "README.md").read_text()
    status, output = train("medusa", "--out", tmp_path / "out", "--resume")
    assert status == 2 and "holds a training of exit-adapter, not of medusa" in output.err
    status, output = train("exit-adapter", "--out", tmp_path / "out", *arguments, "--overwrite")
    assert status == 0, "the same data is reused"


@pytest.mark.slow
def test_the_time_left_is_never_negative(
    target_folder: Path, sequences_folder: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    arguments = [target_folder, "--sequences", sequences_folder, "--answer-tokens", 1, "--batch-tokens", 256]
    # The only step ends long after the time has.
    status, output = train("exit-adapter", "--out", tmp_path / "out", *arguments, "--minutes", 1e-6, "--steps", 100000)
    assert status == 0
    assert "0:00 left" in output.err and "-1:" not in output.err


@pytest.mark.slow
def test_the_target_generates_its_data_and_a_second_training_reuses_it(
    target_folder: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    sizes = ["--answer-tokens", 600, "--max-seq-len", 96, "--max-num-seqs", 8, "--steps", 1, "--batch-tokens", 512]
    arguments = [target_folder, "--sequences", tmp_path / "sequences", *sizes]
    status, output = train("exit-adapter", "--out", tmp_path / "first", *arguments)
    assert status == 0 and "generates its training data" in output.err
    shards = {path: path.read_bytes() for path in (tmp_path / "sequences").glob("*.safetensors")}
    assert shards
    assert train("exit-adapter", "--out", tmp_path / "second", *arguments)[0] == 0
    assert {path: path.read_bytes() for path in (tmp_path / "sequences").glob("*.safetensors")} == shards
    assert train("exit-adapter", "--out", tmp_path / "third", *arguments, "--sequences", tmp_path / "again")[0] == 0
    again = {path.name: path.read_bytes() for path in (tmp_path / "again").glob("*.safetensors")}
    assert again == {path.name: content for path, content in shards.items()}, "the same seed generates the same data"


def test_no_sequence_is_longer_than_what_the_target_reads() -> None:
    assert CollectOptions().within(512).max_seq_len == 512
    assert CollectOptions(max_seq_len=96).within(512).max_seq_len == 96
    longest = length_buckets(CollectOptions().within(512), 4)[-1]
    assert longest.max_len == 512 and longest.question_len < 512


@pytest.mark.slow
def test_a_target_with_a_short_context_generates_its_data(
    target_folder: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    """It reads 512 tokens, and the usual length of a sequence is 1,152."""
    sizes = ["--answer-tokens", 600, "--max-num-seqs", 4, "--steps", 1, "--batch-tokens", 512]
    status, output = train("exit-adapter", "--out", tmp_path / "out", target_folder, *sizes)
    assert status == 0, output.err


@pytest.mark.slow
def test_a_reduced_vocabulary_is_written_in_the_layouts_that_support_it(
    target_folder: Path, sequences_folder: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    from transformers import AutoModelForCausalLM

    from paceline.heads.medusa import MedusaHeads
    from paceline.heads.registry import load_head

    arguments = small_training(target_folder, sequences_folder, 2)
    heads, draft = tmp_path / "heads", tmp_path / "draft"
    assert train("medusa", "--out", heads, *arguments, "--draft-vocab-size", 40, "--num-medusa-heads", 2)[0] == 0
    for folder in (heads, heads / "vllm"):
        assert load_head(folder, MedusaHeads).config.draft_vocab_size == 40
    sizes = ("--draft-vocab-size", 100, "--hidden-size", 16, "--num-layers", 1)
    assert train("draft-model", "--out", draft, *arguments, *sizes)[0] == 0
    model = AutoModelForCausalLM.from_pretrained(draft)
    assert model.get_output_embeddings().weight.shape == (100, 16)


def test_amounts_are_filled_in_by_device_and_minutes_lift_the_limit_of_steps() -> None:
    def resolved(device: str, **values: Any) -> TrainOptions:
        return TrainOptions.of("eagle", "out", values).resolved(device)

    assert resolved("cuda").loop.batch_tokens == 16384
    assert (resolved("cpu").loop.steps, resolved("cpu").loop.eval_every) == (1000, 50)
    assert resolved("cpu", minutes=1).loop.steps > 10**8
    assert resolved("cpu", minutes=1, steps=9).loop.steps == 9
    assert resolved("cuda", answer_tokens=5).resolved("cuda").collect.answer_tokens == 5


def test_options_are_the_same_from_their_recorded_values() -> None:
    options = TrainOptions.of("medusa", "out", {"seed": 3, "num_medusa_heads": 2, "model": "tiny"})
    assert options.collect.seed == options.loop.seed == 3
    assert TrainOptions.of("medusa", "out", json.loads(json.dumps(options.values()))) == options


def test_unknown_kinds_and_options_are_refused() -> None:
    with pytest.raises(OptionError, match="eagle, dflash, dflash2, mtp, medusa, draft-model, exit-adapter"):
        TrainOptions.of("llama", "out")
    with pytest.raises(OptionError, match="no option exit_layer"):
        TrainOptions.of("eagle", "out", {"exit_layer": 2})


@pytest.mark.parametrize("name", trainer_names())
def test_every_kind_has_a_spec_of_its_name_whose_settings_have_help(name: str) -> None:
    spec = trainer_spec(name)
    assert spec.name == name and spec.summary and "OUT" in spec.usage
    flags = list(flags_of(spec.options))
    assert flags and all(flag.help and flag.option.startswith("--") for flag in flags)


def test_a_line_of_progress_holds_everything() -> None:
    measurement = HeldOutMeasurement(10, 1.9, [0.6, 0.3])
    line = progress_line(TrainingProgress(12, 0.5, 1.25, 1e-3, 4096.0, 3725.0, measurement))
    assert line == "step 12, loss 1.250, 4096 tokens/s, 1:02:05 left; held out 1.90 tokens per step (60% 30%)"


@pytest.mark.slow
def test_a_readme_of_a_training_without_steps_and_a_curve_are_written(tmp_path: Path) -> None:
    write_readme(tmp_path, DrafterFacts("eagle", "tiny", "none", 10, {}, {"code": 2.0}), TrainingHistory())
    assert "Further results" in (tmp_path / "README.md").read_text()
    measurements = [HeldOutMeasurement(0, 1.0, [0.0]), HeldOutMeasurement(2, 1.5, [0.5])]
    assert plot(TrainingHistory([2.0, 1.0], measurements, 10, 1.0), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").is_file()
