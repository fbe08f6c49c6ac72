"""What a device can do, asked by the rooms above instead of its type."""

from __future__ import annotations

import torch


def has_graphs(device: torch.device) -> bool:
    """Whether work on this device can be captured as a CUDA graph."""
    return device.type == "cuda"


def is_asynchronous(device: torch.device) -> bool:
    """Whether reading a tensor on the host waits for work that is still queued on the device."""
    return device.type != "cpu"
