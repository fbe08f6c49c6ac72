"""Kernels run through Triton's interpreter where there is no GPU; it must be chosen before Triton is first imported."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)
