"""What steps in a row leave, on its way to the host, and what the host does about it first."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.looped_steps import STEPS_AHEAD, LoopInput
from paceline.device.memory import host_buffer
from paceline.runners.native.kv_cache import own


class StepReader:
    """Brings the results of steps to the host, each in a place of its own until it is read.

    width: numbers of each sequence
    """

    def __init__(self, num_seqs: int, width: int, device: torch.device) -> None:
        self._places = [host_buffer((num_seqs, width), torch.int64, device) for _ in range(STEPS_AHEAD)]
        cuda = device.type == "cuda"
        self._events = [torch.cuda.Event() if cuda else None for _ in range(STEPS_AHEAD)]  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def send(self, step: int, result: Tensor) -> None:
        place, event = step % STEPS_AHEAD, self._events[step % STEPS_AHEAD]
        self._places[place].copy_(result, non_blocking=True)
        if event is not None:
            event.record()

    def read(self, step: int) -> list[list[int]]:
        event = self._events[step % STEPS_AHEAD]
        if event is not None:
            event.synchronize()
        rows: list[list[int]] = self._places[step % STEPS_AHEAD].tolist()
        return rows


def grow(loop: LoopInput, num_tokens: int) -> None:
    """The target's cache holds so many tokens more."""
    cache = own(loop.seq_cache)
    cache.last_row_start = cache.length
    cache.length += num_tokens
