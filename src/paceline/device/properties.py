"""What a device can do. Other rooms ask these questions and never look at `device.type`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from paceline.errors import OptionError

DEVICES = ("cuda", "mps", "cpu")  # the first that is there is the default
AMPERE = (8, 0)  # Triton's kernels of bfloat16 exist from this compute capability on
LEAST_SHARED_MEMORY = 150_000  # bytes of a block, for tiles of float32: not of GPUs for desktops
HOST_MULTIPROCESSORS = 4  # stands for a multiprocessor count where kernels run through Triton's interpreter


def chosen_device(name: str | None, devices: tuple[str, ...] = DEVICES) -> str:
    """The device's name: the first of `devices` that is there, unless told. Raises OptionError."""
    if name is None or name == "auto":
        return next(device for device in devices if _device_count(device))
    device = _parsed(name, devices)
    kind, count = device.type, _device_count(device.type)
    if not count:
        raise OptionError(f"device {kind} was asked for, and torch sees no {kind.upper()} device here; use device cpu")
    if (device.index or 0) >= count:
        raise OptionError(f"device {name} was asked for, and the last one here is {kind}:{count - 1}")
    return name


def _parsed(name: str, devices: tuple[str, ...]) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # refused as any other kind
    if device.type not in devices:
        choices = ", ".join("cuda, cuda:N" if kind == "cuda" else kind for kind in devices)
        raise OptionError(f"device must be one of {choices}; not {name!r}")
    return device


def _device_count(kind: str) -> int:
    if kind == "cuda":
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    return int(kind == "cpu" or torch.backends.mps.is_available())


def on_host(device: torch.device | str) -> bool:
    """Whether tensors of this device lie in the host's own memory."""
    return torch.device(device).type == "cpu"


def supports_graphs(device: torch.device | str) -> bool:
    """Whether work can be captured as a graph and replayed."""
    return torch.device(device).type == "cuda"


def supports_fused_kernels(device: torch.device | str, element_size: int) -> bool:
    """Whether the tiles of the Triton kernels fit this device, with numbers of so many bytes: from Ampere on, and with
    four bytes where a block may have much shared memory. They sum in float32, so not with more."""
    if not supports_graphs(device) or element_size > 4:
        return False
    facts = torch.cuda.get_device_properties(device)
    shared_memory = getattr(facts, "shared_memory_per_block_optin", LEAST_SHARED_MEMORY)  # not in torch's types
    return (facts.major, facts.minor) >= AMPERE and (element_size <= 2 or shared_memory >= LEAST_SHARED_MEMORY)


def device_in_use(device: torch.device | str) -> AbstractContextManager[None]:
    """This thread captures, compiles and records events on the device that its model is on: `cuda:1`, say."""
    place = torch.device(device)
    return torch.cuda.device(place) if place.type == "cuda" and place.index is not None else nullcontext()


def may_hold_memory() -> bool:
    """Whether this process may have put anything into the memory of a GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def supports_float64(device: torch.device | str) -> bool:
    """Whether there are tensors of float64, which drawing a token needs: not on Apple's GPUs."""
    return torch.device(device).type != "mps"


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
