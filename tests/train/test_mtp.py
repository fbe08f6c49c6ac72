"""`paceline train mtp`: the target's own head goes on, a cut-off training resumes, and a merged checkpoint drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline import SpeculativeDecoder
from paceline.train.mtp import MtpTask
from tests.support.mtp import head_tensors, write_target
from tests.train.conftest import random_prompts, small_training

STEPS, CUT_AFTER = 5, 3


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "training" / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(target_folder: Path, sequences_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that nothing disturbed, which also wrote the target with the head inside."""
    from paceline import cli

    out = tmp_path_factory.mktemp("whole") / "out"
    arguments = [*small_training(target_folder, sequences_folder, STEPS), "--save-every", 2]
    options = ["--out", out, "--merged", out / "merged"]
    assert cli.main(["train", "mtp", *(str(argument) for argument in (*arguments, *options))]) == 0
    return out


@pytest.mark.slow
def test_a_cut_off_training_resumes_with_the_same_losses(
    whole: Path, target_folder: Path, sequences_folder: Path, tmp_path: Path, train: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out, calls, loss = tmp_path / "cut", [], MtpTask.loss

    def failing(task: MtpTask, batch: Any) -> torch.Tensor:
        calls.append(batch.number)
        if len(calls) > CUT_AFTER:
            raise KeyboardInterrupt
        return loss(task, batch)

    monkeypatch.setattr(MtpTask, "loss", failing)
    arguments = [*small_training(target_folder, sequences_folder, STEPS), "--save-every", 2]
    status, output = train("mtp", "--out", out, *arguments)
    assert status == 130 and "continue with: paceline train mtp" in output.err
    monkeypatch.setattr(MtpTask, "loss", loss)
    assert train("mtp", "--out", out, "--resume")[0] == 0
    assert losses(out) == losses(whole) and len(losses(whole)) == STEPS


@pytest.mark.slow
def test_a_merged_checkpoint_is_the_target_and_its_head(whole: Path, target_folder: Path) -> None:
    """Through the native runner, which names every tensor that it does not know."""
    prompt, settings = random_prompts(1, seed=5)[0], {"max_new_tokens": 12, "ignore_eos": True}
    with SpeculativeDecoder(str(whole / "merged"), method="mtp", num_draft_tokens=2) as decoder:
        inside = decoder.generate(prompt, **settings)
        plain = decoder.generate(prompt, num_draft_tokens=0, **settings)
    with SpeculativeDecoder(
        str(target_folder), method="mtp", draft_model=str(whole), num_draft_tokens=2
    ) as decoder:
        beside = decoder.generate(prompt, **settings)
    assert inside.token_ids == beside.token_ids == plain.token_ids
    assert inside.stats.accepted == beside.stats.accepted and inside.stats.drafted


@pytest.mark.slow
def test_the_targets_own_head_is_where_training_starts(
    sequences_folder: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    """Its tensors come back under the names the family publishes, experts one by one, in both forms."""
    target, out = write_target("glm4_moe", tmp_path / "target"), tmp_path / "out"
    arguments = [*small_training(target, sequences_folder, 1), "--learning-rate", 1e-12, "--ttt-steps", 2]
    assert train("mtp", "--out", out, *arguments, "--merged", tmp_path / "merged")[0] == 0
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    published = {name: value for name, value in head_tensors("glm4_moe").items() if not name.endswith(copies)}
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())["weight_map"]
    merged = load_file(tmp_path / "merged" / "model-00002-of-00002.safetensors")
    for written in (load_file(out / "model.safetensors"), merged):
        assert written.keys() == published.keys()
        assert all(torch.equal(written[name], value.bfloat16()) for name, value in published.items())
    old = load_file(tmp_path / "merged" / "model-00001-of-00002.safetensors")
    assert not old.keys() & merged.keys() and index.keys() == old.keys() | merged.keys()


def test_a_target_is_not_merged_into_itself(
    target_folder: Path, sequences_folder: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    arguments = [*small_training(target_folder, sequences_folder, 1), "--merged", target_folder]
    status, output = train("mtp", "--out", tmp_path, *arguments)
    assert status == 2 and "choose another directory" in output.err


def test_a_target_that_cannot_have_one_is_refused_before_data_is_generated(
    target_folder: Path, tmp_path: Path, train: Any
) -> None:
    status, shown = train("mtp", target_folder, "--out", tmp_path / "head", "--merged", target_folder)
    assert status == 2 and "choose another directory" in shown.err
    assert not (tmp_path / "head" / "sequences").exists()
