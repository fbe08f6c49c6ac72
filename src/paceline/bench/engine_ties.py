"""Greedy outputs of an engine with speculation and without: the same, a near-tie, or different.

An engine gives no logits, but log-probabilities. How much they round is measured where the outputs part: the same
position is reached once token by token, and once as the end of a prompt.
"""

from __future__ import annotations

from paceline.bench.candidates import DecodeSetting
from paceline.bench.engine_pool import EnginePool
from paceline.bench.near_ties import LEAST_TOLERANCE, SAFETY, Agreement, GreedyComparison
from paceline.config import NONE
from paceline.errors import PacelineError

NUM_LOGPROBS = 5
PLAIN = DecodeSetting(NONE)


def compare_outputs(pool: EnginePool, prompt: list[int], plain: list[int], other: list[int]) -> GreedyComparison:
    """At the first difference plain decoding says how close the two tokens are. Opens the plain engine if need be."""
    if plain == other:
        return GreedyComparison(Agreement.SAME)
    index = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), min(len(plain), len(other)))
    try:
        read = _logprobs(pool, prompt + plain[:index], 1)
        stepped = _logprobs(pool, prompt, index + 1)
    except PacelineError:  # an engine without log-probabilities cannot explain a difference
        return GreedyComparison(Agreement.BUG, index, float("inf"))
    gap = _gap(pool, read, plain[index:], other[index:])
    rounding = max((abs(read[token] - stepped[token]) for token in read.keys() & stepped.keys()), default=0.0)
    tolerance = max(LEAST_TOLERANCE, SAFETY * rounding)
    return GreedyComparison(Agreement.NEAR_TIE if abs(gap) <= tolerance else Agreement.BUG, index, gap, tolerance)


def _logprobs(pool: EnginePool, prompt: list[int], num_tokens: int) -> dict[int, float]:
    """Log-probabilities of the likeliest tokens at the last of `num_tokens` tokens that plain decoding generates."""
    [result] = pool.generate(PLAIN, [prompt], max_new_tokens=num_tokens, ignore_eos=True, logprobs=NUM_LOGPROBS)
    last = result.logprobs[-1] if result.logprobs else None
    return {} if last is None else {**dict(last.top), last.token: last.logprob}


def _gap(pool: EnginePool, logprobs: dict[int, float], plain: list[int], other: list[int]) -> float:
    """How much likelier plain decoding's token is. An output that ends here has the end token next."""
    ends = pool.decoder(PLAIN).info.eos_token_ids
    values = []
    for tokens in (plain, other):
        choices = tokens[:1] or ends
        values.append(max((logprobs.get(token, float("-inf")) for token in choices), default=float("-inf")))
    gap = values[0] - values[1]
    return float("inf") if gap != gap else gap
