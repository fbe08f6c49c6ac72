"""Readings of MTP heads. They draft along a text as EAGLE heads do."""

from __future__ import annotations

import torch

from paceline.heads.checkpoint import Checkpoint
from paceline.heads.mtp import BEFORE_FINAL_NORM
from paceline.lint.eagle import draft
from paceline.lint.reading import ConfigKey, HeadReading, tensor_reading
from paceline.lint.registry import HeadLint
from paceline.lint.target import TargetFacts
from paceline.lint.transformer_readings import flipped, norm_readings

FUSION = ("fc.weight", "eh_proj.weight", "input_proj.weight")
BEFORE_NORM = ConfigKey(BEFORE_FINAL_NORM)


def readings(checkpoint: Checkpoint, facts: TargetFacts) -> list[HeadReading]:
    """States before or after the target's final norm, the order of the two inputs, norms around zero."""
    change = "exchange the two halves of the columns of the matrix that joins embedding and state"
    return [
        flipped("states before the final norm {}", BEFORE_NORM, checkpoint),
        tensor_reading(
            "inputs in the other order", change, FUSION, lambda weight: torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)
        ),
        *norm_readings(checkpoint),
    ]


LINT = HeadLint(("mtp",), readings, draft)
