"""Logits -> the distribution that is really sampled.

The one place that knows temperature, top-k, top-p, min-p, penalties and biases. Greedy decoding is the row that is 1
at the argmax. Target and drafter both use it, so the q a draft token was drawn from and the p that verifies it are
computed the same way.

Order: bias and penalties on the logits, then temperature, then top-k, top-p, min-p on the tempered distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.config import as_int
from paceline.core.rng import keyed_exponentials
from paceline.errors import OptionError

# Within these bounds logits stay finite in float32, whatever settings come together: an infinite one would make all
# probabilities of a row NaN.
LARGEST_NUMBER = 1e12
LEAST_SCALE = 1e-18  # a temperature below it is 0, its limit; top_p is never below it
BLOCK_TOKENS = 256  # of a keyed draw: about the root of a vocabulary, so that both of its races are short


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults are greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # of tokens in prompt and answer, as in transformers
    presence_penalty: float = 0.0  # of tokens in the answer, as in OpenAI's API
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "top_p"):
            value = getattr(self, name)
            object.__setattr__(self, name, _number(name, value))
        if self.temperature < 0:
            raise OptionError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise OptionError(f"min_p must lie between 0 and 1, not {self.min_p}")
        if (as_int(self.top_k) or 0) < 0:
            raise OptionError(f"top_k must be 0 (all) or a positive whole number, not {self.top_k!r}")
        if self.repetition_penalty < 1 / LARGEST_NUMBER:
            raise OptionError(f"repetition_penalty must be above 0, and not this small: {self.repetition_penalty}")
        object.__setattr__(self, "temperature", self.temperature if self.temperature >= LEAST_SCALE else 0.0)
        object.__setattr__(self, "top_p", max(self.top_p, LEAST_SCALE))
        object.__setattr__(self, "top_k", _whole("top_k", self.top_k))
        object.__setattr__(self, "seed", None if self.seed is None else _whole("seed", self.seed))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether the distribution depends on which tokens came before, beyond the logits themselves."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def plain_greedy(self) -> bool:
        """Argmax of the raw logits decides; nothing else needs to be computed."""
        return self.greedy and not self.penalised and not self.logit_bias

    @property
    def plainly_drawn(self) -> bool:
        """The temperature is all that shapes the distribution drawn from."""
        cut = self.top_k or self.top_p < 1 or self.min_p
        return not (self.greedy or cut or self.penalised or self.logit_bias)


def _number(name: str, value: Any) -> float:
    """A number of any kind, numpy's included; Python's own numbers keep their type."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise OptionError(f"{name} must be a number, not {value!r}")
    number = value if isinstance(value, int | float) else float(value)
    if not -LARGEST_NUMBER <= number <= LARGEST_NUMBER:  # NaN is not
        raise OptionError(f"{name} must be a number, at most {LARGEST_NUMBER:g}, not {value!r}")
    return number


def _whole(name: str, value: Any) -> int:
    number = as_int(value)
    if number is None:
        raise OptionError(f"{name} must be a whole number, not {value!r}")
    return number


def _checked_bias(bias: Any) -> dict[int, float]:
    """Token ids to finite numbers. OpenAI's string keys are understood."""
    if not isinstance(bias, Mapping):
        raise OptionError(f"logit_bias maps token ids to numbers, not {bias!r}")
    checked: dict[int, float] = {}
    for token, value in bias.items():
        number = int(token) if isinstance(token, str) and token.isascii() and token.isdigit() else as_int(token)
        if number is None:
            raise OptionError(f"logit_bias is keyed by token ids, not {token!r}")
        checked[number] = _number("a logit_bias", value)
    return checked


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens before a node: what was given, and what was written, the path to the node included."""

    prompt: Sequence[int]
    generated: Sequence[int]


def distribution(
    logits: Tensor,
    sampling: SamplingParams,
    histories: Sequence[TokenHistory] | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """The distribution each row is sampled from.

    logits     [rows, vocab] or [vocab]
    histories  one a row; needed only when `sampling.penalised`
    allowed    bool [rows, vocab] (a grammar's mask), or None
    Returns float32 of the same shape; rows sum to 1.
    """
    if logits.dim() == 1:
        return distribution(logits[None], sampling, histories, None if allowed is None else allowed[None])[0]
    scores = adjusted(logits, sampling, histories, allowed)
    if sampling.greedy:
        return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    probs = torch.softmax(scores / sampling.temperature, dim=-1)
    return _truncate(probs, sampling)


def adjusted(
    logits: Tensor,
    sampling: SamplingParams,
    histories: Sequence[TokenHistory] | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Logits in float32 after masks, biases and penalties; the argmax of this is what greedy decoding says."""
    scores = logits.float()
    if sampling.penalised:
        if histories is None or len(histories) != scores.shape[0]:
            raise OptionError("penalties need the tokens before every row")
        scores = torch.stack([_penalise(row, sampling, history) for row, history in zip(scores, histories)])
    if sampling.logit_bias:
        scores = scores + _bias_row(sampling.logit_bias, scores)
    if allowed is not None:
        scores = scores.masked_fill(~allowed.to(scores.device), -torch.inf)
    return scores


def _penalise(row: Tensor, sampling: SamplingParams, history: TokenHistory) -> Tensor:
    row = row.clone()
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*history.prompt, *history.generated}), dtype=torch.int64, device=row.device)
        score = row[seen]
        row[seen] = torch.where(score < 0, score * sampling.repetition_penalty, score / sampling.repetition_penalty)
    if history.generated and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(history.generated)
        tokens = torch.tensor(list(counts), dtype=torch.int64, device=row.device)
        times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
        row[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return row


def _bias_row(bias: Mapping[int, float], like: Tensor) -> Tensor:
    row = torch.zeros(like.shape[-1])
    for token, value in bias.items():
        if not 0 <= token < like.shape[-1]:
            raise OptionError(f"logit_bias names token {token}; the vocabulary has {like.shape[-1]}")
        row[token] = value
    return row.to(like.device)


def _truncate(probs: Tensor, sampling: SamplingParams) -> Tensor:
    """Cut the tail off and share its weight among the rest."""
    if not sampling.top_k and sampling.top_p == 1 and not sampling.min_p:
        return probs
    if sampling.top_k and sampling.top_k < probs.shape[-1]:
        least = probs.topk(sampling.top_k, dim=-1).values[..., -1:]
        probs = _renormalise(probs.masked_fill(probs < least, 0.0))
    if sampling.top_p < 1:
        probs = _renormalise(probs.masked_fill(probs < _nucleus_edge(probs, sampling.top_p), 0.0))
    if sampling.min_p:
        edge = sampling.min_p * probs.amax(dim=-1, keepdim=True)
        probs = _renormalise(probs.masked_fill(probs < edge, 0.0))
    return probs


def _nucleus_edge(probs: Tensor, top_p: float) -> Tensor:
    """The least probability inside the smallest set that holds top_p; ties at the edge stay in, on both sides alike."""
    ordered = probs.sort(dim=-1, descending=True).values
    before = ordered.cumsum(dim=-1) - ordered
    inside = before < top_p
    return ordered.masked_fill(~inside, torch.inf).amin(dim=-1, keepdim=True)


def _renormalise(probs: Tensor) -> Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token under a uniform number, by the inverse of the cumulative distribution.

    probs [..., vocab], uniform [...] in [0, 1); returns int64 [...]. One number decides one token, so that the same
    random numbers give the same token on every device and in every batch. Sums in float64: in float32 the tail of a
    large vocabulary would be misweighed.
    """
    sums = probs.double().cumsum(dim=-1)
    total = sums[..., -1:]
    # The product may step up to the total itself; the number below it falls on the last token that has any weight.
    point = torch.minimum(uniform.to(sums).unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, point, right=True).squeeze(-1).clamp_max(probs.shape[-1] - 1)


def draw_keyed(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token that wins a race whose noise is keyed by the number and the token id (Gumbel-max).

    probs [..., vocab], uniform [...] in [0, 1); returns int64 [...]. In a race the entry i arrives after E_i / w_i with
    E_i exponential, and the first is i with probability w_i / sum(w): log w_i plus Gumbel noise is largest there.
    Blocks of tokens race first, weighed by their sums, then the tokens of the winning block, with noise of their own:
    the probability of a token is P(block) · p / P(block) = p.

    Unlike `draw`, a rounding error of relative size e in probs changes the token with a probability of order e: noise
    stays with its token, while a cumulative sum carries every error on to all tokens behind it. For the same reason a
    near distribution drawn with the same number nearly always gives the same token.
    """
    number, vocab_size = uniform.to(probs.device).unsqueeze(-1), probs.shape[-1]
    if vocab_size <= BLOCK_TOKENS:
        return _race(probs, number, torch.arange(vocab_size, device=probs.device))
    padded = torch.nn.functional.pad(probs, (0, -vocab_size % BLOCK_TOKENS))
    blocks = padded.reshape(*probs.shape[:-1], -1, BLOCK_TOKENS)
    weights = blocks.sum(dim=-1, dtype=torch.float64)  # [..., blocks]
    block = _race(weights, number, -1 - torch.arange(weights.shape[-1], device=probs.device))
    inside = blocks.take_along_dim(block[..., None, None], dim=-2).squeeze(-2)  # [..., BLOCK_TOKENS]
    first = block * BLOCK_TOKENS
    return first + _race(inside, number, first.unsqueeze(-1) + torch.arange(BLOCK_TOKENS, device=probs.device))


def _race(weights: Tensor, number: Tensor, counters: Tensor) -> Tensor:
    """Who arrives first: one of several, each with its share of the weights. A weight of 0 never arrives."""
    return (keyed_exponentials(number, counters) / weights).argmin(dim=-1)
