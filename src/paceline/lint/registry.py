"""What the linter knows of a kind of head: its readings, and how it drafts along a text that exists already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from paceline.errors import OptionError
from paceline.heads.checkpoint import Checkpoint
from paceline.heads.registry import HeadSpec, spec_of
from paceline.lint.comparison import DraftedTokens
from paceline.lint.reading import HeadReading
from paceline.lint.target import Anchors, StatedText, TargetFacts


@dataclass(frozen=True, slots=True)
class HeadLint:
    """The linter of one kind of head.

    kinds     names of heads.registry
    readings  every reading of a checkpoint besides its own, for a target
    draft     (head, text, anchors, k): draft tokens after every anchor, the text's own tokens taken as accepted.
              Raises PairError for a head of another target.
    """

    kinds: tuple[str, ...]
    readings: Callable[[Checkpoint, TargetFacts], list[HeadReading]]
    draft: Callable[[Any, StatedText, Anchors, int], DraftedTokens]


MODULES: dict[str, str] = {
    "eagle1": "paceline.lint.eagle",
    "eagle3": "paceline.lint.eagle",
    "medusa": "paceline.lint.medusa",
    "dflash": "paceline.lint.dflash",
    "mtp": "paceline.lint.mtp",
}
_registered: dict[str, HeadLint] = {}


def register(lint: HeadLint) -> None:
    """Add the linter of kinds of heads that were added at run time."""
    _registered.update(dict.fromkeys(lint.kinds, lint))


def kind_of(checkpoint: Checkpoint) -> HeadSpec:
    """The kind of a head, which has readings. Raises WeightsError for no head, OptionError for one without readings."""
    kind = spec_of(checkpoint)
    lint_of(kind.name)
    return kind


def lint_of(kind: str) -> HeadLint:
    """The linter of a kind of head. Raises OptionError where it has none."""
    if kind in _registered:
        return _registered[kind]
    if kind not in MODULES:
        kinds = ", ".join(dict.fromkeys((*_registered, *MODULES)))
        raise OptionError(f"heads of kind {kind} have no readings to try; check takes heads of the kinds {kinds}")
    lint: HeadLint = import_module(MODULES[kind]).LINT
    return lint
