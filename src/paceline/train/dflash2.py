"""Training of a DFlash 2 head: DFlash with a convolution inside the block and a selector of candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.train.dflash import DFlashOptions, build
from paceline.train.options import setting
from paceline.train.task import TrainerSpec


@dataclass(frozen=True, slots=True)
class DFlash2Options(DFlashOptions):
    """Sizes of the head and weights of its loss."""

    conv_kernel_size: int = setting(2, "rows of a block that its convolution mixes")
    conv_group_size: int = setting(16, "channels that share a weight of the convolution")
    selector_rank: int = setting(64, "size of a token in the selector's codebooks")
    selector_top_k: int = setting(16, "candidates of a row")

    def variant(self) -> dict[str, Any]:
        return {
            "conv_kernel_size": self.conv_kernel_size,
            "conv_group_size": self.conv_group_size,
            "selector_rank": self.selector_rank,
            "selector_top_k": self.selector_top_k,
        }


SPEC = TrainerSpec(
    name="dflash2",
    summary="a DFlash 2 head: a DFlash head whose rows know of each other's tokens",
    usage="--method dflash --draft-model OUT",
    options=DFlash2Options,
    build=build,
)
