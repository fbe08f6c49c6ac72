"""What rounding can explain: how far apart two passes of different width put the log-probability of one token.

The page calls a difference between outputs with and without speculation a near-tie only within this bound.
"""

from __future__ import annotations

# Two steps between neighbouring logits of 16 to 32 in a half precision; in float32, where a step is 2e-6, what the
# sums of all layers add up to. Weights of eight and four bits round activations as coarsely as bfloat16.
NEAR_TIE_LOGPROBS = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.25}
ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
COARSEST = max(NEAR_TIE_LOGPROBS.values())


def near_tie_logprob(dtype: str) -> float:
    """The largest difference of log-probabilities that rounding in this dtype explains."""
    return NEAR_TIE_LOGPROBS.get(ALIASES.get(dtype, dtype), COARSEST)
