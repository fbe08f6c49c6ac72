"""The catalogue of cards (`cards.toml`): how much they hold, how fast they read, how fast they multiply."""

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


class CardKind(Enum):
    """Whose memory it is decides how much of it a model may have."""

    CUDA = "cuda"
    ROCM = "rocm"
    APPLE = "apple"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Card:
    """One device, by its data sheet."""

    name: str
    kind: CardKind
    memory_gib: float
    bandwidth_gbs: float
    tflops: float

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * GIB)

    @property
    def reserved_bytes(self) -> int:
        """What the model cannot have: the driver and its libraries, or on shared memory the system."""
        if self.kind in (CardKind.CUDA, CardKind.ROCM):
            return GIB
        # Apple wires at most about three quarters of the memory for the GPU; elsewhere the system needs its part.
        share = 0.25 if self.kind is CardKind.APPLE else 0.15
        return round(self.memory_bytes * share)

    @property
    def usable_bytes(self) -> int:
        return self.memory_bytes - self.reserved_bytes


@cache
def cards() -> tuple[Card, ...]:
    """Every card, by kind and in the order of the file."""
    table = load_table("cards.toml")
    return tuple(
        Card(name, kind, row["memory"], row["bandwidth"], row["tflops"])
        for kind in CardKind
        for name, row in table[kind.value].items()
    )


def find_card(name: str, memory_gib: float | None = None) -> Card:
    """The card of this name, written anyhow (`RTX 4090`, `NVIDIA GeForce RTX 4090`, `rtx-4090`).

    `memory_gib` replaces its memory, for the same chip sold with another amount. Raises OptionError for a card that
    is not in the catalogue, naming the nearest ones, or for an impossible memory.
    """
    wanted = _letters(name)
    by_letters = {_letters(card.name): card for card in cards()}
    if wanted not in by_letters:
        raise OptionError(_unknown(name, wanted, by_letters))
    card = by_letters[wanted]
    return card if memory_gib is None else replace(card, memory_gib=_possible_memory(memory_gib))


def nameless_card(memory_gib: float) -> Card:
    """A card of which only the memory is known: good for the verdict, not for a speed."""
    return Card(f"{memory_gib:g} GiB", CardKind.CUDA, _possible_memory(memory_gib), 0.0, 0.0)


def _possible_memory(memory_gib: float) -> float:
    if not math.isfinite(memory_gib) or memory_gib <= 1:
        raise OptionError(f"--memory is the card's memory in GiB and must be above 1, not {memory_gib:g}")
    return memory_gib


# What sellers put around the name and nobody types.
_NOISE = ("nvidia", "geforce", "amd", "radeon", "instinct", "apple", "tesla", "sxm5", "sxm4", "sxm", "graphics")


def _letters(name: str) -> str:
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word not in _NOISE]
    plain = "".join(words)
    return {"a100": "a10080gb", "h10080gb": "h100", "a6000": "rtxa6000"}.get(plain, plain)


def _unknown(name: str, wanted: str, by_letters: dict[str, Card]) -> str:
    near = difflib.get_close_matches(wanted, by_letters, n=3, cutoff=0.5)
    hint = f" did you mean {' or '.join(by_letters[key].name for key in near)}?" if near else ""
    return (
        f"no card called '{name}' in the catalogue:{hint} "
        "`paceline plan --list cards` shows all of them; --memory GIB plans for any other"
    )
