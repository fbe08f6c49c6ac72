"""What speculation should bring, before anything has run.

First the theory, exact under its assumptions: tokens per step from an acceptance rate, or from one rate per position
(acceptance is not the same at each), and the speed-up that follows from the draft's cost. Then the time of a pass from
a data sheet: reading weights and cache against the bandwidth, multiplying against the arithmetic, and a fixed cost per
layer. All that rests on data sheets is a `SpeedEstimate`, and says so wherever it is printed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import OptionError
from paceline.plan.hardware import Card, CardKind
from paceline.plan.memory import Method, Setting
from paceline.plan.model_sizes import ModelShape, Role
from paceline.plan.precision import Precision, weight_bytes

# Shares of the data sheet that good kernels reach: 7B in bf16 on an A100 was reported at 1,400 of 2,039 GB/s.
BANDWIDTH_SHARE = 0.70
ARITHMETIC_SHARE = 0.50
# Launching and waiting, per layer, with captured graphs; it is what small drafts spend most of their time on.
SECONDS_PER_LAYER_GPU = 20e-6
SECONDS_PER_LAYER_CPU = 50e-6
MOST_GUESSES = 16


def tokens_per_step(rate: float, num_draft_tokens: int) -> float:
    """(1 - a^(k+1)) / (1 - a): expected tokens of one round when each guess stands with probability a."""
    _probability(rate)
    _guesses(num_draft_tokens)
    return float(num_draft_tokens + 1) if rate == 1.0 else (1.0 - rate ** (num_draft_tokens + 1)) / (1.0 - rate)


def tokens_per_step_by_position(rates: Sequence[float]) -> float:
    """The same from measured rates, one for each position: that position's guesses accepted, of those reached."""
    reached, expected = 1.0, 1.0
    for rate in rates:
        _probability(rate)
        reached *= rate
        expected += reached
    return expected


def speedup(rate: float, num_draft_tokens: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Against plain decoding. CostModel are in passes of the target over one token: one draft step, one verification."""
    return _gain(tokens_per_step(rate, num_draft_tokens), num_draft_tokens, draft_cost, verify_cost)


def speedup_by_position(rates: Sequence[float], draft_cost: float, verify_cost: float = 1.0) -> float:
    """The same from one acceptance rate for each position."""
    return _gain(tokens_per_step_by_position(rates), len(rates), draft_cost, verify_cost)


def best_draft_tokens(rate: float, draft_cost: float, most: int = MOST_GUESSES) -> int:
    """The k with the highest predicted speed-up; 0 when guessing would only cost."""
    return max(range(most + 1), key=lambda count: (speedup(rate, count, draft_cost), -count))


def rate_from_tokens_per_step(tokens: float, num_draft_tokens: int) -> float:
    """The constant acceptance rate that would give so many tokens per step: the inverse of `tokens_per_step`."""
    if not 1.0 <= tokens <= num_draft_tokens + 1:
        raise OptionError(f"with {num_draft_tokens} guesses a step gives 1 to {num_draft_tokens + 1} tokens, not {tokens:g}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_step(middle, num_draft_tokens) < tokens else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True, slots=True)
class Expectation:
    """Tokens per step as others measured them, from a bad workload to a good one, and where that is written."""

    low: float
    high: float
    source: str


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """Predicted from data sheets and published acceptance. Never a measurement: `paceline tune` measures."""

    plain_tokens_per_second: float
    target_pass_seconds: float
    verify_pass_seconds: float
    draft_seconds: float
    tokens_per_step_low: float
    tokens_per_step_high: float
    basis: str

    @property
    def round_seconds(self) -> float:
        return self.draft_seconds + self.verify_pass_seconds

    @property
    def speedup_low(self) -> float:
        return self.tokens_per_step_low * self.target_pass_seconds / self.round_seconds

    @property
    def speedup_high(self) -> float:
        return self.tokens_per_step_high * self.target_pass_seconds / self.round_seconds


def estimate_speed(setting: Setting, card: Card, expectation: Expectation) -> SpeedEstimate | None:
    """The expected gain of a setting on a card; None for a card whose speed is not known."""
    if card.bandwidth_gbs <= 0 or card.tflops <= 0:
        return None
    plain = pass_seconds(setting.target, setting.precision, setting, card, width=1)
    verify = pass_seconds(setting.target, setting.precision, setting, card, width=setting.nodes + 1)
    return SpeedEstimate(
        plain_tokens_per_second=setting.batch / plain,
        target_pass_seconds=plain,
        verify_pass_seconds=verify,
        draft_seconds=_draft_seconds(setting, card),
        tokens_per_step_low=expectation.low,
        tokens_per_step_high=expectation.high,
        basis=expectation.source,
    )


def pass_seconds(shape: ModelShape, precision: Precision, setting: Setting, card: Card, *, width: int) -> float:
    """One pass over `width` tokens of each text. GPUs that divide the layers take turns: no faster."""
    tokens = width * setting.batch
    # On average over an answer the cache is half full.
    cache = shape.kv_values_per_token * setting.batch * setting.context / 2 * setting.kv_bits / 8
    reading = (_weights_read(shape, precision, tokens) + cache) / (card.bandwidth_gbs * 1e9 * BANDWIDTH_SHARE)
    multiplying = 2 * shape.parameters_per_token * tokens / (card.tflops * 1e12 * ARITHMETIC_SHARE)
    return max(reading, multiplying) + shape.layers * _layer_seconds(card)


def _weights_read(shape: ModelShape, precision: Precision, tokens: int) -> float:
    """Bytes of weights a pass touches: all but an untied table, and of the experts those that any token chose."""
    per_weight = weight_bytes(shape, precision) / max(shape.parameters, 1)
    touched = _share_of_experts(shape, tokens)
    experts = sum(g.count for g in shape.groups if g.role in (Role.MLP, Role.DOWN)) if shape.experts else 0
    rest = shape.parameters_per_token - (experts * shape.experts_used // shape.experts if shape.experts else 0)
    return per_weight * (rest + experts * touched)


def _share_of_experts(shape: ModelShape, tokens: int) -> float:
    """Guessing is dearer for a mixture of experts: each further token brings experts of its own into the pass."""
    if not shape.experts:
        return 0.0
    return 1.0 - (1.0 - shape.experts_used / shape.experts) ** tokens


def _layer_seconds(card: Card) -> float:
    return SECONDS_PER_LAYER_CPU if card.kind is CardKind.CPU else SECONDS_PER_LAYER_GPU


def _draft_seconds(setting: Setting, card: Card) -> float:
    """All the guessing of one round."""
    if setting.method is Method.LAYERSKIP:
        # Exiting after a third of the layers, about where published models were trained to.
        part = replace(setting.target, layers=max(setting.target.layers // 3, 1), stored_bytes=None)
        return setting.num_draft_tokens * pass_seconds(part, setting.precision, setting, card, width=1)
    guesser = setting.guesser
    if guesser is None:
        return 0.0
    if setting.method is not Method.DRAFT:
        return _heads_seconds(guesser, setting, card)
    return setting.num_draft_tokens * pass_seconds(guesser, setting.guesser_precision, setting, card, width=1)


def _heads_seconds(heads: ModelShape, setting: Setting, card: Card) -> float:
    """Heads read all their weights, and EAGLE also the target's table, at each step; Medusa guesses in one step."""
    table = setting.target.vocab * setting.target.width if setting.method is Method.EAGLE else 0
    size = weight_bytes(heads, setting.guesser_precision) + table * setting.precision.compute_bits / 8
    one = size / (card.bandwidth_gbs * 1e9 * BANDWIDTH_SHARE) + _layer_seconds(card)
    return one if setting.method is Method.MEDUSA else one * setting.num_draft_tokens


def _gain(tokens: float, num_draft_tokens: int, draft_cost: float, verify_cost: float) -> float:
    for cost in (draft_cost, verify_cost):
        if not math.isfinite(cost) or cost < 0:
            raise OptionError(f"a cost is a share of a target pass and cannot be {cost:g}")
    return tokens / (num_draft_tokens * draft_cost + verify_cost)


def _probability(rate: float) -> None:
    if not 0.0 <= rate <= 1.0:  # also refuses NaN
        raise OptionError(f"an acceptance rate lies between 0 and 1, not {rate:g}")


def _guesses(num_draft_tokens: int) -> None:
    if num_draft_tokens < 0:
        raise OptionError(f"the number of guesses cannot be negative ({num_draft_tokens})")
