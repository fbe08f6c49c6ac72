"""A draft the client brings: the text it expects, such as the file before an edit.

As long as the answer runs along the prediction, the prediction's next tokens are the guesses. Where the answer departs
from it, guessing pauses until the last few tokens written are found in the prediction again; of several places the
first one ahead counts, since an answer that follows a prediction seldom goes back in it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from paceline.core import tree
from paceline.core.protocols import Ability, Output, Round
from paceline.core.sequence import Sequence
from paceline.core.tree import DraftTree
from paceline.errors import OptionError


@dataclass(frozen=True, slots=True)
class PredictionCount:
    """How a prediction fared: tokens of it that became part of the answer, and tokens that were tried and refused."""

    accepted: int
    rejected: int


def prediction_count(text: Sequence) -> PredictionCount:
    """The counts of a text drafted by its own prediction: they are those of its tally."""
    return PredictionCount(text.tally.accepted, text.tally.drafted - text.tally.accepted)


@dataclass(slots=True)
class _Thread:
    """Where in its prediction a text is."""

    prediction: list[int]
    places: dict[tuple[int, ...], list[int]]  # where each run of tokens ends, in rising order
    at: int | None = 0  # the next token expected; None: the thread is lost
    reached: int = 0  # where it was held last
    followed: int = 0  # tokens of the answer that were compared


class Prediction:
    """Guesses that a text goes on as its `prediction` does; texts without one are not guessed for.

    longest, shortest  how many of the last tokens are looked up to find the thread again
    """

    needs: frozenset[Ability] = frozenset()

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise OptionError("prediction needs 1 <= shortest <= longest")
        self.longest, self.shortest = longest, shortest
        self._threads: dict[int, _Thread] = {}

    def begin(self, text: Sequence, prompt: Output | None) -> None:
        if text.prediction:
            self._threads[text.number] = _Thread(list(text.prediction), self._indexed(text.prediction))

    def propose(self, texts: list[Sequence], budgets: list[int]) -> list[DraftTree]:
        return [self._guess(text, budget) for text, budget in zip(texts, budgets)]

    def observe(self, texts: list[Sequence], rounds: list[Round]) -> None:
        pass

    def end(self, text: Sequence) -> None:
        self._threads.pop(text.number, None)

    def _guess(self, text: Sequence, budget: int) -> DraftTree:
        thread = self._threads.get(text.number)
        if thread is None or not budget:
            return tree.empty()
        self._follow(thread, text.written)
        return tree.empty() if thread.at is None else tree.chain(thread.prediction[thread.at : thread.at + budget])

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
