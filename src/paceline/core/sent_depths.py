"""How long a draft is worth making where longer ones take longer, and only a part of each is sent."""

from __future__ import annotations

from dataclasses import dataclass, field

WEIGHT = 0.06  # of one draft in how often a depth is sent; more while there were few
BOUND = 0.8  # a depth that is not made is taken to be sent this much less often than the one before it, …
BOUND_WEIGHT = 0.02  # … as time goes by, …
ALL_SENT_WEIGHT = 0.6  # … and sooner after a draft that was sent whole
FURTHER = 3  # depths behind such a draft


@dataclass(slots=True)
class SentDepths:
    """How often the draft token at each depth was sent, of the drafts that had one, and what one that is sent wins."""

    _shares: list[float] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)
    _won: float = 0.0  # seconds, without those of making it
    _num_sent: int = 0  # drafts of which something was sent

    def observe(self, made: int, count: int, won: float) -> None:
        """Of `made` draft tokens `count` were sent, which won so many seconds. A tree counts like a chain as long."""
        while len(self._shares) < made:
            self._shares.append(0.0)
            self._counts.append(0)
        for depth in range(made):
            self._counts[depth] += 1
            self._move(depth, float(depth < count), max(WEIGHT, 1.0 / self._counts[depth]))
        for depth in range(made, len(self._shares)):
            weight = ALL_SENT_WEIGHT if count == made and depth < made + FURTHER else BOUND_WEIGHT
            bound = BOUND * self._shares[depth - 1] if depth else 1.0
            self._move(depth, max(bound, self._shares[depth]), weight)
        if count:
            self._num_sent += 1
            self._won += max(WEIGHT, 1.0 / self._num_sent) * (max(0.0, won / count) - self._won)

    def _move(self, depth: int, towards: float, weight: float) -> None:
        self._shares[depth] += weight * (towards - self._shares[depth])

    def length(self, limit: int, each: float) -> int:
        """Draft tokens that are worth making if each takes so many seconds; one at least, `limit` at most."""
        if not self._num_sent:
            return limit if not self._counts else min(limit, 1 + FURTHER)
        for depth in range(1, limit):
            share = self._shares[depth] if depth < len(self._shares) else self._share_beyond(depth)
            if share * self._won <= each:
                return depth
        return limit

    def _share_beyond(self, depth: int) -> float:
        return self._shares[-1] * BOUND ** (depth + 1 - len(self._shares))
