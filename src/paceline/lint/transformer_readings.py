"""Readings of every head that is made of transformer layers: rotary positions, sizes of heads, norms, layers read."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.heads.checkpoint import Checkpoint, plain_name
from paceline.lint.reading import ConfigKey, HeadReading, choices, config_reading, tensor_reading
from paceline.lint.target import TargetFacts

USUAL_THETAS = (10_000.0, 1_000_000.0)
PROJECTIONS = tuple(f"self_attn.{name}_proj.{part}" for name in "qk" for part in ("weight", "bias"))
MOVES = {-3: "three lower", -1: "one lower", 1: "one higher", 3: "three higher"}  # of one layer alone
ROTATED = (*PROJECTIONS, "self_attn.q_norm.weight", "self_attn.k_norm.weight")


def theta_readings(checkpoint: Checkpoint, key: ConfigKey, facts: TargetFacts) -> list[HeadReading]:
    """The target's rotary base and the usual ones."""
    now = float(key.value(checkpoint.config, 10_000.0))
    return choices("rope theta {:g}", key, (facts.rope_theta, *USUAL_THETAS), checkpoint, now)


def head_dim_readings(checkpoint: Checkpoint, key: ConfigKey, now: int, facts: TargetFacts) -> list[HeadReading]:
    """The other sizes of attention heads that fill the rows evenly. now: the size read from the files."""
    sizes = [size for size in (facts.head_dim, now // 2, now * 2) if _fits(checkpoint, size)]
    return choices("head_dim {}", key, sizes, checkpoint, now)


def rotary_order_readings(checkpoint: Checkpoint, head_dim: int) -> list[HeadReading]:
    """Rows whose rotated partners are neighbours instead of half a head apart, and rows that were reordered twice."""
    if not _fits(checkpoint, head_dim):
        return []
    pairs, halves = "pairs (0, 1), (2, 3), …", "halves"
    change = "reorder the rows of q_proj and k_proj of every head from {} to {}".format
    return [
        tensor_reading(
            "rope interleaved", change(pairs, halves), ROTATED, lambda rows: halves_of_pairs(rows, head_dim)
        ),
        tensor_reading(
            "rope reordered twice", change(halves, pairs), ROTATED, lambda rows: pairs_of_halves(rows, head_dim)
        ),
    ]


def _fits(checkpoint: Checkpoint, head_dim: int) -> bool:
    """Whether the rows of every projection are whole heads of this size, and key heads can be shared evenly."""
    rows = {name: value.shape[0] for name, value in checkpoint.tensors.items() if name.endswith(PROJECTIONS)}
    if head_dim < 2 or head_dim % 2 or any(count % head_dim for count in rows.values()):
        return False
    queries = next((count for name, count in rows.items() if ".q_proj." in name), 0)
    keys = next((count for name, count in rows.items() if ".k_proj." in name), 1)
    return queries % keys == 0


def halves_of_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Rows whose rotated partners are neighbours, in the order where partners are half a head apart."""
    paired = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)


def pairs_of_halves(rows: Tensor, head_dim: int) -> Tensor:
    """The inverse of halves_of_pairs."""
    halved = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halved.transpose(1, 2).reshape(rows.shape)


def norm_readings(checkpoint: Checkpoint) -> list[HeadReading]:
    """Norms that are stored around zero, or that a converter has shifted once too often."""
    names = [name for name in checkpoint.tensors if name.endswith("norm.weight")]

    def shifted(name: str, change: str, by: float) -> HeadReading:
        return tensor_reading(name, change, names, lambda weight: (weight.float() + by).to(weight.dtype))

    readings = [
        shifted("norms around zero", "add 1 to the weight of every norm", 1.0),
        shifted("norms shifted twice", "subtract 1 from the weight of every norm", -1.0),
    ]
    return readings if names else []


def layer_readings(
    checkpoint: Checkpoint, key: ConfigKey, layers: tuple[int, ...], facts: TargetFacts, offset: int = 0
) -> list[HeadReading]:
    """States one layer higher or lower, from low to high, in the other order, or with one layer of several wrong.

    layers  indices of the entering states that are read now; the config holds them less `offset`
    """
    names = {
        **_single_layers(layers),
        tuple(layer - 1 for layer in layers): "layers one lower",
        tuple(layer + 1 for layer in layers): "layers one higher",
        tuple(reversed(layers)): "layers in the other order",
        tuple(sorted(layers)): "layers from low to high",
    }
    return [
        config_reading(name, key, [layer - offset for layer in ids], checkpoint)
        for ids, name in names.items()
        if ids != layers and facts.has_layers(ids)
    ]


def _single_layers(layers: tuple[int, ...]) -> dict[tuple[int, ...], str]:
    """One layer of several moved by a few, without passing its neighbours."""
    if len(layers) < 2:
        return {}
    moved = {
        (*layers[:index], layer + step, *layers[index + 1 :]): f"layer {index + 1} of {len(layers)} {word}"
        for index, layer in enumerate(layers)
        for step, word in MOVES.items()
    }
    return {ids: name for ids, name in moved.items() if sorted(set(ids)) == list(ids)}


def flipped(name: str, key: ConfigKey, checkpoint: Checkpoint, default: bool = False) -> HeadReading:
    """The other value of a switch. name: with one gap for `on` or `off`."""
    value = not bool(key.value(checkpoint.config, default))
    return config_reading(name.format("on" if value else "off"), key, value, checkpoint)


def vocabulary_readings(checkpoint: Checkpoint) -> list[HeadReading]:
    """d2t may hold ids of the target instead of offsets."""
    if not any(plain_name(name) == "d2t" for name in checkpoint.tensors):
        return []
    change = "d2t holds ids of the target; store offsets instead, d2t[i] = id - i"
    return [tensor_reading("d2t as ids", change, ("d2t",), lambda ids: ids - torch.arange(ids.shape[0]))]
