"""The heads that come with paceline: copies of them that are right, and mistakes planted in them.

A few of each run by default; benchmarks/lint_plants.py runs all on the text that the command reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.lint_planted import COPIES, HEADS
from benchmarks.lint_plants import Measurements
from paceline.heads.checkpoint import read_checkpoint
from paceline.lint import run
from paceline.lint.run import lint
from paceline.lint.target import StatedText, TargetFacts

pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(scope="module", autouse=True)
def measured_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Heads with the same settings and weights draft the same: each is measured once on a text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "acceptance", Measurements(tmp_path_factory.mktemp("measured")).acceptance)
        yield


@pytest.mark.parametrize("copy", ["original bf16", "speculators fp32", "sparse"])
def test_a_correct_copy_raises_no_alarm(
    default_text: StatedText, default_facts: TargetFacts, tmp_path: Path, copy: str
) -> None:
    """Error probability 0.01 a text if every reading were as good as the right one; they are worse."""
    COPIES[copy](HEADS["eagle"].folder, tmp_path / "head")
    result = lint(read_checkpoint(tmp_path / "head"), default_text, default_facts)
    assert result.correct, [change.tried.reading.change for change in result.changes]
    assert result.num_tested >= 14 and result.as_given.tokens_per_step > 1.9


@pytest.mark.parametrize(("head", "mistake"), [("eagle", "head_dim"), ("dflash", "mask token")])
def test_a_planted_mistake_is_named(
    default_text: StatedText, default_facts: TargetFacts, head: str, mistake: str
) -> None:
    planted, original = HEADS[head].mistakes[mistake], read_checkpoint(HEADS[head].folder)
    result = lint(planted.plant(original), default_text, default_facts)
    assert tuple(change.tried.reading.name for change in result.changes) == planted.names
    assert all(change.probability < 0.01 for change in result.changes)
    assert result.files.config == original.config
    assert all(torch.equal(result.files.tensors[name], value) for name, value in original.tensors.items())
    best = result.best.acceptance
    assert best is not None and torch.equal(best.lengths, run.acceptance(original, default_text).lengths)
