"""Argmaxes on the host: those of torch, whatever is in a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.device.argmax import argmax_rows


def rows_with_edges(dtype: torch.dtype) -> Tensor:
    """Numbers, equals, all below zero, infinities, and a row with something that is no number."""
    rows = torch.randn(6, 1003, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[1, [17, 400]] = 50.0
    rows[2] = -rows[2].abs() - 1.0
    rows[3, [5, 900]] = torch.inf
    rows[4] = -torch.inf
    rows[5, [300, 700]] = torch.nan
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_columns_as_torch_finds(dtype: torch.dtype) -> None:
    rows = rows_with_edges(dtype)
    best = argmax_rows(rows)
    assert best.dtype == torch.int64 and torch.equal(best, rows.argmax(dim=-1))
    assert best[1] == 17 and best[3] == 5 and best[5] == 300  # the first of equals


def test_any_shape_and_any_layout() -> None:
    rows = rows_with_edges(torch.float32)
    assert torch.equal(argmax_rows(rows.view(2, 3, -1)), rows.argmax(dim=-1).view(2, 3))
    assert torch.equal(argmax_rows(rows[:, ::2]), rows[:, ::2].argmax(dim=-1))
    with torch.inference_mode():
        assert torch.equal(argmax_rows(rows * 1.0), rows.argmax(dim=-1))
    assert argmax_rows(rows.requires_grad_()).shape == (6,)
