"""Drafts of MTP heads along a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.heads.mtp import load_mtp
from paceline.lint.mtp import draft
from paceline.lint.session import open_target
from paceline.lint.target import stated
from paceline.train.corpus import TrainingSequence
from tests.support.mtp import several_modules, write_target
from tests.support.mtp_reference import Reference, true_states

TOKENS = [5, 7, 9, 11, 200, 31, 44, 8, 3, 3, 8, 90, 17, 250, 61, 62, 63, 5, 5, 19, 77, 140, 2, 33]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["glm4_moe", "mimo_v2_flash"])
def test_each_of_several_modules_drafts_one_token(model_type: str, tmp_path: Path) -> None:
    """What a float64 reference says of each module after the text's own tokens; a third token is not drafted."""
    folder = write_target(model_type, tmp_path, several_modules(model_type, 2))
    text = stated(open_target(str(folder), "cpu").teacher, [TrainingSequence(TOKENS, 3, greedy=True)])
    anchors = text.anchors(3)
    drafts = draft(load_mtp(folder, model_type), text, anchors, 3)
    config = json.loads((folder / "config.json").read_text())
    g = true_states(folder, TOKENS).double()
    for module in range(2):
        reference, known = Reference(model_type, folder, config, module), TOKENS[module + 1 :]
        rows = reference.rows(g[: len(known)], known)
        logits = rows[anchors.column - 1] @ reference.lm_head.T
        assert torch.equal(drafts.tokens[:, module], logits.argmax(dim=-1))
        g = g if reference.is_mimo else rows
    assert len(anchors) == 19 and (drafts.tokens[:, 2] == -1).all() and not drafts.probs[:, 2].any()
