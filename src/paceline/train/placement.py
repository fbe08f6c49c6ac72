"""What training asks of the device it runs on: precision, autocast and free memory."""

from __future__ import annotations

import torch

Device = torch.device | str


def on_gpu(device: Device) -> bool:
    return torch.device(device).type == "cuda"


def target_dtype(device: Device) -> torch.dtype:
    """The precision of the frozen target: bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if on_gpu(device) else torch.float32


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU; a CPU computes in the weights' own fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu(device))


def free_bytes(device: Device) -> int:
    """Free memory of a GPU; 0 on a CPU, where nothing is sized by it."""
    return torch.cuda.mem_get_info(device)[0] if on_gpu(device) else 0
