"""What an engine is doing now and has done so far: the numbers behind /metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.stats import SpecStats


@dataclass(slots=True)
class EngineStats:
    """A picture of an engine at one moment. Counts only ever rise; the first group is of now."""

    waiting: int = 0
    running: int = 0
    blocks_used: int = 0  # by sequences in progress
    blocks_cached: int = 0  # by finished sequences kept for others; given back when asked for
    blocks_free: int = 0

    prefix_hits: int = 0
    prefix_tokens: int = 0
    preemptions: int = 0
    failures: int = 0  # steps that broke
    prompt_tokens: int = 0
    ks: dict[int, int] = field(default_factory=dict)  # steps of one sequence by their k
    by_method: dict[str, SpecStats] = field(default_factory=dict)
