"""The convolution of DFlash 2: a row of a block mixes in the rows before it, with weights made from its own state.

    out[i, c] = Σ_t (base[side, t, c] + δ[i, side, t, group(c)]) · x[i - t, c]

δ is computed from the input of a sub-layer and used on both sides of it: on its input, and on its output before the
residual is added. Rows before the block count as zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import OptionError

SIDES = 2  # before and after the sub-layer


@dataclass(frozen=True, slots=True, eq=False)
class ConvolvedInput:
    """The input of a sub-layer, and the weights its output is convolved with: [..., taps, groups]."""

    states: Tensor
    output_weights: Tensor


class BlockConvolution(nn.Module):
    """Grouped dynamic convolution around one sub-layer. It starts as the identity."""

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int, block_size: int) -> None:
        super().__init__()
        if hidden_size % group_size:
            raise OptionError(f"a convolution cannot cut {hidden_size} channels into groups of {group_size}")
        if kernel_size > block_size:
            raise OptionError(f"a convolution of {kernel_size} taps does not fit a block of {block_size} tokens")
        self.block_size = block_size
        self.base_kernel = nn.Parameter(torch.zeros(SIDES, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, SIDES * kernel_size * (hidden_size // group_size), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1

    def before(self, states: Tensor) -> ConvolvedInput:
        """states [batch, rows, hidden_size]: one block after another, or one block that may be cut short."""
        taps = self.base_kernel.shape[1]
        weights = self.kernel_projection(states).view(*states.shape[:-1], SIDES, taps, -1)
        return ConvolvedInput(self._convolved(states, weights[..., 0, :, :], 0), weights[..., 1, :, :])

    def after(self, states: Tensor, weights: Tensor) -> Tensor:
        """states: the output of the sub-layer; weights: those that came with its input."""
        return self._convolved(states, weights, 1)

    def _convolved(self, states: Tensor, weights: Tensor, side: int) -> Tensor:
        batch, rows, size = states.shape
        length = min(self.block_size, rows)
        blocks = states.reshape(batch, rows // length, length, weights.shape[-1], -1)  # [..., groups, channels]
        dynamic = weights.reshape(*blocks.shape[:3], -1, blocks.shape[3], 1)  # [..., taps, groups, 1]
        output = torch.zeros_like(blocks)
        for tap in range(min(self.base_kernel.shape[1], length)):
            shifted = functional.pad(blocks[:, :, : length - tap], (0, 0, 0, 0, tap, 0)) if tap else blocks
            kernel = self.base_kernel[side, tap].to(states.dtype).view(blocks.shape[3], -1)
            output = output + (kernel + dynamic[:, :, :, tap]) * shifted
        return output.reshape(batch, rows, size)
