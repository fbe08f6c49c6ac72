"""Prompts of the sequences that the target generates.

A seed is a question, or only its opening: then the target invents the rest. seed_makers.py makes the plain kinds,
task_makers.py those that set a task; their words are in prompt_openings.py and prompt_tasks.py, their functions and
prose come from library_texts.py. Nothing is downloaded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.train import seed_makers, task_makers
from paceline.train.seed_makers import Seed


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of the kinds of seeds, and the share of sequences that are raw text rather than chat."""

    shares: dict[str, float]
    raw_share: float = 0.2


SHORT = Mix(
    {
        "chat": 0.20,
        "topic": 0.05,
        "code": 0.27,
        "math": 0.17,
        "text": 0.05,
        "translation": 0.06,
        "question": 0.06,
        "edit": 0.06,
        "turns": 0.05,
        "language": 0.03,
    }
)
LONG = Mix({"summarize": 0.50, "retrieval": 0.24, "code": 0.10, "text": 0.06, "edit": 0.05, "turns": 0.05})

MAKERS: dict[str, Callable[[random.Random], Seed]] = {
    "chat": seed_makers.chat,
    "math": seed_makers.mathematics,
    "code": seed_makers.code,
    "summarize": seed_makers.summary,
    "text": seed_makers.raw_text,
    "topic": task_makers.topic,
    "translation": task_makers.translation,
    "question": task_makers.question,
    "retrieval": task_makers.retrieval,
    "edit": task_makers.edit,
    "turns": task_makers.turns,
    "language": task_makers.other_language,
}


class SeedStream:
    """An endless, reproducible stream of seeds."""

    def __init__(self, mix: Mix, number: int) -> None:
        self._rng = random.Random(number)
        self._mix = mix

    def __iter__(self) -> SeedStream:
        return self

    def __next__(self) -> Seed:
        kind = self._rng.choices(list(self._mix.shares), list(self._mix.shares.values()))[0]
        seed = MAKERS[kind](self._rng)
        raw = self._rng.random() < self._mix.raw_share and bool(seed.text) and not seed.history
        return replace(seed, chat=seed.chat and not raw)
