"""How much is asked: --quick, the default, --thorough."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Effort:
    """prompts of a scenario, tokens of an answer, characters of a long prompt, draws of a sampled check, seeds,
    requests at a time, prompts that push others out of the prefix cache."""

    name: str
    prompts: int
    tokens: int
    chars: int
    draws: int
    seeds: int
    loads: tuple[int, ...]
    fillers: int


EFFORTS = {
    effort.name: effort
    for effort in (
        Effort("quick", 3, 24, 1200, 400, 8, (8,), 4),
        Effort("normal", 6, 40, 4000, 800, 12, (8, 32), 12),
        Effort("thorough", 16, 96, 24000, 2000, 32, (8, 32), 64),
    )
}
