"""A draft the client brings: the sequence it expects, such as the file before an edit.

As long as the answer runs along the prediction, the prediction's next tokens are the draft tokens. Where the answer departs
from it, guessing pauses until the last few tokens written are found in the prediction again; of several places the
first one ahead counts, since an answer that follows a prediction seldom goes back in it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, RowOutput, StepResult
from paceline.errors import OptionError


@dataclass(frozen=True, slots=True)
class PredictionCount:
    """How a prediction fared: tokens of it that became part of the answer, and tokens that were tried and refused."""

    accepted: int
    rejected: int


def prediction_count(seq: Sequence) -> PredictionCount:
    """The counts of a sequence drafted by its own prediction: they are those of its stats."""
    return PredictionCount(seq.stats.accepted, seq.stats.drafted - seq.stats.accepted)


@dataclass(slots=True)
class _Thread:
    """Where in its prediction a sequence is."""

    prediction: list[int]
    places: dict[tuple[int, ...], list[int]]  # where each run of tokens ends, in rising order
    at: int | None = 0  # the next token expected; None: the thread is lost
    reached: int = 0  # where it was held last
    followed: int = 0  # tokens of the answer that were compared


class Prediction(Drafter):
    """DraftOutput that a sequence goes on as its `prediction` does; sequences without one are not guessed for.

    longest, shortest  how many of the last tokens are looked up to find the thread again
    """

    needs: frozenset[Capability] = frozenset()

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise OptionError("prediction needs 1 <= shortest <= longest")
        self.longest, self.shortest = longest, shortest
        self._threads: dict[int, _Thread] = {}

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        if seq.params.prediction:
            self._threads[seq.seq_id] = _Thread(list(seq.params.prediction), self._indexed(seq.params.prediction))

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [self._guess(seq, budget) for seq, budget in zip(seqs, num_draft_tokens)]

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        pass

    def end(self, seq: Sequence) -> None:
        self._threads.pop(seq.seq_id, None)

    def _guess(self, seq: Sequence, budget: int) -> DraftTree:
        thread = self._threads.get(seq.seq_id)
        if thread is None or not budget:
            return draft_tree.empty()
        self._follow(thread, seq.generated)
        return draft_tree.empty() if thread.at is None else draft_tree.chain(thread.prediction[thread.at : thread.at + budget])

    def _follow(self, thread: _Thread, written: list[int]) -> None:
        """Go along the prediction with what was written since; look for the thread where it was lost."""
        for token in written[thread.followed :]:
            if thread.at is not None and thread.prediction[thread.at : thread.at + 1] == [token]:
                thread.at += 1
                thread.reached = thread.at
            else:
                thread.at = None
        thread.followed = len(written)
        if thread.at is None:
            thread.at = self._found(thread, written)

    def _found(self, thread: _Thread, written: list[int]) -> int | None:
        """Where the last tokens stand in the prediction: the longest run first, ahead before behind."""
        for size in range(min(self.longest, len(written)), self.shortest - 1, -1):
            ends = thread.places.get(tuple(written[-size:]))
            if ends:
                ahead = bisect_left(ends, thread.reached)
                return ends[ahead] if ahead < len(ends) else ends[-1]
        return None

    def _indexed(self, prediction: list[int]) -> dict[tuple[int, ...], list[int]]:
        places: dict[tuple[int, ...], list[int]] = {}
        for end in range(self.shortest, len(prediction) + 1):
            for size in range(self.shortest, min(self.longest, end) + 1):
                places.setdefault(tuple(prediction[end - size : end]), []).append(end)
        return places
