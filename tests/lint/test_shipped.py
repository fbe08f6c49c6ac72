"""The head that comes with paceline: copies of it that are right, and mistakes planted in it.

A few of each run by default. PACELINE_EVERY_READING=1 runs all, and mistakes that only a longer text shows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.heads.checkpoint import Checkpoint, read_checkpoint
from paceline.heads.shipped import HERE
from paceline.lint import run
from paceline.lint.comparison import Acceptance
from paceline.lint.run import lint
from paceline.lint.target import StatedText, TargetFacts
from tests.lint.planted import COPIES, MISTAKES

SHIPPED = HERE / "eagle-SmolLM2-135M-Instruct"
EVERY = bool(os.environ.get("PACELINE_EVERY_READING"))
TEXTS = {"first": [0, 1], "second": [2, 3], "third": [4, 5]} if EVERY else {"first": [0, 1]}  # sequences of the text
CHOSEN_COPIES = list(COPIES) if EVERY else ["original bf16", "speculators fp32", "sparse"]
CHOSEN_MISTAKES = list(MISTAKES) if EVERY else ["head_dim"]
WHOLE = list(range(8))

pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(scope="module", autouse=True)
def measured_once() -> Iterator[None]:
    """Heads with the same settings and weights draft the same: each is measured once on a text."""
    known: dict[str, Acceptance] = {}
    measure = run.acceptance

    def remembered(files: Checkpoint, text: StatedText, k: int = run.POSITIONS) -> Acceptance:
        key = fingerprint(files, text)
        if key not in known:
            known[key] = measure(files, text, k)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "acceptance", remembered)
        yield


def fingerprint(files: Checkpoint, text: StatedText) -> str:
    """Of what a loaded head is: its settings and its weights, whatever the files call them."""
    head = run.spec_of(files).load(Checkpoint(files.folder, files.config, dict(files.tensors)))
    digest = hashlib.blake2b(text.tokens.numpy().tobytes())
    digest.update(json.dumps(str(head.config)).encode())
    for name, value in sorted(head.state_dict().items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("part", TEXTS)
@pytest.mark.parametrize("copy", CHOSEN_COPIES)
def test_a_correct_copy_raises_no_alarm(
    default_text: StatedText, default_facts: TargetFacts, tmp_path: Path, copy: str, part: str
) -> None:
    """Error probability 0.01 a text if every reading were as good as the right one; they are worse."""
    COPIES[copy](SHIPPED, tmp_path / "head")
    result = lint(read_checkpoint(tmp_path / "head"), default_text.seqs(TEXTS[part]), default_facts)
    assert result.correct, [change.tried.reading.change for change in result.changes]
    assert result.num_tested >= 14 and result.as_given.tokens_per_step > 1.9


@pytest.mark.parametrize("mistake", CHOSEN_MISTAKES)
def test_a_planted_mistake_is_named(default_text: StatedText, default_facts: TargetFacts, mistake: str) -> None:
    plant, names = MISTAKES[mistake]
    original = read_checkpoint(SHIPPED)
    text = default_text.seqs(WHOLE if EVERY else TEXTS["first"])
    result = lint(plant(original), text, default_facts)
    assert tuple(change.tried.reading.name for change in result.changes) == names
    assert all(change.probability < 0.01 for change in result.changes)
    assert result.files.config == original.config
    assert all(torch.equal(result.files.tensors[name], value) for name, value in original.tensors.items())
    best = result.best.acceptance
    assert best is not None and torch.equal(best.lengths, run.acceptance(original, text).lengths)
