"""What a token is worth: the seconds that it takes to get one without a draft."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.cost_model import CostModel, StepTiming
from paceline.core.types import StepResult

FADE = 0.98  # of what earlier steps gained, by each further step
MAX_SPEEDUP = 32.0


@dataclass(slots=True)
class Pace:
    """Tokens of recent steps, of one sequence, and their seconds in plain steps."""

    tokens: float = 1.0
    seconds: float = 1.0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens = FADE * self.tokens + tokens
        self.seconds = FADE * self.seconds + seconds

    @property
    def speedup(self) -> float:
        return min(max(1.0, self.tokens / self.seconds), MAX_SPEEDUP)


class TokenWorth:
    """The pace of recent steps: of all, and of those in which no lookup was sent.

    Where lookups know nothing, a draft of a model or a head saves steps of the second kind. These are slower than the
    average of a text that lookups know half of, so that such a draft may pay where the average says that it does not.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._pace, self._unknown_pace = Pace(), Pace()
        self._beside_lookups: frozenset[str] = frozenset()
        self._of_any: dict[int, float] = {}  # by size of batch, in this step
        self.num_steps = 0

    def draft_beside_lookups(self, sources: Iterable[str]) -> None:
        """Drafts of these sources are sent where lookups know nothing; all other sources are lookups."""
        self._beside_lookups = frozenset(sources)

    def of_any(self, num_seqs: int) -> float:
        """Seconds in a batch of this size: less than in a plain step where drafts are accepted."""
        seconds = self._of_any.get(num_seqs)
        if seconds is None:
            plain = self._costs.plain_pass(num_seqs) or 1.0  # by a clock that stands still
            seconds = self._of_any[num_seqs] = plain / (num_seqs * self._pace.speedup)
        return seconds

    def of(self, source: str, num_seqs: int) -> float:
        """Seconds that an accepted token of this source saves."""
        seconds = self.of_any(num_seqs)
        if source not in self._beside_lookups:
            return seconds
        return max(seconds, self._costs.plain_pass(num_seqs) / (num_seqs * self._unknown_pace.speedup))

    def stepped(self, timing: StepTiming, results: list[StepResult], draft_seconds: float) -> None:
        """A step took about this long to draft. Costs are the learned ones: no hiccups."""
        self.num_steps += 1
        self._of_any.clear()
        plain = self._costs.plain_pass(timing.num_seqs)
        if plain <= 0:
            return
        pass_of = self._costs.pass_alone if timing.num_seqs == 1 else self._costs.of(timing.num_seqs).pass_of
        seconds = (pass_of(timing.nodes) + draft_seconds) / plain
        tokens = sum([len(result.emitted) for result in results]) / timing.num_seqs
        self._pace.add(tokens, seconds)
        if not any(map(self._is_looked_up, results)):
            self._unknown_pace.add(tokens, seconds)

    def _is_looked_up(self, result: StepResult) -> bool:
        return len(result.tree.parents) > 0 and result.tree.source not in self._beside_lookups
