"""The buffers in which heads keep keys and values of all sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.heads.attention import KeyValues
from paceline.heads.kv_cache import FIRST_CAPACITY, KeyBuffers


def entries(count: int) -> KeyValues:
    return KeyValues(torch.ones(2, count, 4), torch.full((2, count, 4), 2.0))


@pytest.mark.parametrize("fails_at", [1, 2])
def test_buffers_that_found_no_memory_to_grow_are_as_good_as_before(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys or values were not allocated; the next sequence finds both of one size."""
    buffers = KeyBuffers(2, 4, torch.zeros(1))
    row, calls, zeros = buffers.take(), [0], torch.zeros

    def no_memory(*arguments: Any, **options: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == fails_at:
            raise torch.OutOfMemoryError("made up")
        return zeros(*arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch, "zeros", no_memory)
        buffers.write(row, entries(FIRST_CAPACITY + 1))
    version = buffers.version
    buffers.write(row, entries(FIRST_CAPACITY + 1))
    written = buffers.written(row, FIRST_CAPACITY + 1)
    assert written.keys.shape == written.values.shape == (2, FIRST_CAPACITY + 1, 4)
    assert bool((written.keys == 1).all()) and bool((written.values == 2).all())
    assert buffers.version == version + 1, "whoever captured the old buffers knows that they have moved"
