"""Which models go together (`pairs.toml`, with sources), and the tokens per step to expect of a deployment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.plan.catalogue import CatalogueEntry, find_model, load_table
from paceline.plan.memory import Deployment
from paceline.plan.methods import DraftWeights, known_weights
from paceline.plan.model_sizes import ModelSizes
from paceline.plan.predict import Expectation, tokens_per_step
from paceline.plan.support import Support, same_vocabulary


@dataclass(frozen=True, slots=True)
class PublishedResult:
    """A published measurement; None where it was not stated."""

    speedup: float | None
    acceptance: float | None
    tokens_per_step: float | None
    num_draft_tokens: int | None
    hardware: str | None


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A target and its drafter. `draft` is None for a method without a second model; `method` is its name."""

    target: CatalogueEntry
    draft: CatalogueEntry | None
    method: str
    suits: str
    published: PublishedResult
    source: str

    @property
    def is_warning(self) -> bool:
        return self.published.speedup is not None and self.published.speedup < 1.0

    def refusal(self, support: Support) -> str | None:
        """Why it cannot run here; None: it can."""
        return support.pair_refusal(self.target.sizes, self.draft.sizes if self.draft else None, self.method)

    def commands(self, support: Support) -> tuple[str, ...]:
        """The command lines that run it: a head that does not come with paceline is trained first."""
        target = self.target.runnable_name
        serve = f"paceline serve {target}"
        if self.draft is not None:
            return (f"{serve} --draft-model {self.draft.runnable_name}",)
        needs_head = known_weights(self.method) is DraftWeights.HEAD
        if needs_head and not any(support.has_head(self.method, name) for name in self.target.short_names):
            train = f"paceline train {self.method} {target} --out my-head"
            return (train, f"{serve} --method {self.method} --draft-model my-head")
        return (f"{serve} --method {self.method}",)


@cache
def pairs() -> tuple[ModelPair, ...]:
    """Every pair, in the order of the file."""
    return tuple(_pair(row) for row in load_table("pairs.toml")["pair"])


def runnable_pairs(name: str, support: Support) -> tuple[ModelPair, ...]:
    """The pairs with this model as target that can run here."""
    return tuple(pair for pair in pairs_for(name) if pair.refusal(support) is None)


def pairs_for(name: str) -> tuple[ModelPair, ...]:
    """The pairs with this model as target, warnings last; empty when the catalogue lists none."""
    entry = find_model(name)
    matches = [pair for pair in pairs() if entry is not None and pair.target.name == entry.name]
    return tuple(sorted(matches, key=lambda pair: pair.is_warning))


def expectation_for(deployment: Deployment) -> Expectation:
    """Tokens per step to expect: those published for this pair at this k, else the method's usual range."""
    if deployment.num_nodes == 0:
        return Expectation(1.0, 1.0, "plain decoding")
    published = _published_expectation(deployment)
    return published if published is not None else _usual_expectation(deployment)


def _usual_expectation(deployment: Deployment) -> Expectation:
    row = deployment.method.expected
    if "acceptance_low" in row:
        rates = (row["acceptance_low"], row["acceptance_high"])
        low, high = (tokens_per_step(rate, deployment.num_draft_tokens) for rate in rates)
        return Expectation(low, high, row["source"])
    most = float(deployment.num_nodes + 1)
    return Expectation(min(row["tokens_low"], most), min(row["tokens_high"], most), row["source"])


def expectation_from_rate(rate: float, num_draft_tokens: int) -> Expectation:
    """Tokens per step of an acceptance rate that the user states."""
    tokens = tokens_per_step(rate, num_draft_tokens)
    return Expectation(tokens, tokens, f"the acceptance rate given, {rate:g}")


def pairing_note(target: ModelSizes, draft: ModelSizes) -> str | None:
    """A warning about two models that may not share a vocabulary; None when they do, or nothing is known."""
    if not same_vocabulary(target, draft):
        return (
            f"{target.name} and {draft.name} have different tokenizers: draft tokens must be translated, which costs "
            "acceptance; `paceline check` compares them"
        )
    if target.vocab_size != draft.vocab_size:
        return (
            f"the vocabularies differ in size ({target.vocab_size:,} and {draft.vocab_size:,}), often only by padding; "
            "`paceline check` compares them token by token"
        )
    return None


def listed_pair(deployment: Deployment) -> ModelPair | None:
    """The catalogue's entry for exactly this target, draft and method, where there is one."""
    draft = deployment.draft.name if deployment.draft else None
    for pair in pairs_for(deployment.target.name):
        if pair.method == deployment.method.name and (pair.draft.name if pair.draft else None) == draft:
            return pair
    return None


def _published_expectation(deployment: Deployment) -> Expectation | None:
    pair = listed_pair(deployment)
    tokens = _tokens(pair.published, deployment.num_draft_tokens) if pair else None
    if pair is None or tokens is None:
        return None
    return Expectation(tokens, tokens, f"published for this pair: {pair.source}")


def _tokens(published: PublishedResult, num_draft_tokens: int) -> float | None:
    if published.tokens_per_step is not None:
        return min(published.tokens_per_step, num_draft_tokens + 1.0)
    if published.acceptance is not None and published.num_draft_tokens == num_draft_tokens:
        # The published share counts drafted tokens, accepted or not: a step accepts share x k of them and adds one.
        return 1.0 + published.acceptance * num_draft_tokens
    return None


def _pair(row: dict[str, Any]) -> ModelPair:
    numbers = PublishedResult(**{key: row.get(key) for key in PublishedResult.__slots__})
    draft = _entry(row["draft"]) if "draft" in row else None
    return ModelPair(_entry(row["target"]), draft, row["method"], row["suits"], numbers, row["source"])


def _entry(name: str) -> CatalogueEntry:
    entry = find_model(name)
    if entry is None:  # a mistake in the table, not the user's
        raise AssertionError(f"pairs.toml names {name}, which models.toml does not have")
    return entry
