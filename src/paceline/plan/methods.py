"""What planning knows of a drafting method: which weights it loads and what it costs and brings (`methods.toml`).

The caller passes each method's name and the weights it needs, so a new drafter is planned without a change here: a
method that has no row in the table is counted like the others that need the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from paceline.plan.catalogue import load_table

PLAIN = "none"


class DraftWeights(Enum):
    """What a method loads beside the target."""

    NONE = "none"
    MODEL = "model"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """One drafting method, as plain data.

    sampled             draft tokens are drawn from a distribution that verification needs
    head_layers         decoder layers of a head, each of the target's size
    head_vocab_blocks   residual blocks with an output matrix of their own over the vocabulary (Medusa)
    parallel            all draft tokens come from one pass
    target_layer_share  share of the target's layers that every draft token runs through (early exit)
    expected            published acceptance rates or tokens per step, and their source
    """

    name: str
    weights: DraftWeights
    sampled: bool
    head_layers: int
    head_vocab_blocks: int
    parallel: bool
    target_layer_share: float
    expected: Mapping[str, Any]

    @property
    def drafts(self) -> bool:
        return self.name != PLAIN


def draft_method(name: str, weights: DraftWeights = DraftWeights.NONE) -> DraftMethod:
    """The method of this name, with the table's facts about it or about methods with the same weights."""
    table = load_table("methods.toml")
    row = {**table["weights"][weights.value], **table["method"].get(name, {})}
    return DraftMethod(
        name=name,
        weights=weights,
        sampled=row.get("sampled", False),
        head_layers=row.get("head_layers", 0),
        head_vocab_blocks=row.get("head_vocab_blocks", 0),
        parallel=row.get("parallel", False),
        target_layer_share=row.get("target_layer_share", 0.0),
        expected=row["expected"],
    )


PLAIN_DECODING = draft_method(PLAIN)


def weightless_method() -> DraftMethod:
    """The method to suggest where no second set of weights fits: it drafts from the sequence itself."""
    return draft_method(str(load_table("methods.toml")["suggest_without_weights"]))


def known_weights(name: str) -> DraftWeights | None:
    """The weights that the table says a method needs; None where it does not say."""
    weights = load_table("methods.toml")["method"].get(name, {}).get("weights")
    return None if weights is None else DraftWeights(weights)
