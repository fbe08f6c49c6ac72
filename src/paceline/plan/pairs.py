"""Which models go together, who says so (`pairs.toml`), and what a method may be expected to bring."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.plan.catalogue import CatalogueEntry, find_model, load_table
from paceline.plan.memory import Method, Setting
from paceline.plan.model_sizes import ModelShape
from paceline.plan.predict import Expectation, tokens_per_step


@dataclass(frozen=True, slots=True)
class Published:
    """What somebody measured; None where they did not say."""

    speedup: float | None
    acceptance: float | None
    tokens_per_step: float | None
    num_draft_tokens: int | None
    hardware: str | None


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and what guesses for it. `draft` is None for a method without a second model."""

    target: CatalogueEntry
    draft: CatalogueEntry | None
    method: Method
    suits: str
    published: Published
    source: str

    @property
    def is_warning(self) -> bool:
        return self.published.speedup is not None and self.published.speedup < 1.0

    @property
    def command(self) -> str:
        draft = f" --draft {self.draft.runnable_name}" if self.draft else ""
        return f"paceline generate --target {self.target.runnable_name}{draft} --method {self.method.value}"


@cache
def pairs() -> tuple[Pair, ...]:
    """Every pair, in the order of the file."""
    return tuple(_pair(row) for row in load_table("pairs.toml")["pair"])


def pairs_for(name: str) -> tuple[Pair, ...]:
    """The pairs with this model as target, those that warn last; empty when the catalogue knows of none."""
    entry = find_model(name)
    found = [pair for pair in pairs() if entry is not None and pair.target.name == entry.name]
    return tuple(sorted(found, key=lambda pair: pair.is_warning))


def expectation_for(setting: Setting) -> Expectation:
    """Tokens per step to expect: what was published for this very pair at this k, else the method's usual range."""
    row = load_table("pairs.toml")["expect"][setting.method.value]
    if setting.nodes == 0:
        return Expectation(1.0, 1.0, "plain decoding")
    published = _published_tokens(setting)
    if published is not None:
        return published
    if "rate_low" in row:
        low, high = (tokens_per_step(row[key], setting.num_draft_tokens) for key in ("rate_low", "rate_high"))
        return Expectation(low, high, row["source"])
    most = float(setting.nodes + 1)
    return Expectation(min(row["tokens_low"], most), min(row["tokens_high"], most), row["source"])


def expectation_from_rate(rate: float, num_draft_tokens: int) -> Expectation:
    """From an acceptance rate the user has measured or wishes to try."""
    tokens = tokens_per_step(rate, num_draft_tokens)
    return Expectation(tokens, tokens, f"the acceptance rate given, {rate:g}")


def pairing_note(target: ModelShape, draft: ModelShape) -> str | None:
    """A word of warning about two models that may not share a vocabulary; None when they do, or nothing is known."""
    if target.tokenizer and draft.tokenizer and target.tokenizer != draft.tokenizer:
        return (
            f"{target.name} and {draft.name} have different tokenizers: guesses must be re-tokenised, which costs "
            "acceptance; `paceline check` says what this pair gets"
        )
    if target.vocab != draft.vocab:
        return (
            f"the vocabularies differ in size ({target.vocab:,} and {draft.vocab:,}), often only by padding; "
            "`paceline check` compares them token by token"
        )
    return None


def listed_pair(setting: Setting) -> Pair | None:
    """The catalogue's entry for this very target, draft and method, where there is one."""
    draft = setting.draft.name if setting.draft else None
    for pair in pairs_for(setting.target.name):
        if pair.method is setting.method and (pair.draft.name if pair.draft else None) == draft:
            return pair
    return None


def _published_tokens(setting: Setting) -> Expectation | None:
    pair = listed_pair(setting)
    tokens = _tokens(pair.published, setting.num_draft_tokens) if pair else None
    if pair is None or tokens is None:
        return None
    return Expectation(tokens, tokens, f"published for this pair: {pair.source}")


def _tokens(published: Published, num_draft_tokens: int) -> float | None:
    if published.tokens_per_step is not None:
        return min(published.tokens_per_step, num_draft_tokens + 1.0)
    if published.acceptance is not None and published.num_draft_tokens == num_draft_tokens:
        # The published share counts drafted tokens, accepted or not: a step keeps share x k of them, and adds one.
        return 1.0 + published.acceptance * num_draft_tokens
    return None


def _pair(row: dict[str, Any]) -> Pair:
    numbers = Published(**{key: row.get(key) for key in Published.__slots__})
    draft = _known(row["draft"]) if "draft" in row else None
    return Pair(_known(row["target"]), draft, Method(row["method"]), row["suits"], numbers, row["source"])


def _known(name: str) -> CatalogueEntry:
    entry = find_model(name)
    if entry is None:  # a mistake in our own table, not the user's
        raise AssertionError(f"pairs.toml names {name}, which models.toml does not have")
    return entry
