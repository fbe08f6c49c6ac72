"""Launch of the attention kernel. It reads blocks by itself, so one graph serves every sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from paceline.device.properties import multiprocessor_count
from paceline.layers.attention import AttentionSizes, HeadNorms, LayerAttention, LayerCaches
from paceline.layers.attention_kernels import CHUNK, attend_kernel
from paceline.layers.gemm import MAX_NODES, MAX_SEQS, GemmLauncher
from paceline.layers.kv_rounding import STORED_DTYPE
from paceline.layers.linear_attention import DeltaNetSpans

ROWS = 16  # of a tile, at least; fixed for a model, so that a node's sums run the same way in every pass
WARPS = 4  # twice as many for heads of 256: their new keys do not fit into the registers of four
STAGES = 2  # with one, Triton 3.6 makes code for four warps that reads past its shared memory
PROGRAMS = 2  # a multiprocessor


@dataclass(frozen=True, slots=True, eq=False)
class TritonBatch:
    """One pass of `num_seqs` sequences with `nodes` nodes each. Its tensors live as long as its graph."""

    num_seqs: int
    nodes: int
    lengths: Tensor  # int64 [sequences] tokens cached before the pass
    counts: Tensor  # int64 [sequences] nodes that are real
    depths: Tensor  # int64 [sequences, nodes]
    tree_mask: Tensor  # int64 [sequences, nodes] bit j: this node sees node j
    blocks: Tensor  # int64 [sequences, blocks a sequence]
    window_blocks: Tensor  # the same in the cache of layers with a window
    chunks: int  # of context, at most
    offset: int = 0  # added to every length: the steps of a drafting loop
    recurrent: DeltaNetSpans | None = None  # for recurrent layers, where the model has any
    trees: bool = False  # nodes need not be chains


class TritonAttention:
    """The attention kernel over flat caches."""

    def __init__(
        self, sizes: AttentionSizes, caches: LayerCaches, ropes: tuple[Tensor, ...], gemm: GemmLauncher
    ) -> None:
        self.sizes, self._caches, self._ropes, self._gemm = sizes, caches, ropes, gemm
        device = caches.full.keys.device
        self.multiprocessors = multiprocessor_count(device)
        counters = MAX_SEQS * MAX_NODES * sizes.num_kv_heads
        self._chunks_done = torch.zeros(counters, dtype=torch.int32, device=device)

    def __call__(self, qkv: Tensor, layer: int, attention: LayerAttention, batch: TritonBatch) -> Tensor:
        """Norm where the architecture does, rotate, store keys and values, attend. [nodes, query size]"""
        sizes, gemm, norms, cache = self.sizes, self._gemm, attention.norms, self._caches.of(attention.window)
        blocks = batch.blocks if attention.window is None else batch.window_blocks
        rows = max(ROWS, triton.next_power_of_2(sizes.group))
        parts = triton.cdiv(batch.nodes, rows // sizes.group)
        heads, chunks = batch.num_seqs * parts * sizes.num_kv_heads, chunks_read(batch, attention.window)
        lanes = min(chunks, triton.cdiv(PROGRAMS * self.multiprocessors, heads))
        out = torch.empty(batch.num_seqs * batch.nodes, sizes.query_size, dtype=qkv.dtype, device=qkv.device)
        sums = torch.empty(heads * chunks, sizes.head_dim, rows, dtype=torch.float32, device=qkv.device)
        stats = torch.empty(heads * chunks, 2, rows, dtype=torch.float32, device=qkv.device)
        warps = WARPS if sizes.head_dim <= 128 else 2 * WARPS
        programs = parts + batch.nodes if batch.trees else parts  # nodes off the first chain have one of their own
        attend_kernel[(batch.num_seqs * programs, sizes.num_kv_heads, lanes)](
            qkv, cache.keys, cache.values, self._ropes[attention.rope or 0],
            self._ropes[attention.query_rope or attention.rope or 0],
            gemm.or_none(norms.query), gemm.or_none(norms.key), gemm.or_none(attention.sinks),
            out, sums, stats, self._chunks_done,
            batch.lengths, batch.counts, batch.depths, batch.tree_mask, blocks,
            batch.offset, blocks.shape[1], self._caches.place(layer) * cache.keys.stride(0), chunks, lanes, gemm.eps,
            sizes.head_dim**-0.5 if attention.scale is None else attention.scale, attention.softcap or 0.0,
            NODES=batch.nodes, GROUP=sizes.group, NUM_KV_HEADS=sizes.num_kv_heads, HALF=sizes.head_dim // 2, ROWS=rows,
            NEW_TOKENS=self._new_tokens(norms, batch), BLOCK_SIZE=sizes.block_size, CHUNK_TOKENS=CHUNK,
            QK_NORM=norms.query is not None, PARTS=parts, USE_PDL=gemm.use_pdl,
            TRIGGER_DEPENDENTS=self._triggers_dependents(batch.num_seqs * programs * sizes.num_kv_heads * lanes),
            WINDOW=attention.window or 0, SOFTCAP=attention.softcap is not None, SINKS=attention.sinks is not None,
            ROPE=attention.rope is not None, ROUNDED=cache.keys.dtype == STORED_DTYPE, TREES=batch.trees,
            num_warps=warps, num_stages=STAGES, **gemm.pdl_launch,
        )
        return out

    def _new_tokens(self, norms: HeadNorms, batch: TritonBatch) -> int:
        """Rows of the tile of new keys. With norms it is fixed, or a row's sums would depend on the pass."""
        if norms.query is not None and not self._gemm.use_vectors:
            return MAX_NODES
        return int(triton.next_power_of_2(batch.nodes))

    def _triggers_dependents(self, programs: int) -> bool:
        """Whether the next kernel may start early.

        Programs end at different times, and a product that starts early is packed onto the multiprocessors that are
        free first and waits for those. Only where half of them have nothing to do is early better.
        """
        return 2 * programs <= self.multiprocessors


def chunks_read(batch: TritonBatch, window: int | None) -> int:
    """Chunks of context that the nodes of a sequence see, at most."""
    if window is None:
        return batch.chunks
    tokens = window - 1 + batch.nodes
    return min(batch.chunks, (tokens + CHUNK - 2) // CHUNK + 1)
