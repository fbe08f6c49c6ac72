"""Heads whose weights are solved for a tiny target: the linter tells what they read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.errors import OptionError, PairError, WeightsError
from paceline.heads.checkpoint import Checkpoint, read_checkpoint
from paceline.heads.eagle1 import Eagle1Config, Eagle1Head
from paceline.heads.registry import save_head
from paceline.lint.reading import ConfigKey
from paceline.lint.registry import MODULES, lint_of
from paceline.lint.run import LintResult, lint
from paceline.lint.target import StatedText, TargetFacts, stated
from paceline.lint.transformer_readings import halves_of_pairs, pairs_of_halves
from paceline.train.teacher import Teacher
from tests.lint.tiny_heads import (
    letters,
    lopsided_llama,
    pieces,
    training_text,
    write_eagle1,
    write_eagle3,
    write_medusa,
    write_mtp,
)

FACTS = TargetFacts(3, 32, 8, 259, 10000.0)
BEFORE_NORM = "states before the final norm on"


@pytest.fixture(scope="module")
def text() -> StatedText:
    return stated(Teacher(lopsided_llama()), pieces(letters(4, seed=2)))


@pytest.fixture(scope="module")
def training(text: StatedText) -> StatedText:
    return training_text(text.teacher)


@pytest.fixture(scope="module")
def walk() -> StatedText:
    """Text whose next letter is nearly always the next of the alphabet, and a target that knows the last one only."""
    return stated(Teacher(lopsided_llama(remembers=False)), pieces(letters(2, seed=2, stray=0.1)))


@pytest.fixture(scope="module")
def medusa(walk: StatedText, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    training = training_text(walk.teacher, parts=8, stray=0.1)
    return read_checkpoint(write_medusa(tmp_path_factory.mktemp("medusa") / "heads", training))


def changes(result: LintResult) -> list[str]:
    return [change.tried.reading.name for change in result.changes]


@pytest.mark.slow
@pytest.mark.parametrize("before_norm", [False, True])
@pytest.mark.parametrize("kind", ["eagle1", "mtp"])
def test_states_before_and_after_the_final_norm_are_told_apart(
    text: StatedText, training: StatedText, tmp_path: Path, kind: str, before_norm: bool
) -> None:
    """RMS norms hide the difference: both readings run. Two thousand tokens show it at z > 10."""
    model = text.teacher.model
    folder = tmp_path / "head"
    if kind == "eagle1":
        write_eagle1(folder, training, before_norm)
    else:
        write_mtp(folder, model, training, before_norm)
    result = lint(read_checkpoint(folder), text, FACTS)
    assert result.kind == kind
    assert changes(result) == ([BEFORE_NORM] if before_norm else [])
    if before_norm:
        assert "before_final_norm" in result.changes[0].tried.reading.change
        assert result.best.tokens_per_step > result.as_given.tokens_per_step + 0.3
        assert lint(result.files, text, FACTS).correct


@pytest.mark.slow
@pytest.mark.parametrize(("planted", "named"), [(1, None), (0, "layers one higher"), (2, "layers one lower")])
def test_the_layer_that_a_head_was_trained_on_is_found(
    text: StatedText, training: StatedText, tmp_path: Path, planted: int, named: str | None
) -> None:
    """Only layers are asked for: the norms of a head that was solved for, not trained, are not the best there are."""
    files = read_checkpoint(write_eagle3(tmp_path / "head", training, layer=1))
    config = {**files.config, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [planted]}}
    result = lint(replace(files, config=config), text, FACTS)
    assert [name for name in changes(result) if name.startswith("layers")] == ([named] if named else [])
    if named:
        line = f'config.json: "eagle_config.eagle_aux_hidden_state_layer_ids": [1], not [{planted}]'
        [change] = [entry for entry in result.changes if entry.tried.reading.name == named]
        assert change.tried.reading.change == line and change.probability < 1e-4


def test_medusa_heads_in_the_other_order_are_found(walk: StatedText, medusa: Checkpoint) -> None:
    assert lint(medusa, walk, FACTS).correct
    reading = next(entry for entry in lint_of("medusa").readings(medusa, FACTS) if "other order" in entry.name)
    result = lint(reading.edit(medusa), walk, FACTS)
    assert changes(result) == ["heads in the other order"]
    assert same(result.files, medusa)


def test_medusa_heads_that_start_with_the_next_token_are_found(walk: StatedText, medusa: Checkpoint) -> None:
    """A first head that predicts what the target's own head predicts: all others come one place too late."""
    own = walk.teacher.model.get_output_embeddings().weight.detach()
    later = {f"{int(name[0]) + 1}{name[1:]}": value for name, value in medusa.tensors.items()}
    first = {
        name: torch.zeros_like(value) if "linear" in name else own
        for name, value in medusa.tensors.items()
        if name.startswith("0.")
    }
    result = lint(replace(medusa, tensors={**later, **first}), walk, FACTS)
    assert changes(result) == ["head 0 is the next token's"]
    assert same(result.files, medusa)


def test_the_acceptance_of_a_reading_comes_with_its_binomial_error(walk: StatedText, medusa: Checkpoint) -> None:
    measured = lint(medusa, walk, FACTS).as_given.acceptance
    assert measured is not None and measured.num_anchors == len(walk.anchors(3)) > 450
    rate, error = measured.by_position[0], measured.errors[0]
    assert 0.5 < rate < 0.99 and error == pytest.approx((rate * (1 - rate) / measured.num_anchors) ** 0.5)
    assert measured.by_position == sorted(measured.by_position, reverse=True)


def test_a_head_of_another_target_is_refused(text: StatedText, tmp_path: Path) -> None:
    save_head(Eagle1Head(Eagle1Config(16, 24, 2, 1, 8, 259, 259, 16)), tmp_path / "head")
    with pytest.raises(PairError, match="states of 16 values; the target has 32"):
        lint(read_checkpoint(tmp_path / "head"), text, FACTS)


@pytest.mark.slow
def test_a_head_that_no_reading_can_load_is_an_error(text: StatedText, training: StatedText, tmp_path: Path) -> None:
    files = read_checkpoint(write_eagle1(tmp_path / "head", training, before_norm=False))
    missing = {name: value for name, value in files.tensors.items() if not name.endswith("o_proj.weight")}
    with pytest.raises(WeightsError, match=r"o_proj.weight is missing; no other reading"):
        lint(replace(files, tensors=missing), text, FACTS)


def test_a_kind_without_readings_is_named() -> None:
    with pytest.raises(OptionError, match=r"kind exit_adapter have no readings to try; check takes .* eagle3"):
        lint_of("exit_adapter")
    assert all(kind in lint_of(kind).kinds for kind in MODULES)


# --- edits ------------------------------------------------------------------------------------------------------------


def test_a_line_is_changed_wherever_the_config_has_it() -> None:
    key = ConfigKey("block_size", ("dflash_config", ""))
    config = {"block_size": 16, "dflash_config": {"block_size": 8}}
    assert key.value(config) == 8
    assert key.written(config, 4) == {"block_size": 4, "dflash_config": {"block_size": 4}}
    assert config["block_size"] == 16
    assert key.line(config, 4) == 'config.json: "dflash_config.block_size" and "block_size": 4, not 8'
    assert key.written({"dflash_config": {"mask_token_id": 1}}, 4)["dflash_config"]["block_size"] == 4
    assert ConfigKey("norm_output").line({}, True) == 'config.json: "norm_output": true, which is not there now'


def test_rows_of_pairs_and_of_halves_are_each_others_inverse() -> None:
    rows = torch.arange(24.0).view(12, 2)
    pairs = pairs_of_halves(rows, 6)
    assert pairs[:6, 0].tolist() == [0, 6, 2, 8, 4, 10]
    assert torch.equal(halves_of_pairs(pairs, 6), rows)
    assert torch.equal(halves_of_pairs(pairs_of_halves(rows[:, 0], 6), 6), rows[:, 0])


def test_every_reading_is_another_checkpoint(training: StatedText, tmp_path: Path) -> None:
    """A reading that changed nothing would tie with the files' own."""
    files = read_checkpoint(write_eagle1(tmp_path / "head", training, before_norm=False))
    for reading in lint_of("eagle1").readings(files, FACTS):
        assert not same(reading.edit(files), files), reading.name


def same(first: Checkpoint, second: Checkpoint) -> bool:
    tensors = first.tensors.keys() == second.tensors.keys() and all(
        torch.equal(value, second.tensors[name]) for name, value in first.tensors.items()
    )
    return tensors and first.config == second.config
