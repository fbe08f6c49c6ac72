"""How far one model's next-token distribution is from another's, over a text.

For every position of the text: the divergence KL(reference ‖ tested) in nats, and whether both prefer the same token.
Of a tested engine that shows only its likeliest tokens, the others count as one group: the divergence between groups is
a lower bound. Errors are standard errors over blocks of neighbouring positions, which are alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from paceline.bench.engine_pool import OpenDecoder
from paceline.core.protocols import Runner
from paceline.core.types import Row
from paceline.errors import OptionError

WINDOW_TOKENS = 256  # read from an empty context each
BLOCK_POSITIONS = 32
NUM_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class PositionDistance:
    """One position. Surprisals are of the text's own next token, in nats; None where the engine does not show it."""

    divergence: float
    same_best: bool
    reference_surprisal: float
    tested_surprisal: float | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error; None with fewer than two blocks."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, values: list[float]) -> Estimate:
        starts = range(0, len(values), BLOCK_POSITIONS)
        blocks = [fmean(values[start : start + BLOCK_POSITIONS]) for start in starts]
        return cls(fmean(values), stdev(blocks) / math.sqrt(len(blocks)) if len(blocks) > 1 else None)


@dataclass(frozen=True, slots=True)
class TextDistance:
    """All positions of a text together. is_bound: the divergence is at least this."""

    positions: int
    divergence: Estimate
    same_best: Estimate
    reference_perplexity: float
    tested_perplexity: float | None
    is_bound: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def text_windows(tokens: list[int], most: int) -> list[list[int]]:
    """The first `most` tokens in windows. Raises OptionError where the text is too short to say anything."""
    tokens = tokens[:most]
    if len(tokens) < 2:
        raise OptionError("the text is too short: it must have two tokens or more")
    windows = [tokens[start : start + WINDOW_TOKENS] for start in range(0, len(tokens), WINDOW_TOKENS)]
    return [window for window in windows if len(window) > 1]


def model_distance(reference: Runner, tested: Runner, windows: Iterable[list[int]]) -> TextDistance:
    """Between two models whose logits are known."""
    size = min(reference.info.vocab_size, tested.info.vocab_size)
    positions = [
        position
        for window in windows
        for position in _between(log_probs(reference, window, size), log_probs(tested, window, size), window)
    ]
    return _total(positions, is_bound=False)


def engine_distance(reference: Runner, decoder: OpenDecoder, windows: Iterable[list[int]]) -> TextDistance:
    """Between a model and an engine that gives the log-probabilities of its likeliest tokens."""
    positions: list[PositionDistance] = []
    for window in windows:
        expected = log_probs(reference, window, reference.info.vocab_size)
        for index in range(1, len(window)):
            positions.append(_to_top(expected[index - 1], _likeliest(decoder, window[:index]), window[index]))
    return _total(positions, is_bound=True)


def log_probs(runner: Runner, window: list[int], vocab_size: int) -> Tensor:
    """After each token of a window but the last. [tokens - 1, vocab], on the CPU."""
    seq_cache = runner.new_cache()
    try:
        logits = runner.forward([Row.chain(seq_cache, window)]).logits[:-1, :vocab_size]
        return torch.log_softmax(logits.float(), dim=-1).cpu()
    finally:
        runner.free(seq_cache)


def _between(reference: Tensor, tested: Tensor, window: list[int]) -> list[PositionDistance]:
    divergences = (reference.exp() * (reference - tested)).sum(-1).clamp_min(0)
    same = reference.argmax(-1) == tested.argmax(-1)
    text = torch.tensor(window[1:])[:, None]
    surprisals = [-side.gather(1, text)[:, 0] for side in (reference, tested)]
    rows = zip(divergences.tolist(), same.tolist(), *(surprisal.tolist() for surprisal in surprisals))
    return [PositionDistance(*row) for row in rows]


def _likeliest(decoder: OpenDecoder, context: list[int]) -> dict[int, float]:
    """Log-probabilities of an engine's likeliest next tokens."""
    [result] = decoder.generate([context], max_new_tokens=1, ignore_eos=True, temperature=0.0, logprobs=NUM_LOGPROBS)
    if not result.logprobs:
        raise OptionError("the engine gives no log-probabilities, so its distribution is not known; use --engine local")
    first = result.logprobs[0]
    return {**dict(first.top), first.token: first.logprob}


def _to_top(reference: Tensor, top: dict[int, float], text_token: int) -> PositionDistance:
    """KL between the likeliest tokens of an engine, one by one, and all others as one group."""
    expected = {token: float(reference[token]) for token in top}
    divergence = sum(math.exp(log_p) * (log_p - top[token]) for token, log_p in expected.items())
    rest_p, rest_q = (max(1e-9, 1 - sum(map(math.exp, side.values()))) for side in (expected, top))
    divergence += rest_p * math.log(rest_p / rest_q)
    best = max(top, key=lambda token: top[token])
    surprisal = -top[text_token] if text_token in top else None
    return PositionDistance(
        max(divergence, 0.0), int(reference.argmax()) == best, -float(reference[text_token]), surprisal
    )


def _total(positions: list[PositionDistance], *, is_bound: bool) -> TextDistance:
    tested = [position.tested_surprisal for position in positions]
    known = [surprisal for surprisal in tested if surprisal is not None]
    return TextDistance(
        len(positions),
        Estimate.of([position.divergence for position in positions]),
        Estimate.of([float(position.same_best) for position in positions]),
        math.exp(fmean(position.reference_surprisal for position in positions)),
        math.exp(fmean(known)) if len(known) == len(positions) else None,
        is_bound,
    )
