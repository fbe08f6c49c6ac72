"""How many graphs a GPU would capture, counted without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paceline.device.graphs import EagerPool

Output = TypeVar("Output")


class CountingPool(EagerPool):
    """Counts what it captures."""

    def __init__(self) -> None:
        super().__init__()
        self.captured = 0

    def capture(self, work: Callable[[], Output]) -> Callable[[], Output]:
        self.captured += 1
        return work
