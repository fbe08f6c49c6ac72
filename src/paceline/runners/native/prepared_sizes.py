"""Which sizes of passes are captured at load, so that no sequence waits for them.

A graph also runs somewhat smaller passes, so the largest sizes come first: what they cover is not captured again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paceline.core.types import WarmupPlan
from paceline.device.graphs import NUM_SEQS, needed
from paceline.layers.attention_kernels import CHUNK
from paceline.layers.gemm_tiling import TILE_ROWS
from paceline.runners.native.pass_inputs import LEAD_TOKENS

CHUNKS = (4, 8, 16, 32, 64, 128, 256)  # of context that graphs are captured for: at most half of them are empty
QUICK_KS = (2, 4, 8)  # draft tokens that batches are prepared for where the policy decides: near ones run them too
BATCH_CONTEXT = 1024  # tokens of a sequence for which smaller batches are prepared
IsPersistent = Callable[[int], bool]  # whether so many rows are read by one kernel


class ForwardSize(NamedTuple):
    """A pass: so many sequences, nodes of each, and tokens that each holds."""

    num_seqs: int
    width: int
    tokens: int
    trees: bool = False


class DraftSize(NamedTuple):
    """A chain of draft tokens: so many sequences, draft tokens, and tokens that each sequence holds."""

    num_seqs: int
    num_tokens: int
    tokens: int


def forward_sizes(plan: WarmupPlan, widest: int, is_persistent: IsPersistent) -> list[ForwardSize]:
    """widest: nodes of a sequence that a graph has at most."""
    widths = sorted({width for width in plan.widths if width <= widest})
    sizes = [
        ForwardSize(count, width, tokens)
        for count in plan.num_seqs
        for width in widths
        for tokens in _contexts(plan)
    ]
    sizes += [size._replace(trees=True) for size in sizes if plan.trees and size.width > 2]
    return sizes + _quick_batches(plan, widths, is_persistent) + _partial_batches(plan, widths, is_persistent)


def draft_sizes(plan: WarmupPlan, is_persistent: IsPersistent) -> list[DraftSize]:
    """Of a draft model."""
    batches = [count for count in plan.quick_batches if is_persistent(count) and is_persistent(count * LEAD_TOKENS)]
    ks = plan.num_draft_tokens if len(plan.num_draft_tokens) <= 1 else QUICK_KS
    return [
        *(
            DraftSize(count, k, tokens)
            for count in plan.num_seqs
            for k in plan.num_draft_tokens
            for tokens in _contexts(plan)
        ),
        *(DraftSize(count, k, plan.max_context) for count in batches for k in ks),
    ]


def _contexts(plan: WarmupPlan) -> list[int]:
    longest = min(-(-plan.max_context // CHUNK), CHUNKS[-1])
    return [chunks * CHUNK for chunks in reversed(needed(CHUNKS, longest))]


def _quick_batches(plan: WarmupPlan, widths: list[int], is_persistent: IsPersistent) -> list[ForwardSize]:
    """Batches whose pass is one kernel: a graph of it is captured in no time, and one serves every context."""
    return [
        ForwardSize(count, width, plan.max_context)
        for count in plan.quick_batches
        for width in widths
        if is_persistent(count) and is_persistent(count * width)
    ]


def _partial_batches(plan: WarmupPlan, widths: list[int], is_persistent: IsPersistent) -> list[ForwardSize]:
    """Batches of which some sequences have ended, or have room for few draft tokens.

    Their passes are smaller, and those of at most a tile are multiplied in another way than larger ones: the graph of
    the whole batch cannot run them.
    """
    most, width = max(plan.quick_batches, default=1), widths[-1]
    if most < 2 or (is_persistent(1) and len(widths) > 2):
        return []
    sizes = [(most, width), (most // 2, width)]
    sizes += [(count, min(width, TILE_ROWS // count)) for count in reversed(NUM_SEQS) if 1 < count <= most]
    return [
        ForwardSize(count, nodes, min(BATCH_CONTEXT, plan.max_context), plan.trees)
        for count, nodes in sizes
        if min(count, nodes) > 1 and not is_persistent(count * nodes)
    ]
