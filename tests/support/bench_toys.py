"""A subject made of tables, and three ways to get speculation wrong."""

from __future__ import annotations

from dataclasses import replace

from torch import Generator, Tensor

from paceline.bench.candidates import Subject
from paceline.core import draft_tree
from paceline.core.draft_tree import ROOT, DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sampling import draw
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, StepResult, VerifyResult
from paceline.core.verify import draw_uniforms
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.ngram import Ngram
from paceline.drafting.no_draft import NoDraft
from paceline.engines.local.verifier import Verifier
from paceline.runners.table import TableRunner

CONTEXT = [0, 1, 2, 3, 0, 1, 2]  # its last tokens stood before, so a lookup finds something


def toy_subject(**drafters: Drafter) -> Subject:
    target = TableRunner(vocab_size=5, seed=3)
    twin = DraftModel(TableRunner(vocab_size=5, seed=3, blur=0.5), 5)
    return Subject(target, None, {"none": NoDraft(), "ngram": Ngram(), "draft": twin, **drafters})


class Wrapped:
    """A drafter around another one."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.needs = inner.needs

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self.inner.begin(seq, prompt)

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [
            draft_tokens if draft_tokens.probs is None else self.spoil(draft_tokens) for draft_tokens in self.inner.propose(seqs, num_draft_tokens)
        ]

    def spoil(self, draft_tokens: DraftTree) -> DraftTree:
        raise AssertionError("say what goes wrong")

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        self.inner.observe(seqs, results)

    def end(self, seq: Sequence) -> None:
        self.inner.end(seq)


class WrongQ(Wrapped):
    """Says that its guesses were drawn at another temperature than they were."""

    def spoil(self, draft_tokens: DraftTree) -> DraftTree:
        assert draft_tokens.probs is not None
        flat = draft_tokens.probs**0.5
        return replace(draft_tokens, probs=flat / flat.sum(-1, keepdim=True))


class Anticipating(Wrapped):
    """Looks at its guesses before it says how many there are: keeps only those that look likely."""

    def spoil(self, draft_tokens: DraftTree) -> DraftTree:
        assert draft_tokens.probs is not None
        likely = draft_tokens.probs.gather(-1, draft_tokens.tokens[:, None])[:, 0] > 0.4
        count = int(likely.long().cumprod(0).sum())
        return draft_tree.chain(draft_tokens.tokens[:count], draft_tokens.probs[:count]) if count else draft_tree.empty()


def residual_missing(draft_tokens: DraftTree, target: Tensor, rng: Generator) -> VerifyResult:
    """The token rule, but after a rejection it draws from p itself."""
    uniforms, path, node = draw_uniforms(draft_tokens, rng), [], ROOT
    for child, token in enumerate(draft_tokens.tokens.tolist()):
        q = 1.0 if draft_tokens.probs is None else float(draft_tokens.probs[child, token])
        if draft_tokens.parents[child] != node or float(uniforms[child]) * q >= float(target[node + 1, token]):
            break
        path.append(child)
        node = child
    return VerifyResult(path, int(draw(target[node + 1], uniforms[-1])))


class PlantedJudge(Verifier):
    """Applies a rule of ours under the name of a good one."""

    def _walked(self, seq: Sequence, draft_tokens: DraftTree, target: Tensor) -> VerifyResult:
        return residual_missing(draft_tokens, target, seq.rng)
