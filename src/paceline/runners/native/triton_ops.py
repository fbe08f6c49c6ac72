"""Ops made of fused kernels.

Four ways to multiply, by what a product waits for:
  vector  a small matrix and a row or two (a draft's loop): project, norm and all in one launch without a loop
  tile    up to 16 rows, by a kernel whose sums do not depend on how many others there are
  packed  the same for a matrix of few bits
  wide    more rows: cuBLAS, which is faster; `batch_invariant` takes more tiles, larger ones, instead
Attention always reads blocks by itself, so a pass can be captured as a graph once and replayed for every sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from paceline.runners.native.config import Shape
from paceline.runners.native.gemm_tiling import TALL_TILES, TILE_ROWS, tiling
from paceline.runners.native.quantization import PackedMatrix, apply_matrix
from paceline.runners.native.triton_kernels import (
    CHUNK,
    attend_kernel,
    best_kernel,
    gate_kernel,
    norm_kernel,
    packed_kernel,
    project_kernel,
    vector_kernel,
)
from paceline.runners.native.weights import LayerWeights, Matrix

VECTOR_INNER = 2048  # longest row of a matrix that vector_kernel takes whole
VECTOR_ROWS = 2
VECTOR_COLUMNS = 2
VECTOR_HEAD_COLUMNS = 32
VECTOR_WARPS = 4
PACKED_COLUMNS = 8
PACKED_STEP = 512
ATTENTION_ROWS = 16  # of a tile, at least; fixed for a model, so that a node's sums run the same way in every pass
ATTENTION_WARPS = 4
ATTENTION_STAGES = 2  # with one, Triton 3.6 makes code for four warps that reads past its shared memory
ATTENTION_PROGRAMS = 2  # a multiprocessor
MAX_SEQS = 64
MOST_NODES = 64


class GemmPath(Enum):
    """How a product is made."""

    VECTOR = auto()
    TILE = auto()
    WIDE = auto()


def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start before the one before it has ended: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def multiprocessors_of(device: torch.device) -> int:
    """As many programs have a place of their own. Without a card, where they run one by one, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@dataclass(frozen=True, slots=True, eq=False)
class TritonBatch:
    """One pass of `num_seqs` sequences with `nodes` nodes each. All tensors live as long as the graph that reads them."""

    num_seqs: int
    nodes: int
    lengths: Tensor  # int64 [sequences] tokens cached before the pass
    counts: Tensor  # int64 [sequences] nodes that are real
    depths: Tensor  # int64 [sequences, nodes]
    tree_mask: Tensor  # int64 [sequences, nodes] bit j: this node sees node j
    blocks: Tensor  # int64 [sequences, blocks a sequence]
    chunks: int  # of context, at most
    offset: int = 0  # added to every length: the steps of a drafting loop


@dataclass(frozen=True, slots=True, eq=False)
class Best:
    """Logits, and the argmax of each row: found, or still in pieces."""

    logits: Tensor  # float32 [rows, vocab]
    token: Tensor | None
    value: Tensor | None
    index: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class ArgmaxResult:
    """The token chosen in each row and, if asked for, its input vector."""

    token: Tensor  # int64 [rows]
    stream: Tensor | None  # [rows, width]


@dataclass(frozen=True, slots=True, eq=False)
class Epilogue:
    """What a product does on the side."""

    norm: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    gate: bool = False
    best: Best | None = None


class TritonOps:
    """Fused kernels over the flat cache [layers, tokens, key heads, head size].

    vectors: allow vector_kernel. Right for a draft, whose numbers may depend on how many rows there are.
    batch_invariant: a row's numbers never do, in the largest batch neither.
    """

    def __init__(
        self, shape: Shape, keys: Tensor, values: Tensor, rope_cache: Tensor, block: int, *,
        vectors: bool = False, batch_invariant: bool = False,
    ) -> None:
        self.shape, self.keys, self.values, self.rope_cache, self.block = shape, keys, values, rope_cache, block
        self.vectors = vectors
        self.early = starts_early(keys.device)
        self.multiprocessors = multiprocessors_of(keys.device)
        self._most_rows = MAX_SEQS * MOST_NODES if batch_invariant else TILE_ROWS  # that our own kernels multiply
        # Tall tiles of four bytes a number would not fit the shared memory of every card.
        tall = keys.element_size() == 2 or keys.device.type == "cpu"
        self._tiles = (TILE_ROWS, *TALL_TILES) if tall else (TILE_ROWS,)
        self._launch = {"launch_pdl": True} if self.early else {}
        self._arrived = torch.zeros(MAX_SEQS * MOST_NODES * shape.num_kv_heads, dtype=torch.int32, device=keys.device)
        self._nothing = torch.zeros(1, dtype=keys.dtype, device=keys.device)

    def project(self, x: Tensor, norm: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        return self._product(x, weight, Epilogue(norm=norm, bias=bias))

    def project_add(self, x: Tensor, weight: Matrix, residual: Tensor) -> Tensor:
        return self._product(x, weight, Epilogue(residual=residual))

    def gate(self, x: Tensor, norm: Tensor, weight: Matrix) -> Tensor:
        return self._product(x, weight, Epilogue(norm=norm, gate=True))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        norm_kernel[(x.shape[0],)](
            x, weight, out, x.shape[1], self.shape.eps, EARLY=self.early,
            WIDTH=triton.next_power_of_2(x.shape[1]), num_warps=8, **self._launch,
        )
        return out

    def best(self, x: Tensor, norm: Tensor, head: Matrix) -> Best:
        """Logits in float32, and where each row has its best: found in the same pass over the head."""
        if x.shape[0] > self._most_rows:
            logits = apply_matrix(head, self.norm(x, norm), None).float()
            return Best(logits, logits.argmax(dim=-1), None, None)
        blocks = triton.cdiv(head.shape[0], self._head_columns(x, head))
        value = torch.empty(x.shape[0], blocks, dtype=torch.float32, device=x.device)
        index = torch.empty(x.shape[0], blocks, dtype=torch.int32, device=x.device)
        logits = torch.empty(x.shape[0], head.shape[0], dtype=torch.float32, device=x.device)
        found = Best(logits, None, value, index)
        self._product(x, head, Epilogue(norm=norm, best=found))
        return found

    def pick(self, found: Best, embedding: Tensor | None = None) -> ArgmaxResult:
        """The best token of each row and, if asked, its input vectors."""
        if found.token is not None:
            return ArgmaxResult(found.token, None if embedding is None else embedding[found.token])
        assert found.value is not None and found.index is not None
        rows, blocks = found.value.shape
        token = torch.empty(rows, dtype=torch.int64, device=found.value.device)
        width = 1 if embedding is None else embedding.shape[1]
        stream = self._nothing if embedding is None else embedding.new_empty(rows, width)
        best_kernel[(rows,)](
            found.value, found.index, token, _or(embedding, self._nothing), stream, blocks, width,
            EMBED=embedding is not None, BLOCKS=triton.next_power_of_2(blocks), WIDTH=triton.next_power_of_2(width),
            EARLY=self.early, **self._launch,
        )
        return ArgmaxResult(token, None if embedding is None else stream)

    def _head_columns(self, x: Tensor, head: Matrix) -> int:
        """Columns of the head that one program looks at for the best."""
        if isinstance(head, PackedMatrix) or self._fits_vector(x):
            return VECTOR_HEAD_COLUMNS
        return tiling(head.shape[0], head.shape[1], False, self._tile_for(x.shape[0])).columns

    def _tile_for(self, rows: int) -> int:
        """Rows of the tile that so many rows are cut into: the least that holds them all, or the largest."""
        return next((tile for tile in self._tiles if tile >= rows), self._tiles[-1])

    def way(self, rows: int) -> GemmPath:
        """How so many rows are multiplied. Work captured for one way does not stand in for another: its numbers are
        others, or its time is."""
        if self.vectors and rows <= VECTOR_ROWS:
            return GemmPath.VECTOR
        return GemmPath.TILE if rows <= self._most_rows else GemmPath.WIDE

    def _fits_vector(self, x: Tensor) -> bool:
        return self.vectors and x.shape[0] <= VECTOR_ROWS and x.shape[1] <= VECTOR_INNER

    def _product(self, x: Tensor, weight: Matrix, extras: Epilogue) -> Tensor:
        packed = isinstance(weight, PackedMatrix)
        if self._fits_vector(x) and not packed:
            return self._by_vector(x, weight, extras)
        ready = x if extras.norm is None else self.norm(x, extras.norm)
        if x.shape[0] > self._most_rows:
            return self._wide(ready, weight.whole(x.dtype) if packed else weight, extras)
        return self._by_packed(ready, weight, extras) if packed else self._by_tile(ready, weight, extras)

    def _wide(self, x: Tensor, weight: Tensor, extras: Epilogue) -> Tensor:
        if extras.residual is not None:
            return torch.addmm(extras.residual, x, weight.t())
        out = F.linear(x, weight, extras.bias)
        return self._gated(out) if extras.gate else out

    def _by_packed(self, x: Tensor, weight: PackedMatrix, extras: Epilogue) -> Tensor:
        columns, inner = weight.shape[0] // (2 if extras.gate else 1), x.shape[1]
        cut = VECTOR_HEAD_COLUMNS if extras.best is not None else PACKED_COLUMNS
        out, value, index = self._results(x, columns, extras)
        none = self._nothing
        packed_kernel[(triton.cdiv(columns, cut), x.shape[0])](
            x, weight.values, weight.scales, _or(extras.bias, none), _or(extras.residual, none), out, value, index,
            columns, inner, weight.scales.shape[1],
            BITS=weight.bits, GROUP=weight.group, COLUMNS=cut, STEP=PACKED_STEP, num_warps=VECTOR_WARPS,
            **self._switches(extras),
        )
        return out

    def _gated(self, both: Tensor) -> Tensor:
        rows, inner = both.shape[0], both.shape[1] // 2
        out = torch.empty(rows, inner, dtype=both.dtype, device=both.device)
        gate_kernel[(rows, triton.cdiv(inner, 1024))](both, out, inner, BLOCK_COLUMNS=1024)
        return out

    def _by_vector(self, x: Tensor, weight: Tensor, extras: Epilogue) -> Tensor:
        columns, inner = weight.shape[0] // (2 if extras.gate else 1), x.shape[1]
        cut = VECTOR_HEAD_COLUMNS if extras.best is not None else VECTOR_COLUMNS
        out, value, index = self._results(x, columns, extras)
        none = self._nothing
        vector_kernel[(triton.cdiv(columns, cut), x.shape[0])](
            x, _or(extras.norm, none), weight, _or(extras.bias, none), _or(extras.residual, none), out, value, index,
            columns, inner, self.shape.eps,
            NORM=extras.norm is not None, COLUMNS=cut, INNER=triton.next_power_of_2(inner), num_warps=VECTOR_WARPS,
            **self._switches(extras),
        )
        return out

    def _by_tile(self, x: Tensor, weight: Tensor, extras: Epilogue) -> Tensor:
        columns, inner = weight.shape[0] // (2 if extras.gate else 1), x.shape[1]
        cut = tiling(columns, inner, extras.gate, self._tile_for(x.shape[0]))
        out, value, index = self._results(x, columns, extras)
        none = self._nothing
        project_kernel[(triton.cdiv(columns, cut.columns), triton.cdiv(x.shape[0], cut.rows))](
            x, weight, _or(extras.bias, none), _or(extras.residual, none), out, value, index,
            x.shape[0], columns, inner,
            EVEN=inner % cut.step == 0, TALL=cut.tall, ROWS=cut.rows, COLUMNS=cut.columns, STEP=cut.step,
            num_warps=cut.warps, num_stages=cut.stages, **self._switches(extras, early=not cut.tall),
        )
        return out

    def _switches(self, extras: Epilogue, *, early: bool = True) -> dict[str, Any]:
        """What every product kernel is told of its extras, and how it is launched.

        early: it may start before the kernel ahead has ended. Tall tiles fill half a multiprocessor each, so two of
        them would be packed where one was to be.
        """
        wanted = {"BIAS": extras.bias, "ADD": extras.residual, "BEST": extras.best}
        told = {name: extra is not None for name, extra in wanted.items()} | {"GATE": extras.gate}
        return told | ({"EARLY": self.early, **self._launch} if early else {"EARLY": False})

    def _results(self, x: Tensor, columns: int, extras: Epilogue) -> tuple[Tensor, Tensor, Tensor]:
        """Where a product writes: its result, and the values and places of the best, if asked for."""
        if extras.best is not None:
            assert extras.best.value is not None and extras.best.index is not None
            return extras.best.logits, extras.best.value, extras.best.index
        return torch.empty(x.shape[0], columns, dtype=x.dtype, device=x.device), self._nothing, self._nothing

    def attend(self, qkv: Tensor, layer: int, weights: LayerWeights, batch: TritonBatch) -> Tensor:
        shape = self.shape
        rows = max(ATTENTION_ROWS, triton.next_power_of_2(shape.group))
        parts = triton.cdiv(batch.nodes, rows // shape.group)
        heads = batch.num_seqs * parts * shape.num_kv_heads
        lanes = min(batch.chunks, triton.cdiv(ATTENTION_PROGRAMS * self.multiprocessors, heads))
        out = torch.empty(batch.num_seqs * batch.nodes, shape.query_width, dtype=qkv.dtype, device=qkv.device)
        sums = torch.empty(heads * batch.chunks, shape.head_dim, rows, dtype=torch.float32, device=qkv.device)
        stats = torch.empty(heads * batch.chunks, 2, rows, dtype=torch.float32, device=qkv.device)
        head_norm = weights.query_norm is not None
        fresh = MOST_NODES if head_norm and not self.vectors else triton.next_power_of_2(batch.nodes)
        # Programs end at different times, and a product let in early would be packed onto the multiprocessors that are
        # free first, and wait for those. Only where half of them have nothing to do is early better.
        hands_on = 2 * heads * lanes <= self.multiprocessors
        attend_kernel[(batch.num_seqs * parts, shape.num_kv_heads, lanes)](
            qkv, self.keys, self.values, self.rope_cache,
            _or(weights.query_norm, self._nothing), _or(weights.key_norm, self._nothing),
            out, sums, stats, self._arrived,
            batch.lengths, batch.counts, batch.depths, batch.tree_mask, batch.blocks,
            batch.offset, batch.blocks.shape[1], layer * self.keys.stride(0), batch.chunks, lanes, shape.eps,
            shape.head_dim**-0.5,
            NODES=batch.nodes, GROUP=shape.group, KV_HEADS=shape.num_kv_heads, HALF=shape.head_dim // 2, ROWS=rows,
            FRESH=fresh, BLOCK_SIZE=self.block, CHUNK_TOKENS=CHUNK, HEAD_NORM=head_norm, PARTS=parts,
            EARLY=self.early, HANDS_ON=hands_on, num_warps=ATTENTION_WARPS, num_stages=ATTENTION_STAGES,
            **self._launch,
        )
        return out


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor
