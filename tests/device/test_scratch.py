"""One tensor for all outputs that are never needed at once."""

from __future__ import annotations

import torch

from paceline.device.scratch import Scratch

CPU = torch.device("cpu")


def test_all_views_share_memory_that_moves_only_to_grow() -> None:
    scratch = Scratch()
    first = scratch.of((3, 5), CPU)
    assert scratch.of((4, 4), CPU).data_ptr() == first.data_ptr()  # 15 numbers are rounded up to 16
    larger = scratch.of((2, 3, 4), CPU)
    assert larger.shape == (2, 3, 4) and larger.data_ptr() != first.data_ptr()
    assert scratch.of((1, 2), CPU).data_ptr() == larger.data_ptr()
    larger.fill_(1.0)
    assert not first.any()  # views from before the move keep their memory
