"""A subject made of tables, and three ways to get speculation wrong."""

from __future__ import annotations

from dataclasses import replace

from torch import Generator, Tensor

from paceline.bench.subject import Subject
from paceline.core import tree
from paceline.core.acceptance import uniforms
from paceline.core.distribution import draw
from paceline.core.protocols import Drafter, Output, Round, Verdict
from paceline.core.sequence import Sequence
from paceline.core.tree import ROOT, DraftTree
from paceline.decode.judge import Judge
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.ngram import Ngram
from paceline.drafting.nothing import Nothing
from paceline.runners.table import TableRunner

CONTEXT = [0, 1, 2, 3, 0, 1, 2]  # its last tokens stood before, so a lookup finds something


def toy_subject(**drafters: Drafter) -> Subject:
    target = TableRunner(vocab_size=5, seed=3)
    twin = DraftModel(TableRunner(vocab_size=5, seed=3, blur=0.5), 5)
    return Subject(target, None, {"none": Nothing(), "ngram": Ngram(), "draft": twin, **drafters})


class Wrapped:
    """A drafter around another one."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.needs = inner.needs

    def begin(self, text: Sequence, prompt: Output | None) -> None:
        self.inner.begin(text, prompt)

    def propose(self, texts: list[Sequence], budgets: list[int]) -> list[DraftTree]:
        return [
            guesses if guesses.probs is None else self.spoil(guesses) for guesses in self.inner.propose(texts, budgets)
        ]

    def spoil(self, guesses: DraftTree) -> DraftTree:
        raise AssertionError("say what goes wrong")

    def observe(self, texts: list[Sequence], rounds: list[Round]) -> None:
        self.inner.observe(texts, rounds)

    def end(self, text: Sequence) -> None:
        self.inner.end(text)


class WrongQ(Wrapped):
    """Says that its guesses were drawn at another temperature than they were."""

    def spoil(self, guesses: DraftTree) -> DraftTree:
        assert guesses.probs is not None
        flat = guesses.probs**0.5
        return replace(guesses, probs=flat / flat.sum(-1, keepdim=True))


class Anticipating(Wrapped):
    """Looks at its guesses before it says how many there are: keeps only those that look likely."""

    def spoil(self, guesses: DraftTree) -> DraftTree:
        assert guesses.probs is not None
        likely = guesses.probs.gather(-1, guesses.tokens[:, None])[:, 0] > 0.4
        count = int(likely.long().cumprod(0).sum())
        return tree.chain(guesses.tokens[:count], guesses.probs[:count]) if count else tree.empty()


def residual_missing(guesses: DraftTree, target: Tensor, rng: Generator) -> Verdict:
    """The token rule, but after a rejection it draws from p itself."""
    chance, path, node = uniforms(guesses, rng), [], ROOT
    for child, token in enumerate(guesses.tokens.tolist()):
        q = 1.0 if guesses.probs is None else float(guesses.probs[child, token])
        if guesses.parents[child] != node or float(chance[child]) * q >= float(target[node + 1, token]):
            break
        path.append(child)
        node = child
    return Verdict(path, int(draw(target[node + 1], chance[-1])))


class PlantedJudge(Judge):
    """Applies a rule of ours under the name of a good one."""

    def _walked(self, text: Sequence, guesses: DraftTree, target: Tensor) -> Verdict:
        return residual_missing(guesses, target, text.rng)
