"""What an engine is doing now and has done so far: the numbers behind /metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.tally import Tally


@dataclass(slots=True)
class Load:
    """A picture of an engine at one moment. Counts only ever rise; the first group is of now."""

    waiting: int = 0
    running: int = 0
    pages_used: int = 0  # by texts in progress
    pages_cached: int = 0  # by finished texts kept for others; given back when asked for
    pages_free: int = 0

    prefix_hits: int = 0
    prefix_tokens: int = 0
    preemptions: int = 0
    failures: int = 0  # rounds that broke
    prompt_tokens: int = 0
    ks: dict[int, int] = field(default_factory=dict)  # rounds of one text by their k
    by_method: dict[str, Tally] = field(default_factory=dict)
