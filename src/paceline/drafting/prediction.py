"""Predicted outputs: the draft is a text the client expects, such as a file before an edit.

As long as the output follows the prediction, its next tokens are the draft tokens. Where the output departs from it,
drafting pauses until the last few tokens occur in the prediction again; of several positions the first one ahead
counts, since an output that follows a prediction rarely goes back in it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput
from paceline.drafting.registry import DrafterContext, DrafterSpec, WeightsNeeded, options_of
from paceline.errors import OptionError


@dataclass(frozen=True, slots=True)
class PredictionCount:
    """Tokens of a prediction that became part of the output, and tokens that were drafted and rejected."""

    accepted: int
    rejected: int


def prediction_count(seq: Sequence) -> PredictionCount:
    """The counts of a sequence drafted by its own prediction: they follow from its stats."""
    return PredictionCount(seq.stats.accepted, seq.stats.drafted - seq.stats.accepted)


START_FOLLOWED = 1  # an output may begin with other words: the more of it has followed, the more is drafted


def _confidence(followed: int) -> float:
    """The longer an output has followed a prediction, the surer it goes on."""
    return 1.0 - 1.0 / (2.0 + followed)


@dataclass(slots=True)
class _PredictionState:
    """The position of a sequence in its prediction."""

    prediction: list[int]
    ends: dict[tuple[int, ...], list[int]]  # where each n-gram of it ends, in rising order
    position: int | None = 0  # of the next token expected; None: the output has departed from the prediction
    last_position: int = 0  # the last one before a departure
    num_compared: int = 0  # tokens of the output
    followed: int = START_FOLLOWED  # tokens of the output in a row that were the prediction's


class Prediction(Drafter):
    """Proposes the tokens of a sequence's `prediction`; sequences without one get no draft tokens.

    longest, shortest  how many of the last tokens are looked up to find the position again
    """

    looks_up = True

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise OptionError("prediction needs 1 <= shortest <= longest")
        self.longest, self.shortest = longest, shortest
        self._states: dict[int, _PredictionState] = {}

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        if seq.params.prediction:
            self._states[seq.seq_id] = _PredictionState(list(seq.params.prediction), self._index(seq.params.prediction))

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        if not self._states:
            return [draft_tree.empty()] * len(seqs)
        return [self._draft(seq, k) for seq, k in zip(seqs, num_draft_tokens)]

    def end(self, seq: Sequence) -> None:
        self._states.pop(seq.seq_id, None)

    def _draft(self, seq: Sequence, num_draft_tokens: int) -> DraftTree:
        state = self._states.get(seq.seq_id)
        if state is None or not num_draft_tokens:
            return draft_tree.empty()
        self._follow(state, seq.generated)
        if state.position is None:
            return draft_tree.empty()
        tokens = state.prediction[state.position : state.position + num_draft_tokens]
        confidence = [_confidence(state.followed + depth) for depth in range(len(tokens))]
        return draft_tree.chain(tokens, confidence=confidence)

    def _follow(self, state: _PredictionState, output: list[int]) -> None:
        """Advance along the prediction with the new tokens of the output; search again where they depart from it."""
        for token in output[state.num_compared :]:
            if state.position is not None and state.prediction[state.position : state.position + 1] == [token]:
                state.position += 1
                state.last_position = state.position
                state.followed += 1
            else:
                state.position, state.followed = None, 0
        state.num_compared = len(output)
        if state.position is None:
            state.position = self._search(state, output)

    def _search(self, state: _PredictionState, output: list[int]) -> int | None:
        """The position after the last tokens: the longest n-gram first, positions ahead before those behind."""
        for size in range(min(self.longest, len(output)), self.shortest - 1, -1):
            ends = state.ends.get(tuple(output[-size:]))
            if ends:
                ahead = bisect_left(ends, state.last_position)
                return ends[ahead] if ahead < len(ends) else ends[-1]
        return None

    def _index(self, prediction: list[int]) -> dict[tuple[int, ...], list[int]]:
        ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(self.shortest, len(prediction) + 1):
            for size in range(self.shortest, min(self.longest, end) + 1):
                ends.setdefault(tuple(prediction[end - size : end]), []).append(end)
        return ends


def build(context: DrafterContext) -> Prediction:
    return Prediction(**context.options)


SPEC = DrafterSpec(
    name="prediction",
    summary="follows a text the client expects, such as a file before an edit",
    weights=WeightsNeeded.NONE,
    build=build,
    options=options_of(Prediction),
    reference="Predicted Outputs, https://platform.openai.com/docs/guides/predicted-outputs",
    reads_prediction=True,
    takes_draft_model=False,
)
