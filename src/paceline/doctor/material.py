"""Prompts, made from a seed: plain sentences, records to copy, conversations.

Every prompt begins with a name of its own, so that a server has none of it in its prefix cache when it is first asked.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass

NOUNS = [
    "river",
    "lamp",
    "garden",
    "engine",
    "letter",
    "bridge",
    "island",
    "harbour",
    "winter",
    "stone",
    "market",
    "forest",
    "window",
    "bottle",
    "signal",
]
VERBS = [
    "carries",
    "holds",
    "follows",
    "covers",
    "opens",
    "crosses",
    "measures",
    "repeats",
    "finds",
    "turns",
    "keeps",
    "moves",
    "joins",
    "marks",
]
PLACES = ["under the hill", "near the station", "in the old town", "behind the mill", "by the sea", "over the valley"]
ACCENTS = [
    "żółw",
    "naïve",
    "Ærøskøbing",
    "smörgåsbord",
    "Ωμέγα",
    "東京駅",
    "Пётр",
    "façade",
    "½kg",
    "🦊🌧",
    "éclair",
    "한글",
]


@dataclass(frozen=True, slots=True)
class Entry:
    """A record of a long prompt: a name that is asked for, and the value to be copied."""

    name: str
    value: str

    @property
    def line(self) -> str:
        return f"{self.name} = {self.value}"


def sentence(rng: random.Random) -> str:
    words = (rng.choice(NOUNS), rng.choice(VERBS), rng.choice(NOUNS), rng.choice(PLACES))
    return "The {} {} the {} {}.".format(*words)


def passage(rng: random.Random, chars: int) -> str:
    """Plain sentences of about so many characters, under a name of their own."""
    text = f"Note {rng.getrandbits(48):012x}."
    while len(text) < chars:
        text += f" {sentence(rng)}"
    return text


def repetitive(rng: random.Random, chars: int) -> str:
    """Text that an n-gram drafter finds draft tokens for: few sentences, again and again."""
    sentences = [sentence(rng) for _ in range(3)]
    text = f"Note {rng.getrandbits(48):012x}."
    while len(text) < chars:
        text += " " + " ".join(sentences)
    return text


def identifier(rng: random.Random) -> str:
    parts = [rng.choice(NOUNS), rng.choice(VERBS), format(rng.getrandbits(20), "x")]
    return "_".join(parts) if rng.random() < 0.5 else parts[0] + parts[1].title() + parts[2].upper()


def value(rng: random.Random, kind: int) -> str:
    """A value that no model can know: a UUID, a number, an identifier, or characters of several scripts."""
    if kind % 4 == 0:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    if kind % 4 == 1:
        return f"{rng.randrange(10**9, 10**12):,}.{rng.randrange(1000):03d}"
    if kind % 4 == 2:
        return identifier(rng)
    return " ".join(rng.sample(ACCENTS, 3))


def entries(rng: random.Random, number: int) -> list[Entry]:
    names = [f"{rng.choice(NOUNS)}_{index:02d}" for index in range(number)]
    return [Entry(name, value(rng, index)) for index, name in enumerate(names)]


def copy_task(rng: random.Random, entry: Entry, others: list[Entry], chars: int) -> str:
    """A long prompt of records that ends where the record asked for begins again."""
    lines = [item.line for item in others]
    lines.insert(rng.randrange(len(lines) + 1), entry.line)
    head = f"Settings {rng.getrandbits(48):012x}:\n" + "\n".join(lines)
    filler = passage(rng, max(0, chars - len(head)))
    return f"{head}\n\n{filler}\n\nThe same settings again:\n{entry.name} ="
