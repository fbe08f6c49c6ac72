"""One process or several: torchrun starts one a GPU, and each holds the same weights and takes its share of the data.

Everything here does nothing where there is only one process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

LONGEST_WAIT = timedelta(days=2)  # the others wait while the first process lets the target write texts


@dataclass(frozen=True, slots=True)
class Share:
    """Number of this process, and how many there are."""

    number: int = 0
    of: int = 1

    @property
    def first(self) -> bool:
        """The first process alone writes files and speaks."""
        return self.number == 0


def share() -> Share:
    return Share(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Share()


def join(device: str) -> str:
    """Meet the other distributed that torchrun has started. Returns the device of this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return device
    on_gpu = device.startswith("cuda")
    if on_gpu:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=LONGEST_WAIT)
    return device


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def wait() -> None:
    """Until every process has come here."""
    if dist.is_initialized():
        dist.barrier()


def alike(state: dict[str, Tensor]) -> None:
    """Give every process the first one's values, in place."""
    if dist.is_initialized():
        for value in state.values():
            dist.broadcast(value, 0)


def largest(value: float, device: torch.device) -> float:
    """The largest of all distributed' values: clocks differ, and all have to stop after the same step."""
    if not dist.is_initialized():
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared)


def average_gradients(weights: Sequence[Tensor]) -> None:
    if not dist.is_initialized():
        return
    for weight in weights:
        if weight.grad is not None:
            dist.all_reduce(weight.grad, op=dist.ReduceOp.SUM)
            weight.grad.div_(dist.get_world_size())
