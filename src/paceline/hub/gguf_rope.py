"""Rope of a GGUF file -> the rope parameters of a Hugging Face config.

llama.cpp stores the scaling of Llama 3 not as its settings but as one divisor for each frequency, in the tensor
rope_freqs.weight. Settings that give the same divisors are found again; a tensor that none gives is refused.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import WeightsError
from paceline.hub.gguf_fields import GgufFields

FREQUENCY_FACTORS = "rope_freqs.weight"
DEFAULT_THETA = 10000.0
USUAL_LENGTHS = tuple(1 << power for power in range(5, 21))  # of the context before it was extended
USUAL_LOW, USUAL_HIGH = 1.0, 4.0
FITTED_LENGTH = 8192
TOLERANCE = 2e-6  # relative; the divisors are stored in float32

Factors = NDArray[np.float64]


def rope_parameters(fields: GgufFields, head_dim: int, max_seq_len: int, factors: Factors | None) -> dict[str, Any]:
    """The rope parameters of a Hugging Face config. Raises WeightsError for a rope that transformers does not have."""
    rotated = fields.number("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise fields.refused(f"{fields.architecture}.rope.dimension_count", rotated)
    theta = float(fields.number("rope.freq_base", DEFAULT_THETA))
    scaling = _scaling(fields, max_seq_len)
    if factors is None or np.all(factors == 1):
        return {**scaling, "rope_theta": theta}
    if scaling["rope_type"] != "default":
        raise WeightsError(f"{fields.file_name} scales its rope twice: by {FREQUENCY_FACTORS} and by rope.scaling")
    return {**llama3_parameters(factors, head_dim, theta), "rope_theta": theta}


def _scaling(fields: GgufFields, max_seq_len: int) -> dict[str, Any]:
    kind = fields.of_architecture("rope.scaling.type", "linear")  # what llama.cpp takes where the key is missing
    factor = float(fields.number("rope.scaling.factor") or fields.number("rope.scale_linear") or 1.0)
    original = int(fields.number("rope.scaling.original_context_length") or max_seq_len)
    attention = float(fields.number("rope.scaling.attn_factor", 1.0))
    attention *= float(fields.number("rope.scaling.yarn_attn_factor", 1.0))
    if kind not in ("none", "linear", "yarn"):
        raise fields.refused(f"{fields.architecture}.rope.scaling.type", kind)
    if kind == "yarn":
        return _yarn(fields, factor, original, attention)
    if attention != 1.0:
        raise fields.refused(f"{fields.architecture}.rope.scaling.attn_factor", attention)
    return {"rope_type": "default"} if kind == "none" or factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _yarn(fields: GgufFields, factor: float, original: int, attention: float) -> dict[str, Any]:
    extrapolation = fields.number("rope.scaling.yarn_ext_factor", 1.0)
    if extrapolation not in (1.0, -1.0):  # -1: as the type says
        raise fields.refused(f"{fields.architecture}.rope.scaling.yarn_ext_factor", extrapolation)
    parameters = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": float(fields.number("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(fields.number("rope.scaling.yarn_beta_slow", 1.0)),
    }
    if attention != 1.0:  # llama.cpp multiplies it with the usual one; transformers takes the product
        parameters["attention_factor"] = attention * (1.0 + 0.1 * math.log(factor))
    return parameters


def llama3_parameters(factors: Factors, head_dim: int, theta: float) -> dict[str, Any]:
    """The settings of Llama 3's scaling that give these divisors. Raises WeightsError if none does."""
    if factors.shape != (head_dim // 2,):
        raise WeightsError(f"the tensor {FREQUENCY_FACTORS} has {factors.size} values for {head_dim // 2} frequencies")
    factor = float(factors.max())
    usual = [(length, USUAL_LOW, USUAL_HIGH) for length in USUAL_LENGTHS]
    for original, low, high in usual + _fitted(factors, theta):
        candidate = _llama3_factors(factor, low, high, original, theta, head_dim)
        if np.allclose(candidate, factors, TOLERANCE, 0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise WeightsError(f"the tensor {FREQUENCY_FACTORS} scales the rope in a way that no rope type of transformers has")


def _frequencies(head_dim: int, theta: float) -> Factors:
    """In float32, as both programs compute them; in float64 from there on."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (1.0 / np.float32(theta) ** exponents).astype(np.float64)


def _llama3_factors(factor: float, low: float, high: float, original: int, theta: float, head_dim: int) -> Factors:
    """Fast frequencies stay, slow ones are divided by `factor`, those between are mixed."""
    turns = original * _frequencies(head_dim, theta) / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - share) / factor + share))


def _fitted(factors: Factors, theta: float) -> list[tuple[int, float, float]]:
    """Settings through the mixed frequencies, where there are two or more: the share is linear in the frequency."""
    factor, turns = factors.max(), FITTED_LENGTH * _frequencies(2 * factors.size, theta) / (2 * math.pi)
    mixed = (factors > 1) & (factors < factor)
    if mixed.sum() < 2:
        return []
    share = (1.0 / factors[mixed] - 1.0 / factor) / (1.0 - 1.0 / factor)
    slope, offset = np.polyfit(turns[mixed], share, 1)
    low = -offset / slope
    return [(FITTED_LENGTH, float(low), float(low + 1.0 / slope))]
