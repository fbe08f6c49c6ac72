"""What a device can do. Other rooms ask these questions and never look at `device.type`."""

from __future__ import annotations

import torch

HOST_MULTIPROCESSORS = 4  # stands for a multiprocessor count where kernels run through Triton's interpreter


def on_host(device: torch.device | str) -> bool:
    """Whether tensors of this device lie in the host's own memory."""
    return torch.device(device).type == "cpu"


def supports_graphs(device: torch.device | str) -> bool:
    """Whether work can be captured as a graph and replayed."""
    return torch.device(device).type == "cuda"


def supports_integer_weights(device: torch.device | str) -> bool:
    """Whether there is a kernel for int8 and int4 weights."""
    return torch.device(device).type in ("cpu", "cuda")


def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel may start before the kernel ahead of it has ended: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def supports_persistent_kernels(device: torch.device) -> bool:
    """Whether a kernel may hold every multiprocessor with a large share of shared memory: Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def multiprocessor_count(device: torch.device) -> int:
    """How many programs run at the same time, each on a multiprocessor of its own."""
    if device.type != "cuda":
        return HOST_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def default_dtype(device: torch.device | str) -> str:
    """The precision a model runs in unless another is chosen."""
    return "float32" if on_host(device) else "bfloat16"


def fits_wide_tiles(device: torch.device, element_size: int) -> bool:
    """Whether tiles of more than 16 rows fit the shared memory: not of every GPU with four bytes a number."""
    return element_size == 2 or on_host(device)


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has done all queued work."""
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    elif place.type == "mps":
        torch.mps.synchronize()
