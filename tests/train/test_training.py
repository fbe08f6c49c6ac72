"""Every kind of drafter, trained end to end through the command: it learns, loads, and drafts as measured."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import cli
from paceline.core.protocols import Drafter
from paceline.core.stats import SpecStats
from paceline.drafting.dflash import DFlash
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.eagle import Eagle
from paceline.drafting.layerskip import LayerSkip
from paceline.drafting.medusa import Medusa
from paceline.drafting.mtp import Mtp
from paceline.heads.dflash import DFlashHead
from paceline.heads.eagle3 import Eagle3Head
from paceline.heads.exit_adapter import ExitAdapter
from paceline.heads.medusa import MedusaHeads
from paceline.heads.mtp import MtpHead
from paceline.heads.registry import load_head
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.train.corpus import BatchSampler, Corpus, split
from paceline.train.measure import accepted_lengths, count_steps, measure
from paceline.train.registry import trainer_names
from paceline.train.run import TrainOptions, open_target, recorded_options
from tests.support.drafter_exactness import assert_unchanged
from tests.train.conftest import PROMPT_LEN, SEQ_LEN, greedy_sequences, random_prompts, small_training

STEPS = {"eagle": 40, "dflash": 40, "dflash2": 40, "mtp": 40, "medusa": 40, "draft-model": 60, "exit-adapter": 40}
BLOCKS: list[object] = ["--draft-vocab-size", 128, "--num-layers", 1, "--block-size", 4, "--anchors", 16]
SIZES: dict[str, list[object]] = {
    "eagle": ["--draft-vocab-size", 128, "--ttt-steps", 3],
    "dflash": BLOCKS,
    "dflash2": [*BLOCKS, "--selector-rank", 8, "--block-attention", "causal"],
    "mtp": ["--ttt-steps", 3],
    "medusa": ["--num-medusa-heads", 3],
    "draft-model": ["--num-layers", 1, "--hidden-size", 32],
    "exit-adapter": ["--exit-layer", 1],
}
CHAIN = 3


@dataclass(frozen=True, slots=True)
class Run:
    folder: Path
    document: dict[str, Any]


@pytest.fixture(scope="module")
def trained(
    target_folder: Path, sequences_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Run]:
    """Each kind is trained once."""
    result: dict[str, Run] = {}

    def run(kind: str) -> Run:
        if kind not in result:
            out = tmp_path_factory.mktemp(kind) / "out"
            arguments = [
                kind,
                "--out",
                out,
                *small_training(target_folder, sequences_folder, STEPS[kind]),
                *SIZES[kind],
            ]
            result[kind] = Run(out, train_json(arguments))
        return result[kind]

    return run


def train_json(arguments: list[object]) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["train", *(str(argument) for argument in arguments), "--json"]) == 0
    document: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
    return document


@pytest.mark.slow
@pytest.mark.parametrize("kind", trainer_names())
def test_the_loss_falls_and_acceptance_rises(kind: str, trained: Callable[[str], Run]) -> None:
    document = trained(kind).document
    print(f"{kind}: loss {document['first_loss']:.3f} -> {document['last_loss']:.3f}")
    print(f"tokens per step {document['tokens_per_step_untrained']:.3f} -> {document['tokens_per_step']:.3f}")
    assert document["steps"] == STEPS[kind]
    assert document["last_loss"] < 0.9 * document["first_loss"]
    assert document["tokens_per_step"] > document["tokens_per_step_untrained"] + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", trainer_names())
def test_readme_and_curve_are_written_beside_the_drafter(kind: str, trained: Callable[[str], Run]) -> None:
    run = trained(kind)
    readme = (run.folder / "README.md").read_text()
    assert f"(`{kind}`)" in readme and "held-out" in readme and "64 sequences" in readme
    assert str(run.folder) not in readme, "the README says what was done, not where"
    assert (run.folder / "curve.png").stat().st_size > 1000
    assert set(run.document["files"]) >= {"README.md", "curve.png", "config.json"}


def drafters(kind: str, run: Run, target: HuggingFaceRunner) -> dict[str, Drafter]:
    """The drafter through each layout it was written in."""
    if kind == "eagle":
        return {name: Eagle(load_head(run.folder / name, Eagle3Head), target) for name in (".", "speculators")}
    if kind.startswith("dflash"):
        return {name: DFlash(load_head(run.folder / name, DFlashHead), target) for name in (".", "speculators")}
    if kind == "mtp":
        return {name: Mtp(load_head(run.folder / name, MtpHead), target) for name in (".", "speculators")}
    if kind == "medusa":
        return {name: Medusa(load_head(run.folder / name, MedusaHeads), target, branches=1) for name in (".", "vllm")}
    if kind == "exit-adapter":
        return {".": LayerSkip(target, adapter=load_head(run.folder, ExitAdapter))}
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(run.folder).chat_template, "the tokenizer is beside it"
    draft = HuggingFaceRunner(AutoModelForCausalLM.from_pretrained(run.folder).float(), "draft")
    return {".": DraftModel(draft, target.info.vocab_size)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", trainer_names())
def test_every_layout_drafts_as_well_as_measured(kind: str, trained: Callable[[str], Run], target_model: Any) -> None:
    """Greedy sequences through the real loop are unchanged, and take the steps that `measure` counted.

    Files hold bf16, so a draft token may differ here and there: 3 % of the steps are allowed.
    """
    run, prompts = trained(kind), random_prompts(6, seed=9)
    expected = measured(run, greedy_sequences(target_model, prompts, SEQ_LEN))
    target = HuggingFaceRunner(target_model, "tiny")
    for name, drafter in drafters(kind, run, target).items():
        stats = assert_unchanged(target, drafter, prompts, SEQ_LEN - PROMPT_LEN, CHAIN)
        print(f"{kind} {name}: {stats.tokens_per_step:.3f} tokens per step, measured {expected.tokens_per_step:.3f}")
        assert stats.tokens_per_step > 1.1
        assert stats.steps == pytest.approx(expected.steps, rel=0.03)
        assert stats.new_tokens == expected.new_tokens


def measured(run: Run, seqs: list[Any]) -> SpecStats:
    """What the training's own count says of the weights in the checkpoint."""
    values = recorded_options(str(run.folder))
    options = TrainOptions.of(values["kind"], str(run.folder), values)
    target = open_target(options, "cpu")
    corpus = Corpus.load(options.run.sequences_folder / "sequences-000.safetensors")
    task = options.spec.build(target, split(corpus, options.loop.seed), options.drafter)
    state = torch.load(run.folder / "training" / "checkpoint.pt", weights_only=True)
    task.module.load_state_dict(state["module"])
    return measure(task, BatchSampler(Corpus.of(seqs), 2048, 0).once(), k=CHAIN)


@pytest.mark.slow
@pytest.mark.parametrize("kind", trainer_names())
def test_a_training_goes_on_from_a_trained_drafter(
    kind: str, trained: Callable[[str], Run], target_folder: Path, sequences_folder: Path, tmp_path: Path
) -> None:
    """Before its first step it accepts what the trained one accepts, but for the rounding of the file to bf16."""
    run = trained(kind)
    arguments = [kind, *small_training(target_folder, sequences_folder, 1), *SIZES[kind], "--out", tmp_path / "out"]
    document = train_json([*arguments, "--continue-from", run.folder, "--learning-rate", 1e-6])
    assert document["tokens_per_step_untrained"] == pytest.approx(run.document["tokens_per_step"], rel=0.05)
    assert f"went on from {run.folder.name}" in (tmp_path / "out" / "README.md").read_text()


def test_counted_steps_are_those_of_greedy_decoding() -> None:
    """An answer of 6 tokens from position 4 on, k = 2, in steps of 2 + 1, 0 + 1 and 1 + 1."""
    stats = count_steps([9, 9, 2, 9, 9, 0, 1, 9, 9, 9], start=4, length=10, k=2)
    assert (stats.steps, stats.accepted, stats.new_tokens) == (3, 3, 6)
    assert stats.offered_at == [3, 3] and stats.accepted_at == [2, 1]


def test_draft_tokens_count_until_the_first_wrong_one() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5, 0]])
    draft_tokens = torch.tensor([[[3, 4, 5], [4, 9, 6], [9, 5, 6], [5, 6, 6], [0, 0, 0], [0, 0, 0]]])
    assert accepted_lengths(draft_tokens, tokens, torch.tensor([5])).tolist() == [[3, 1, 0, 0, 0, 0]]
