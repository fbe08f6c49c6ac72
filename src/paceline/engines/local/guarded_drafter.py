"""A drafter that cannot harm the output.

Drafts are optional, so a drafter that raises, returns the wrong number of trees, or drafts tokens that do not exist
costs its drafts and never the sequence. Each kind of failure is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from paceline.core.draft_tree import DraftTree, empty
from paceline.core.looped_steps import LoopedSteps
from paceline.core.protocols import Drafter, HeadUpdate, Runner
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, StepResult
from paceline.errors import OutOfMemory

Result = TypeVar("Result")
LOG = logging.getLogger(__name__)


class GuardedDrafter(Drafter):
    """Passes everything on to a drafter and checks what comes back."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter = drafter
        self.needs, self.draft_runner = drafter.needs, drafter.draft_runner
        self._vocab_size = vocab_size
        self._logged: set[str] = set()

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self._try(lambda: self.drafter.begin(seq, prompt))

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        trees = self._try(lambda: self._checked_trees(self.drafter.propose(seqs, num_draft_tokens), num_draft_tokens))
        return [empty() for _ in seqs] if trees is None else trees

    def look_up(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree] | None:
        trees = self._try(lambda: self.drafter.look_up(seqs, num_draft_tokens))
        return None if trees is None else self._try(lambda: self._checked_trees(trees, num_draft_tokens))

    def draft_loop(
        self, target: Runner, seqs: list[Sequence], num_draft_tokens: list[int], num_steps: int
    ) -> LoopedSteps | None:
        """A loop is the runners' own work: once it runs, what it raises is a pass that raised."""
        return self._try(lambda: self.drafter.draft_loop(target, seqs, num_draft_tokens, num_steps))

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        self._try(lambda: self.drafter.observe(seqs, results))

    def end(self, seq: Sequence) -> None:
        self._try(lambda: self.drafter.end(seq))

    def head_update(self, folder: str) -> HeadUpdate | None:
        return self.drafter.head_update(folder)

    def _checked_trees(self, trees: list[DraftTree], num_draft_tokens: list[int]) -> list[DraftTree]:
        """num_draft_tokens: of every sequence."""
        if len(trees) != len(num_draft_tokens):
            self._log("wrong count", f"returned {len(trees)} trees for {len(num_draft_tokens)} sequences")
            return [empty() for _ in num_draft_tokens]
        return [self._checked(tree, count) for tree, count in zip(trees, num_draft_tokens)]

    def _checked(self, tree: DraftTree, count: int) -> DraftTree:
        """The tree, or an empty one where it breaks the protocol. Tokens on a GPU are not waited for."""
        if tree.num_draft_tokens > count:
            self._log("too many", f"returned {tree.num_draft_tokens} draft tokens where {count} were allowed")
            return empty()
        tokens, size = tree.tokens, self._vocab_size
        if len(tree) and not tokens.is_cuda and not _are_within(tokens.tolist(), size):
            self._log("vocabulary", f"drafted a token outside the vocabulary of {size}")
            return empty()
        if tree.probs is not None and tree.probs.shape[-1] != size:
            self._log("probs", f"returned distributions over {tree.probs.shape[-1]} tokens; the vocabulary has {size}")
            return empty()
        return tree

    def _try(self, work: Callable[[], Result]) -> Result | None:
        try:
            return work()
        except OutOfMemory as error:  # it says what to do; where it happened tells nothing more
            self._log(type(error).__name__, f"has no room: {error}")
            return None
        except Exception as error:  # a drafter may be anyone's code
            self._log(type(error).__name__, f"raised {type(error).__name__}: {error}", error)
            return None

    def _log(self, kind: str, what: str, error: Exception | None = None) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            LOG.warning("drafter %s %s; its drafts are dropped", type(self.drafter).__name__, what, exc_info=error)


def _are_within(ids: list[int], size: int) -> bool:
    """Compared as a list: for a few ids on the host, that takes a tenth of what torch needs."""
    return min(ids) >= 0 and max(ids) < size
