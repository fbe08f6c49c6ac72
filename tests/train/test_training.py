"""Every kind of drafter, trained end to end through the command: it learns, loads, drafts, and scores as measured."""

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
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.eagle import Eagle
from paceline.drafting.layerskip import LayerSkip
from paceline.drafting.medusa import Medusa
from paceline.heads.eagle import EagleHead
from paceline.heads.exit_adapter import ExitAdapter
from paceline.heads.medusa import MedusaHeads
from paceline.heads.registry import load_head
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.train.corpus import Batches, Corpus, split
from paceline.train.measure import accepted_lengths, measure, walk
from paceline.train.run import TASKS, Target, TrainOptions, open_target
from tests.support.drafter_exactness import assert_unchanged
from tests.train.conftest import LENGTH, PROMPT, arguments, greedy_texts, prompts

STEPS = {"eagle": 40, "medusa": 40, "draft": 60, "exit": 40}
SHAPE: dict[str, list[object]] = {
    "eagle": ["--vocabulary", 128, "--unroll", 3],
    "medusa": ["--heads", 3],
    "draft": ["--layers", 1, "--width", 32],
    "exit": ["--layer", 1],
}
CHAIN = 3


@dataclass(frozen=True, slots=True)
class Run:
    folder: Path
    document: dict[str, Any]


@pytest.fixture(scope="module")
def trained(target_folder: Path, texts_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Each kind is trained once."""
    result: dict[str, Run] = {}

    def run(word: str) -> Run:
        if word not in result:
            out = tmp_path_factory.mktemp(word) / "out"
            words = [word, "--out", out, *arguments(target_folder, texts_folder, STEPS[word]), *SHAPE[word]]
            result[word] = Run(out, said_json(words))
        return result[word]

    return run


def said_json(words: list[object]) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["train", *(str(word) for word in words), "--json"]) == 0
    document: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
    return document


@pytest.mark.parametrize("word", ["eagle", "medusa", "draft", "exit"])
def test_the_loss_falls_and_guesses_get_better(word: str, trained: Callable[[str], Run]) -> None:
    document = trained(word).document
    print(f"{word}: loss {document['first_loss']:.3f} -> {document['last_loss']:.3f}")
    print(f"tokens a pass {document['tokens_per_step_untrained']:.3f} -> {document['tokens_per_step']:.3f}")
    assert document["steps"] == STEPS[word]
    assert document["last_loss"] < 0.9 * document["first_loss"]
    assert document["tokens_per_step"] > document["tokens_per_step_untrained"] + 0.1


@pytest.mark.parametrize("word", ["eagle", "medusa", "draft", "exit"])
def test_card_and_curve_lie_beside_the_drafter(word: str, trained: Callable[[str], Run]) -> None:
    run = trained(word)
    info = (run.folder / "README.md").read_text()
    assert f"(`{word}`)" in info and "held out" in info and "64 texts" in info
    assert str(run.folder) not in info, "a card says what was done, not where"
    assert (run.folder / "curve.png").stat().st_size > 1000
    assert set(run.document["files"]) >= {"README.md", "curve.png", "config.json"}


def drafters(word: str, run: Run, target: HuggingFaceRunner) -> dict[str, Drafter]:
    """The drafter through each layout it was written in."""
    if word == "eagle":
        return {name: Eagle(load_head(run.folder / name, EagleHead), target) for name in (".", "speculators")}
    if word == "medusa":
        return {name: Medusa(load_head(run.folder / name, MedusaHeads), target, branches=1) for name in (".", "vllm")}
    if word == "exit":
        return {".": LayerSkip(target, adapter=load_head(run.folder, ExitAdapter))}
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(run.folder).chat_template, "the tokenizer lies beside it"
    draft = HuggingFaceRunner(AutoModelForCausalLM.from_pretrained(run.folder).float(), "draft")
    return {".": DraftModel(draft, target.info.vocab_size)}


@pytest.mark.parametrize("word", ["eagle", "medusa", "draft", "exit"])
def test_every_layout_drafts_as_well_as_was_measured(
    word: str, trained: Callable[[str], Run], target_folder: Path, target_model: Any
) -> None:
    """Greedy texts through the real machinery are unchanged, and take the passes that `measure` had counted.

    Files hold bf16, so a guess may differ here and there: 3 % of the passes are allowed.
    """
    run, given = trained(word), prompts(6, seed=9)
    expected = measured(word, target_folder, run, greedy_texts(target_model, given, LENGTH))
    target = HuggingFaceRunner(target_model, "tiny")
    for name, drafter in drafters(word, run, target).items():
        found = assert_unchanged(target, drafter, given, LENGTH - PROMPT, CHAIN)
        print(f"{word} {name}: {found.tokens_per_step:.3f} tokens a pass, measured {expected.tokens_per_step:.3f}")
        assert found.tokens_per_step > 1.1
        assert found.steps == pytest.approx(expected.steps, rel=0.03)
        assert found.new_tokens == expected.new_tokens


def measured(word: str, folder: Path, run: Run, texts: list[Any]) -> SpecStats:
    """What the training's own walk says of the weights in the checkpoint."""
    recorded = json.loads((run.folder / "training" / "options.json").read_text())
    options = TrainOptions(**recorded)
    target: Target = open_target(options, "cpu")
    learnt = Corpus.load(Path(recorded["texts"]) / "texts-000.safetensors")
    task = TASKS[word](options, target, split(learnt, options.seed))
    state = torch.load(run.folder / "training" / "checkpoint.pt", weights_only=True)
    task.module.load_state_dict(state["module"])
    return measure(task, Batches(Corpus.of(texts), 2048, 0).once(), k=CHAIN)


def test_a_walk_counts_like_greedy_rounds() -> None:
    """An answer of 6 tokens from place 4 on, k = 2, in rounds of 2 + 1, 0 + 1 and 1 + 1."""
    stats = walk([9, 9, 2, 9, 9, 0, 1, 9, 9, 9], start=4, length=10, k=2)
    assert (stats.steps, stats.accepted, stats.new_tokens) == (3, 3, 6)
    assert stats.offered_at == [3, 3] and stats.accepted_at == [2, 1]


def test_guesses_count_until_the_first_wrong_one() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5, 0]])
    draft_tokens = torch.tensor([[[3, 4, 5], [4, 9, 6], [9, 5, 6], [5, 6, 6], [0, 0, 0], [0, 0, 0]]])
    assert accepted_lengths(draft_tokens, tokens, torch.tensor([5])).tolist() == [[3, 1, 0, 0, 0, 0]]
