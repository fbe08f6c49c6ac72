"""How often draft tokens are accepted, by their depth."""

from __future__ import annotations


class PositionRates:
    """How often a draft token at each depth is accepted, given that all before it are. Old steps fade."""

    def __init__(self, fade: float = 0.95, prior: float = 0.6, weight: float = 2.0) -> None:
        self.fade = fade
        self._prior, self._weight = prior, weight
        self._verified: list[float] = []
        self._accepted: list[float] = []

    def observe(self, reach: int, accepted: int) -> None:
        """A step drafted `reach` depths and `accepted` of them were accepted."""
        verified = min(reach, accepted + 1)  # the rejected depth was verified; those after it were not
        missing = [0.0] * (verified - len(self._verified))
        self._verified += missing
        self._accepted += missing
        # A depth that was not verified fades as well: it leans on its neighbour again, and is drafted again some day.
        for depth in range(len(self._verified)):
            self._verified[depth] = self._verified[depth] * self.fade + (1.0 if depth < verified else 0.0)
            self._accepted[depth] = self._accepted[depth] * self.fade + (1.0 if depth < accepted else 0.0)

    def rates(self, size: int, priors: list[float] | None = None) -> list[float]:
        """The rate at each of `size` depths. With few samples it leans on its prior, or on the depth before."""
        rates: list[float] = []
        rate = self._prior
        for depth in range(size):
            prior = rate if priors is None else priors[depth]
            if depth < len(self._verified):
                rate = (self._accepted[depth] + self._weight * prior) / (self._verified[depth] + self._weight)
            else:
                rate = prior
            rates.append(rate)
        return rates

    def expected_tokens(self, k: int) -> float:
        """Tokens a step of k draft tokens emits."""
        return expected_tokens(self.rates(k))


def expected_tokens(rates: list[float]) -> float:
    """Tokens of a step, by the rates of its depths: 1 + a_1 + a_1·a_2 + …"""
    total, product = 1.0, 1.0
    for rate in rates:
        product *= rate
        total += product
    return total
