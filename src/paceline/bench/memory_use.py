"""The memory that an open engine holds: of this process and all that it started, and of the GPUs."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import torch

PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on the host (resident) and on GPUs. None: this system does not say."""

    host_bytes: int | None
    gpu_bytes: int | None

    def since(self, before: MemoryUse) -> MemoryUse:
        """What was added. Never below 0: pages that were given back are none of the engine's."""
        return MemoryUse(_added(self.host_bytes, before.host_bytes), _added(self.gpu_bytes, before.gpu_bytes))

    @property
    def total(self) -> int | None:
        if self.host_bytes is None:
            return self.gpu_bytes
        return self.host_bytes + (self.gpu_bytes or 0)


def memory_use() -> MemoryUse:
    """Now. What is freed before stays with the allocator, so the difference is right only where nothing was."""
    gc.collect()
    return MemoryUse(_host_bytes(), _gpu_bytes())


def _added(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else max(0, after - before)


def _host_bytes() -> int | None:
    """Resident bytes of this process and its descendants, by /proc."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").glob("[0-9]*")}
    if os.getpid() not in parents:
        return None
    own = {os.getpid()}
    while added := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= added
    return sum(_resident(pid) for pid in own)


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):  # it ended meanwhile
        return 0


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError, ValueError):
        return 0


def _gpu_bytes() -> int | None:
    """In use on all GPUs that can be seen, by whatever process."""
    if not torch.cuda.is_available():
        return None
    used = 0
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        used += total - free
    return used
