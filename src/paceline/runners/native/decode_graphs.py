"""Narrow passes: a few nodes a sequence, captured as graphs, fed through one small upload a pass.

Two kinds. A check reads the last token and the draft tokens of every sequence. A loop drafts: it reads the last two tokens of
every sequence (the draft may have missed the target's own token, or the last draft token too; reading a token twice writes the
same numbers again) and then takes step after step without returning to the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.draft_tree import depths
from paceline.core.sampling import draw
from paceline.core.types import ModelOutput, Row
from paceline.device.graphs import NUM_SEQS, Captured, Pool, keep_newest, rounded_up
from paceline.device.scratch import Scratch
from paceline.runners.native.gemm_tiling import TILE_ROWS
from paceline.runners.native.model import run_layers
from paceline.runners.native.triton_kernels import CHUNK
from paceline.runners.native.triton_ops import ArgmaxResult, TritonBatch, TritonOps
from paceline.runners.native.weights import Weights

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 63)  # a node sees by the bits of an int64
# One sequence: all widths up to a tile cost the same within 3%, and each that is captured costs a second or two, once.
FEW_WIDTHS = (1, 2, 6, 16, 24, 32, 48, 63)
CHUNK_STEPS = (4, 8, 16, 32, 64, 128, 256)  # chunks of context a graph is captured for: at most half of them are empty
LEAD = 2  # tokens a loop reads at first
MOST_LOOPS = 32  # graphs of drafting loops that are kept; beyond it the oldest goes
OFTEN = 4  # a number of drafting steps that was asked for so often gets a graph of its own
CHAIN_DEPTHS: NDArray[np.int64] = np.arange(WIDTHS[-1], dtype=np.int64)
CHAIN_SIGHTS: NDArray[np.int64] = (np.int64(1) << (CHAIN_DEPTHS + 1)) - 1


def tree_mask(parents: list[int]) -> list[int]:
    """For every node the nodes it may look at, as bits: itself and all before it on its path."""
    seen: list[int] = []
    for node, parent in enumerate(parents):
        seen.append((1 << node) | (seen[parent] if parent >= 0 else 0))
    return seen


def _does_for(captured: Size, size: Size, ops: TritonOps) -> bool:
    """Whether work captured for one size does for another: not much larger, or after a single long sequence all others
    would launch its empty chunks; and multiplied in the same way."""
    if not captured.holds(size) or captured.chunks > 2 * size.chunks or captured.rows > max(TILE_ROWS, 2 * size.rows):
        return False
    return ops.way(captured.rows) == ops.way(size.rows)


@dataclass(frozen=True, slots=True)
class Size:
    """What a graph is captured for."""

    num_seqs: int
    nodes: int
    chunks: int

    @property
    def rows(self) -> int:
        return self.num_seqs * self.nodes

    def holds(self, other: Size) -> bool:
        return self.num_seqs >= other.num_seqs and self.nodes >= other.nodes and self.chunks >= other.chunks


class Staging:
    """The integers of a pass: filled on the host, sent in one copy, read by the graph where they are."""

    def __init__(self, size: Size, table_width: int, device: torch.device) -> None:
        num_seqs, nodes = size.num_seqs, size.nodes
        total = num_seqs * (2 + 3 * nodes + table_width)
        pinned = device.type == "cuda"
        self._host = torch.zeros(total, dtype=torch.int64, pin_memory=pinned)
        self._device = torch.zeros(total, dtype=torch.int64, device=device)
        host: NDArray[np.int64] = self._host.numpy()
        self.lengths, self.counts = host[:num_seqs], host[num_seqs : 2 * num_seqs]
        at = 2 * num_seqs
        self.depths, at = host[at : at + num_seqs * nodes].reshape(num_seqs, nodes), at + num_seqs * nodes
        self.tree_mask, at = host[at : at + num_seqs * nodes].reshape(num_seqs, nodes), at + num_seqs * nodes
        self.tokens, at = host[at : at + num_seqs * nodes].reshape(num_seqs, nodes), at + num_seqs * nodes
        self.blocks = host[at:].reshape(num_seqs, table_width)
        self.batch = self._batch(size)
        self.token_ids = self._view(2 * num_seqs + 2 * num_seqs * nodes, num_seqs, nodes)

    def _view(self, start: int, num_seqs: int, width: int) -> Tensor:
        return self._device[start : start + num_seqs * width].view(num_seqs, width)

    def _batch(self, size: Size) -> TritonBatch:
        num_seqs, nodes = size.num_seqs, size.nodes
        at = 2 * num_seqs
        return TritonBatch(
            num_seqs,
            nodes,
            self._device[:num_seqs],
            self._device[num_seqs : 2 * num_seqs],
            self._view(at, num_seqs, nodes),
            self._view(at + num_seqs * nodes, num_seqs, nodes),
            self._device[at + 3 * num_seqs * nodes :].view(num_seqs, -1),
            size.chunks,
        )

    def put_row(self, index: int, row: Row, length: int, table: list[int]) -> None:
        """Text `index` reads this row after `length` tokens. DraftOutput that lie on the device are copied there later."""
        count = len(row.parents)
        self.lengths[index], self.counts[index] = length, count
        self.blocks[index, : len(table)] = table
        if row.is_chain:
            self.depths[index, :count], self.tree_mask[index, :count] = CHAIN_DEPTHS[:count], CHAIN_SIGHTS[:count]
        else:
            self.depths[index, :count] = depths(row.parents)
            self.tree_mask[index, :count] = tree_mask(row.parents)
        if row.lead is not None:
            self.tokens[index, 0] = row.lead
        if not row.tokens.is_cuda and row.tokens.shape[0]:
            self.tokens[index, count - row.tokens.shape[0] : count] = row.tokens.numpy()

    def put_lead(self, index: int, ids: list[int], table: list[int]) -> None:
        """Text `index` of a loop: its last two tokens."""
        self.lengths[index], self.counts[index] = len(ids) - LEAD, LEAD
        self.blocks[index, : len(table)] = table
        self.depths[index], self.tree_mask[index] = CHAIN_DEPTHS[:LEAD], CHAIN_SIGHTS[:LEAD]
        self.tokens[index] = ids[-LEAD:]

    def send(self, num_seqs: int) -> None:
        """Send everything; sequences beyond the first `num_seqs` are none."""
        self.counts[num_seqs:] = 0
        self._device.copy_(self._host, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """What a check left: tensors of the graph, to be read before the next pass of the same runner."""

    logits: Tensor  # float32 [sequences · nodes, vocab]
    best: Tensor  # int64 [sequences · nodes]
    hidden: Tensor | None
    features: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """What a loop left: draft tokens [sequences, steps], and the distributions they were drawn from, if they were drawn."""

    tokens: Tensor
    probs: Tensor | None  # [sequences, steps, vocab]


class Source(Protocol):
    """What passes read from their runner."""

    weights: Weights
    want_hidden: bool
    feature_layers: tuple[int, ...]
    last_layer: int


@dataclass(slots=True, eq=False)
class Check:
    """A captured pass of one size, and where its integers are laid."""

    size: Size
    staging: Staging
    run: Callable[[], Checked]

    def output(self, widths: list[int], last_only: bool) -> ModelOutput:
        """Run it; what it says about the rows laid before it, each of its own width, without the padding."""
        return unpadded(self.run(), widths, self.size.nodes, last_only)


@dataclass(slots=True, eq=False)
class _Loop:
    staging: Staging
    temperatures: Tensor  # float32 [sequences, 1]
    uniforms: Tensor  # float64 [sequences, steps]
    run: Callable[[], Drafted]

    def put_chances(self, temperatures: list[float], uniforms: list[list[float]]) -> None:
        count, steps = len(temperatures), len(uniforms[0])
        self.temperatures[:count, 0].copy_(torch.tensor(temperatures), non_blocking=True)
        self.uniforms[:count, :steps].copy_(torch.tensor(uniforms, dtype=torch.float64), non_blocking=True)


class DecodeGraphs:
    """The captured passes of one runner, made on first use. Without a pool they run launch by launch (tests)."""

    def __init__(
        self, source: Source, checks: TritonOps, loops: TritonOps, table_width: int, pool: Pool | None
    ) -> None:
        self._source, self._check_ops, self._loop_ops, self._pool = source, checks, loops, pool
        self._table_width = table_width
        self._device = checks.keys.device
        self._checks: dict[Any, dict[Size, Check]] = {}
        self._loops: dict[tuple[Size, int, bool], _Loop] = {}
        self._asked: Counter[tuple[int, bool]] = Counter()  # how often a loop of so many steps was wanted
        self._drawn_from = Scratch()

    def fits(self, num_seqs: int, nodes: int, tokens: int) -> Size | None:
        """The size a pass would run at, or None: too wide, too many or too long for any."""
        chunks = rounded_up(-(-tokens // CHUNK), CHUNK_STEPS)
        width, many = rounded_up(nodes, FEW_WIDTHS if num_seqs == 1 else WIDTHS), rounded_up(num_seqs, NUM_SEQS)
        return None if chunks is None or width is None or many is None else Size(many, width, chunks)

    def _near(self, size: Size, captured: Iterable[Size]) -> Size:
        """A captured size that will do instead of a new one: the end of a sequence, or of a batch, needs no graphs of its
        own. One that would take another way to multiply would change the numbers, and is not near."""
        near = [other for other in captured if _does_for(other, size, self._check_ops)]
        return min(near, key=lambda other: (other.rows, other.chunks), default=size)

    def check(self, size: Size) -> Check:
        """The captured check of this size, or of one near it; made if there is none."""
        kind = (self._source.want_hidden, self._source.feature_layers)
        made = self._checks.setdefault(kind, {})
        size = self._near(size, made)
        if size not in made:
            staging = Staging(size, self._table_width, self._device)
            made[size] = Check(size, staging, self._made(lambda: self._check_work(staging), "a check"))
        return made[size]

    def repeat(self, check: Check, steps: int) -> Tensor:
        """One token a sequence, read again and again: what a pass finds best is what the next one reads. [sequences, steps]

        The device goes from pass to pass by itself. The host only queues them, so its own work costs nothing here.
        """
        staging, nodes = check.staging, check.size.nodes
        written = torch.empty(check.size.num_seqs, steps, dtype=torch.int64, device=self._device)
        for step in range(steps):
            written[:, step] = check.run().best.view(-1, nodes)[:, 0]
            staging.token_ids[:, 0] = written[:, step]
            staging.batch.lengths.add_(1)
        return written

    def loop(self, size: Size, steps: int, sampled: bool) -> _Loop:
        """The captured loop of these steps; made if there is none. One of a few more steps will do for the end of a
        sequence, but every step costs time: what is asked for again and again gets a loop of its own."""
        alike = [key for key in self._loops if key[2] == sampled and _does_for(key[0], size, self._loop_ops)]
        usable = [key for key in alike if steps <= key[1]]
        best = min(usable, key=lambda key: (key[1], key[0].rows, key[0].chunks), default=None)
        self._asked[steps, sampled] += 1
        if best is not None and (best[1] == steps or self._asked[steps, sampled] < OFTEN):
            return self._loops[best]
        staging = Staging(size, self._table_width, self._device)
        temperatures = torch.ones(size.num_seqs, 1, device=self._device)
        uniforms = torch.zeros(size.num_seqs, steps, dtype=torch.float64, device=self._device)
        made = _Loop(staging, temperatures, uniforms, lambda: Drafted(uniforms, None))
        made.run = self._made(lambda: self._loop_work(made, steps, sampled), "a drafting loop")
        keep_newest(self._loops, (size, steps, sampled), made, MOST_LOOPS)
        return made

    def _made(self, work: Callable[[], Any], label: str) -> Callable[[], Any]:
        return work if self._pool is None else Captured(work, label, self._pool)

    # --- what is captured ---------------------------------------------------------------------------------------------

    def _check_work(self, staging: Staging) -> Checked:
        source, ops = self._source, self._check_ops
        stream = source.weights.embedding[staging.token_ids.view(-1)]
        states = run_layers(
            source.weights, stream, staging.batch, ops, source.feature_layers, last=source.last_layer
        )
        hidden = ops.norm(states.stream, source.weights.final_norm) if source.want_hidden else None
        found = ops.best(states.stream, source.weights.final_norm, source.weights.head)
        return Checked(found.logits, ops.pick(found).token, hidden, states.features)

    def _loop_work(self, loop: _Loop, steps: int, sampled: bool) -> Drafted:
        source, ops, batch = self._source, self._loop_ops, loop.staging.batch
        stream = source.weights.embedding[loop.staging.token_ids.view(-1)]
        tokens: list[Tensor] = []
        shape = (batch.num_seqs, steps, source.weights.head.shape[0])
        probs = self._drawn_from.of(shape, self._device) if sampled else None
        for step in range(steps):
            states = run_layers(source.weights, stream, batch, ops, last=source.last_layer)
            last = states.stream if step else states.stream.view(batch.num_seqs, LEAD, -1)[:, -1].contiguous()
            found = ops.best(last, source.weights.final_norm, source.weights.head)
            if probs is not None:
                probs[:, step] = torch.softmax(found.logits / loop.temperatures, dim=-1)
                picked = ArgmaxResult(draw(probs[:, step], loop.uniforms[:, step]), None)
            else:
                picked = ops.pick(found, source.weights.embedding)
            tokens.append(picked.token)
            stream = source.weights.embedding[picked.token] if picked.stream is None else picked.stream
            batch = self._single(batch, LEAD + step)
        return Drafted(torch.stack(tokens, dim=1), probs)

    def _single(self, batch: TritonBatch, offset: int) -> TritonBatch:
        """One node a sequence, `offset` tokens behind where the loop began."""
        zeros = torch.zeros(batch.num_seqs, 1, dtype=torch.int64, device=self._device)
        there = batch.counts.clamp_max(1)
        return TritonBatch(batch.num_seqs, 1, batch.lengths, there, zeros, zeros + 1, batch.blocks, batch.chunks, offset)


def unpadded(checked: Checked, widths: list[int], nodes: int, last_only: bool) -> ModelOutput:
    """Drop the padding of a captured pass."""
    if last_only:
        ends = [index * nodes + width - 1 for index, width in enumerate(widths)]
        return ModelOutput(
            torch.stack([checked.logits[end] for end in ends]),
            [1] * len(widths),
            _without_padding(checked.hidden, widths, nodes),
            _without_padding(checked.features, widths, nodes),
            widths,
            torch.stack([checked.best[end] for end in ends]),
        )
    logits, best = (_without_padding(part, widths, nodes) for part in (checked.logits, checked.best))
    assert logits is not None
    hidden, features = (_without_padding(part, widths, nodes) for part in (checked.hidden, checked.features))
    return ModelOutput(logits, widths, hidden, features, None, best)


def _without_padding(padded: Tensor | None, widths: list[int], nodes: int) -> Tensor | None:
    if padded is None:
        return None
    if len(widths) == 1 or all(width == nodes for width in widths):
        return padded[: (len(widths) - 1) * nodes + widths[-1]]
    return torch.cat([padded[index * nodes : index * nodes + width] for index, width in enumerate(widths)])
