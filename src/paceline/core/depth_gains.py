"""How long a draft is worth making where longer ones take longer, and only a part of each is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

WEIGHT = 0.06  # of one draft in what a depth wins; more while there were few
BOUND = 0.6  # a depth that is not made is taken to win this much of what the one before it does, …
BOUND_WEIGHT = 0.02  # … as time goes by, …
WHOLE_WEIGHT = 0.1  # … and sooner with each draft in a row of which all was sent
UNSENT = 4  # draft tokens to make until something is sent


@dataclass(slots=True)
class DepthGains:
    """Seconds that the draft token at each depth wins, without those of making it: none where it is not sent."""

    _gains: list[float] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)
    _is_sent: bool = False  # something of a draft was
    _num_whole: int = 0  # drafts in a row of which all was sent

    def observe(self, made: int, won: list[float]) -> None:
        """Of `made` draft tokens these were sent, and won so many seconds each. A tree counts like a chain as long."""
        while len(self._gains) < made:
            self._gains.append(0.0)
            self._counts.append(0)
        gains, counts, unsent = self._gains, self._counts, [0.0] * (made - len(won))
        for depth, seconds in enumerate([*won, *unsent]):
            counts[depth] += 1
            gains[depth] += max(WEIGHT, 1.0 / counts[depth]) * (seconds - gains[depth])
        self._num_whole = self._num_whole + 1 if not unsent else 0
        weight = min(1.0, BOUND_WEIGHT + WHOLE_WEIGHT * self._num_whole)
        for depth in range(max(1, made), len(gains)):
            gains[depth] += weight * max(0.0, BOUND * gains[depth - 1] - gains[depth])
        self._is_sent |= bool(won)

    def length(self, limit: int, making: Callable[[int], float]) -> int:
        """Draft tokens that win most. making: the seconds that so many take. One at least, `limit` at most.

        All lengths are compared: kernels take several rows at a time, and what one more costs rises in steps.
        """
        if not self._is_sent:
            return min(limit, UNSENT) if self._counts else limit
        best, most, won, gain = 1, float("-inf"), 0.0, 0.0
        for length in range(1, limit + 1):
            gain = self._gains[length - 1] if length <= len(self._gains) else BOUND * gain
            won += gain
            if won - making(length) > most:
                best, most = length, won - making(length)
        return best
