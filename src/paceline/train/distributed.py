"""One process or several: torchrun starts one per GPU; each holds the same weights and takes its share of the data.

With a single process every function here does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from paceline.train.placement import on_gpu

LONGEST_WAIT = timedelta(days=2)  # the other processes wait while the first one generates data


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """Rank of this process, and the number of processes."""

    rank: int = 0
    world_size: int = 1

    @property
    def first(self) -> bool:
        """Only the first process writes files and prints."""
        return self.rank == 0


def process_rank() -> ProcessRank:
    return ProcessRank(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ProcessRank()


def join(device: str) -> str:
    """Join the other processes that torchrun started. Returns the device of this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return device
    if on_gpu(device):
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu(device) else "gloo", timeout=LONGEST_WAIT)
    return device


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Return once every process has come here."""
    if dist.is_initialized():
        dist.barrier()


def broadcast(state: dict[str, Tensor]) -> None:
    """Give every process the first one's values, in place."""
    if dist.is_initialized():
        for value in state.values():
            dist.broadcast(value, 0)


def largest(value: float, device: torch.device) -> float:
    """The largest value of all processes: clocks differ, and all must stop after the same step."""
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
