"""The catalogue of accelerators (`hardware.toml`): memory, bandwidth and arithmetic by their data sheets."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

from paceline.errors import OptionError
from paceline.plan.catalogue import load_table

GIB = 1 << 30


class AcceleratorKind(Enum):
    """The kind decides how much of the memory a model can use."""

    CUDA = "cuda"
    ROCM = "rocm"
    APPLE = "apple"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU, Apple chip or CPU, by its data sheet."""

    name: str
    kind: AcceleratorKind
    memory_gib: float
    bandwidth_gbs: float
    tflops: float

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * GIB)

    @property
    def reserved_bytes(self) -> int:
        """What the model cannot use: the share of the driver and its libraries, or of the system on shared memory."""
        if self.kind in (AcceleratorKind.CUDA, AcceleratorKind.ROCM):
            return GIB
        # Apple wires at most about three quarters of the memory for the GPU; elsewhere the system needs a part.
        share = 0.25 if self.kind is AcceleratorKind.APPLE else 0.15
        return round(self.memory_bytes * share)

    @property
    def usable_bytes(self) -> int:
        return self.memory_bytes - self.reserved_bytes


@cache
def accelerators() -> tuple[Accelerator, ...]:
    """Every accelerator, by kind and in the order of the file."""
    table = load_table("hardware.toml")
    return tuple(
        Accelerator(name, kind, row["memory"], row["bandwidth"], row["tflops"])
        for kind in AcceleratorKind
        for name, row in table[kind.value].items()
    )


def find_accelerator(name: str, memory_gib: float | None = None) -> Accelerator:
    """The accelerator of this name in any spelling (`RTX 4090`, `NVIDIA GeForce RTX 4090`, `rtx-4090`).

    `memory_gib` replaces its memory, for the same chip sold with another amount. Raises OptionError for a name that
    is not in the catalogue, with the nearest ones, or for an impossible memory.
    """
    key = _key(name)
    by_key = {_key(accelerator.name): accelerator for accelerator in accelerators()}
    if key not in by_key:
        raise OptionError(_unknown(name, key, by_key))
    accelerator = by_key[key]
    return accelerator if memory_gib is None else replace(accelerator, memory_gib=_checked_memory(memory_gib))


def unnamed_accelerator(memory_gib: float) -> Accelerator:
    """An accelerator with a known memory and unknown speed: enough to say what fits, not how fast it is."""
    return Accelerator(f"{memory_gib:g} GiB", AcceleratorKind.CUDA, _checked_memory(memory_gib), 0.0, 0.0)


def _checked_memory(memory_gib: float) -> float:
    if not math.isfinite(memory_gib) or memory_gib <= 1:
        raise OptionError(f"--memory is the accelerator's memory in GiB and must be above 1, not {memory_gib:g}")
    return memory_gib


# Parts of product names that users leave out.
_NOISE = ("nvidia", "geforce", "amd", "radeon", "instinct", "apple", "tesla", "sxm5", "sxm4", "sxm", "graphics")
_SYNONYMS = {"a100": "a10080gb", "h10080gb": "h100", "a6000": "rtxa6000"}


def _key(name: str) -> str:
    """The letters and digits that identify a product."""
    key = "".join(part for part in re.split(r"[^a-z0-9]+", name.lower()) if part not in _NOISE)
    return _SYNONYMS.get(key, key)


def _unknown(name: str, key: str, by_key: dict[str, Accelerator]) -> str:
    near = difflib.get_close_matches(key, by_key, n=3, cutoff=0.5)
    hint = f" did you mean {' or '.join(by_key[match].name for match in near)}?" if near else ""
    return (
        f"no accelerator called '{name}' in the catalogue:{hint} "
        "`paceline plan --list hardware` shows all of them; --memory GIB plans for any other"
    )
