"""What is measured: a target, the drafters that can guess for it, and one setting of them at a time.

The parts are made by assembly, which stands above this room; they are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.core.draft_length import DraftLengthPolicy, FixedDraftLength
from paceline.core.protocols import Drafter, Runner
from paceline.engines.local.step import EngineParts
from paceline.engines.local.verifier import Verifier
from paceline.errors import OptionError
from paceline.hub.tokenizer import Tokenizer

PLAIN = "none"


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to decode."""

    method: str
    num_draft_tokens: int | str = 0
    temperature: float = 0.0
    acceptance: str = "token"

    @property
    def plain(self) -> bool:
        return self.method == PLAIN

    @property
    def baseline(self) -> Setting:
        """Plain decoding at the same temperature: what a speed-up is measured against."""
        return Setting(PLAIN, 0, self.temperature)

    def __str__(self) -> str:
        words = ["plain"] if self.plain else [self.method, f"k={self.num_draft_tokens}"]
        words += [f"T={self.temperature:g}"] if self.temperature else []
        words += [self.acceptance] if self.acceptance != "token" else []
        return " ".join(words)


def _no_peer(role: str) -> None:
    """Neither the target nor the draft is a model of transformers."""


def _fixed(method: str, num_draft_tokens: int | str) -> DraftLengthPolicy:
    if not isinstance(num_draft_tokens, int):
        raise OptionError("here the number of draft tokens must be a whole number")
    return FixedDraftLength(num_draft_tokens)


@dataclass(frozen=True, slots=True)
class Subject:
    """The models under test.

    drafters     by method; plain decoding among them
    missing      methods that cannot be tried here, and why
    make_draft_length  a fresh budget for a method and a k ("auto" too, where the maker knows costs)
    make_judge   by the name of an acceptance rule
    peer_model   loads the model named, in transformers' own code; None where it has no such form
    """

    target: Runner
    tokenizer: Tokenizer | None
    drafters: Mapping[str, Drafter]
    missing: Mapping[str, str] = field(default_factory=dict)
    make_draft_length: Callable[[str, int | str], DraftLengthPolicy] = _fixed
    make_judge: Callable[[str], Verifier] = Verifier
    peer_model: Callable[[str], Any | None] = _no_peer

    def drafter(self, method: str) -> Drafter:
        if method in self.missing:
            raise OptionError(f"method {method} cannot be used here: {self.missing[method]}")
        if method not in self.drafters:
            raise OptionError(f"there is no method {method!r} here; there are {', '.join(self.drafters)}")
        return self.drafters[method]

    def parts(self, setting: Setting, budget: DraftLengthPolicy | None = None) -> EngineParts:
        """The parts of one setting; `budget` replaces the one it would get."""
        chosen = budget or self.make_draft_length(setting.method, setting.num_draft_tokens)
        return EngineParts(self.target, self.drafter(setting.method), chosen, self.make_judge(setting.acceptance))

    @property
    def guessing_methods(self) -> list[str]:
        return [method for method in self.drafters if method != PLAIN]
