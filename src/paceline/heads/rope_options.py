"""The rope of a head, as its config has it: at the top level, in rope_parameters or rope_scaling, by kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import WeightsError
from paceline.heads.checkpoint import number

USUAL_THETA = 10000.0
PLAIN_TYPES = ("default", "mrope")  # mrope gives the tokens of a text the positions that all ropes give them
SCALED_TYPES = ("linear", "dynamic", "yarn", "longrope", "llama3")  # transformers computes their frequencies


def rope_options(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """rope_theta and rope_scaling of a head. Raises WeightsError that names the key which cannot be followed.

    The partial_rotary_factor of a target is in some configs. Trainers' layers (Llama's and Qwen3's of transformers)
    rotate whole heads in spite of it; with a scaled rope they do not run at all.
    """
    rope = _of_one_layer(config, folder)
    scaling = config.get("rope_scaling") or rope
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in (*PLAIN_TYPES, *SCALED_TYPES):
        raise WeightsError(f"{folder}: the config's rope_type is {kind!r}, which no head is known to have")
    share = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if kind in SCALED_TYPES and share != 1.0:
        raise WeightsError(f"{folder}: the config has a partial_rotary_factor of {share} beside a rope of type {kind}")
    theta = number(config, "rope_theta", number(rope, "rope_theta", USUAL_THETA))
    return {"rope_theta": theta, "rope_scaling": None if kind in PLAIN_TYPES else dict(scaling)}


def _of_one_layer(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """rope_parameters; where each kind of layer has its own, those of the kinds that the head has."""
    rope = config.get("rope_parameters") or {}
    if not any(isinstance(value, Mapping) for value in rope.values()):
        return rope
    kinds = set(config.get("layer_types") or rope) & set(rope)
    ropes = [rope[kind] for kind in sorted(kinds) if rope[kind]]
    if not ropes or any(other != ropes[0] for other in ropes):
        raise WeightsError(f"{folder}: rope_parameters has ropes that differ by layer; the layers of a head share one")
    return ropes[0]
