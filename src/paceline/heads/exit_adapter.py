"""An exit adapter: maps the target's state after an inner layer to a state the target's own head can read.

The state that leaves layer E passes the target's final norm, a small residual bottleneck and a norm of the adapter, and
then the target's head. The target itself does not change, so verification does not change either.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import OptionError, WeightsError
from paceline.heads.checkpoint import Checkpoint, Provenance, converted, install, tensor_named, write_checkpoint
from paceline.heads.registry import HeadSpec

MODEL_TYPE = "paceline_exit"


@dataclass(frozen=True, slots=True)
class ExitConfig:
    """The layer after which the model is left, and the sizes of the adapter."""

    layer: int
    hidden_size: int
    bottleneck: int
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.layer < 1 or self.bottleneck < 1:
            raise OptionError(f"an exit needs layer and bottleneck of 1 or more, not {self.layer}, {self.bottleneck}")


class ExitAdapter(nn.Module):
    """norm(x + W2·SiLU(W1·x)). W2 starts at zero: an untrained adapter only rescales."""

    def __init__(self, config: ExitConfig) -> None:
        super().__init__()
        self.config = config
        self.down = nn.Linear(config.hidden_size, config.bottleneck, bias=False)
        self.up = nn.Linear(config.bottleneck, config.hidden_size, bias=False)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        nn.init.zeros_(self.up.weight)

    def start_from(self, norm: Tensor) -> None:
        """Start with the weights of the target's final norm, so that the scale fits the target's head."""
        self.norm.weight.data.copy_(norm)

    def forward(self, hidden: Tensor) -> Tensor:
        """States of the exit after the target's final norm -> states for the target's head. [..., hidden_size]"""
        adapted: Tensor = self.norm(hidden + self.up(functional.silu(self.down(hidden))))
        return adapted


# --- files ------------------------------------------------------------------------------------------------------------


def matches(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") == MODEL_TYPE


def load(checkpoint: Checkpoint) -> ExitAdapter:
    """The adapter of a checkpoint. Raises WeightsError naming the tensor that does not fit."""
    down = tensor_named(checkpoint, "down.weight")
    layer = checkpoint.config.get("layer")
    if not isinstance(layer, int):
        raise WeightsError(f"{checkpoint.folder}: config.json does not say after which layer the model is left")
    eps = float(checkpoint.config.get("rms_norm_eps", 1e-5))
    adapter = ExitAdapter(ExitConfig(layer, down.shape[1], down.shape[0], eps))
    install(adapter, checkpoint)
    return adapter


def save(
    adapter: ExitAdapter, folder: str | Path, *, layout: str, provenance: Provenance, dtype: torch.dtype | None
) -> None:
    config = {
        "model_type": MODEL_TYPE,
        "base_model_name_or_path": provenance.target,
        "layer": adapter.config.layer,
        "hidden_size": adapter.config.hidden_size,
        "bottleneck": adapter.config.bottleneck,
        "rms_norm_eps": adapter.config.rms_norm_eps,
    }
    write_checkpoint(folder, config, {name: converted(value, dtype) for name, value in adapter.state_dict().items()})


SPEC = HeadSpec("exit_adapter", ExitAdapter, matches, load, save)
