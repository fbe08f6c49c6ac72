"""An exit adapter: makes the target's state after an inner layer fit for the target's own head.

The state that leaves layer E, under the target's final norm, goes through a small residual bottleneck and a norm of its
own, and then to the head as it is. The target itself is not changed, so verification is what it always was.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import OptionError


@dataclass(frozen=True, slots=True)
class ExitConfig:
    """After which layer the model is left, and the sizes of the adapter."""

    layer: int
    hidden_size: int
    bottleneck: int
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.layer < 1 or self.bottleneck < 1:
            raise OptionError(f"an exit needs layer and bottleneck of 1 or more, not {self.layer}, {self.bottleneck}")


class ExitAdapter(nn.Module):
    """norm(x + W2·SiLU(W1·x)). Fresh from the factory W2 is zero: it then only rescales."""

    def __init__(self, config: ExitConfig) -> None:
        super().__init__()
        self.config = config
        self.down = nn.Linear(config.hidden_size, config.bottleneck, bias=False)
        self.up = nn.Linear(config.bottleneck, config.hidden_size, bias=False)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        nn.init.zeros_(self.up.weight)

    def start_from(self, norm: Tensor) -> None:
        """Begin with the weights of the target's final norm, so that the scale fits the target's head."""
        self.norm.weight.data.copy_(norm)

    def forward(self, hidden: Tensor) -> Tensor:
        """States of the exit after the target's final norm -> states for the target's head. [..., width]"""
        adapted: Tensor = self.norm(hidden + self.up(functional.silu(self.down(hidden))))
        return adapted
