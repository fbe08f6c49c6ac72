"""A head's products in the 8-bit blocks of the compiled CPU kernels.

In float32 a draft token of a small head costs as much as a whole pass of a target with 4-bit weights: the head reads
four bytes a weight. What a head rounds costs acceptance, never output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from paceline.device.properties import on_host
from paceline.layers.cpu_kernels import WeightBlocks, fits_blocks
from paceline.quantization.blocked import BlockedLinear, block

BITS = 8


class RoundedLinear(nn.Module):
    """nn.Linear with its weight in blocks."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._linear: BlockedLinear = block(linear.weight.detach(), BITS)
        self.bias: Tensor | None = linear.bias

    @property
    def blocks(self) -> WeightBlocks:
        [blocks] = self._linear.blocks
        return blocks

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x, self.bias)


    def rounded_again(self, linear: nn.Linear) -> Callable[[], None]:
        """Round the weight of another product of the same shape now, and return what takes it into use."""
        blocks = block(linear.weight.detach(), BITS)

        def take() -> None:
            self._linear, self.bias = blocks, linear.bias

        return take


def weight_copies(source: nn.Module, into: nn.Module) -> list[Callable[[], object]]:
    """What gives a module the weights of another of the same shape, in place. All slow work is done here and now."""
    copies: list[Callable[[], object]] = []
    for name, child in into.named_children():
        other = source.get_submodule(name)
        if isinstance(child, RoundedLinear) and isinstance(other, nn.Linear):
            copies.append(child.rounded_again(other))
        else:
            copies += weight_copies(other, child)
    tensors = {**dict(source.named_parameters(recurse=False)), **dict(source.named_buffers(recurse=False))}
    own = [*into.named_parameters(recurse=False), *into.named_buffers(recurse=False)]
    return copies + [partial(tensor.data.copy_, tensors[name].data) for name, tensor in own]


def round_linears(module: nn.Module) -> None:
    """Replace every product of a module that the kernels can do. Others stay as they are."""
    for name, child in list(module.named_children()):
        if not isinstance(child, nn.Linear):
            round_linears(child)
        elif on_host(child.weight.device) and fits_blocks(child.weight):
            setattr(module, name, RoundedLinear(child))
