"""Readings of MTP heads. A head of one module drafts along a text as EAGLE heads do, of several each drafts a token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.heads.attention import causal_mask
from paceline.heads.checkpoint import Checkpoint
from paceline.heads.eagle import ChainHead
from paceline.heads.mtp import BEFORE_FINAL_NORM, MtpHead
from paceline.lint import eagle
from paceline.lint.comparison import DraftedTokens
from paceline.lint.reading import ConfigKey, HeadReading, tensor_reading
from paceline.lint.registry import HeadLint
from paceline.lint.target import Anchors, StatedText, TargetFacts
from paceline.lint.transformer_readings import flipped, norm_readings
from paceline.train.task import shifted
from paceline.train.training_time_test import reference

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


def draft(head: MtpHead, text: StatedText, anchors: Anchors, k: int) -> DraftedTokens:
    """The chain of every anchor; within it the text's own tokens come before each draft."""
    return eagle.draft(head, text, anchors, k, reference if head.num_modules == 1 else module_states)


def module_states(head: ChainHead, features: Tensor, tokens: Tensor, steps: int) -> Iterator[Tensor]:
    """What each of several modules makes at every position, one step a module. [batch, length, hidden_size]"""
    assert isinstance(head, MtpHead)
    rows, g = torch.arange(tokens.shape[1], device=tokens.device), head.fuse(features)
    mask = causal_mask(len(rows), device=tokens.device)
    for module in range(min(steps, head.num_modules)):
        out = head.module_pass(module, head.embed(shifted(tokens, module + 1)), g, rows[None], mask, None)
        g = out if head.config.layout.chains else g
        yield out


LINT = HeadLint(("mtp",), readings, draft)
