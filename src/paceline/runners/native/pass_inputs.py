"""The integers of a captured pass: filled on the host, sent in one copy, read by the graph where they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.draft_tree import depths
from paceline.core.types import Row
from paceline.device.memory import Upload, host_buffer
from paceline.layers.attention_triton import TritonBatch
from paceline.layers.gemm_tiling import TILE_ROWS
from paceline.layers.linear_attention import DeltaNetSpans, DeltaNetStates
from paceline.runners.native.kv_cache import BlockTables
from paceline.runners.native.sequence_state import StateSpan

MAX_NODES = 63  # of one sequence: which nodes a node sees are the bits of an int64
LEAD_TOKENS = 2  # tokens of a sequence that a drafting loop reads before its first draft token
CHAIN_DEPTHS: NDArray[np.int64] = np.arange(MAX_NODES, dtype=np.int64)
CHAIN_MASK: NDArray[np.int64] = (np.int64(1) << (CHAIN_DEPTHS + 1)) - 1


@dataclass(frozen=True, slots=True)
class PassSize:
    """What a graph is captured for."""

    num_seqs: int
    nodes: int  # of each sequence
    chunks: int  # of context
    trees: bool = False  # nodes need not be chains

    @property
    def rows(self) -> int:
        return self.num_seqs * self.nodes

    def holds(self, other: PassSize) -> bool:
        fits = self.num_seqs >= other.num_seqs and self.nodes >= other.nodes and self.chunks >= other.chunks
        return fits and self.trees >= other.trees

    def runs(self, other: PassSize, more_rows: int) -> bool:
        """Whether the graph of this size may run another one: with at most so many times its rows, and not with many
        chunks more, or after a single long sequence all others would launch its empty ones."""
        if not self.holds(other) or self.chunks > 2 * other.chunks:
            return False
        return self.rows <= max(TILE_ROWS, more_rows * other.rows)

    @property
    def cost(self) -> tuple[int, int, bool]:
        """Of those that run a pass the least is the cheapest."""
        return self.rows, self.chunks, self.trees


def tree_mask(parents: list[int]) -> list[int]:
    """For every node the nodes it sees, as bits: itself and its ancestors."""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((1 << node) | (masks[parent] if parent >= 0 else 0))
    return masks


def _spans(memory: DeltaNetStates, views: dict[str, Tensor], size: PassSize) -> DeltaNetSpans:
    """The inputs of recurrent layers: nodes lie sequence after sequence, padded."""
    seqs = torch.arange(size.num_seqs, device=memory.states.device)
    slots, state_lengths, folds = (views[name] for name in ("slots", "state_lengths", "folds"))
    lengths, counts, node_seqs = views["lengths"], views["counts"], seqs.repeat_interleave(size.nodes)
    return DeltaNetSpans(memory, slots, state_lengths, folds, lengths, counts, seqs * size.nodes, node_seqs)


class PassInputs:
    """One buffer on the host and one on the device, each with a view for every input.

    memory       the states of recurrent layers, where the model has any
    has_windows  layers with a window have block tables of their own
    """

    def __init__(
        self,
        size: PassSize,
        table_width: int,
        device: torch.device,
        memory: DeltaNetStates | None = None,
        *,
        has_windows: bool = False,
    ) -> None:
        num_seqs, nodes = size.num_seqs, size.nodes
        self._shapes = {
            "lengths": (num_seqs,),
            "counts": (num_seqs,),
            "depths": (num_seqs, nodes),
            "tree_mask": (num_seqs, nodes),
            "tokens": (num_seqs, nodes),
            "slots": (num_seqs,),
            "state_lengths": (num_seqs,),
            "folds": (num_seqs,),
            "blocks": (num_seqs, table_width),
            "window_blocks": (num_seqs, table_width if has_windows else 0),
        }
        total = sum(int(np.prod(shape)) for shape in self._shapes.values())
        self._host = host_buffer((total,), torch.int64, device)
        self._device = torch.zeros(total, dtype=torch.int64, device=device)
        self._upload = Upload(self._host, self._device)
        self._arrays: dict[str, NDArray[np.int64]] = {
            name: view.numpy() for name, view in self._views(self._host).items()
        }
        views = self._views(self._device)
        self.token_ids = views["tokens"]
        self.batch = TritonBatch(
            num_seqs,
            nodes,
            views["lengths"],
            views["counts"],
            views["depths"],
            views["tree_mask"],
            views["blocks"],
            views["window_blocks"],
            size.chunks,
            recurrent=None if memory is None else _spans(memory, views, size),
            trees=size.trees,
        )

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([int(np.prod(shape)) for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts)}

    def begin(self) -> None:
        """Before the first row of a pass."""
        self._upload.wait()

    def put_row(self, index: int, row: Row, tables: BlockTables) -> None:
        """Sequence `index` reads this row after what its cache holds. `send_tokens` copies tokens on the device."""
        arrays, count = self._arrays, len(row.parents)
        arrays["lengths"][index], arrays["counts"][index] = row.seq_cache.length, count
        self._put_tables(index, tables)
        chain = row.is_chain
        arrays["depths"][index, :count] = CHAIN_DEPTHS[:count] if chain else depths(row.parents)
        arrays["tree_mask"][index, :count] = CHAIN_MASK[:count] if chain else tree_mask(row.parents)
        if row.lead is not None:
            arrays["tokens"][index, 0] = row.lead
        if not row.tokens.is_cuda and row.tokens.shape[0]:
            arrays["tokens"][index, count - row.tokens.shape[0] : count] = row.tokens.numpy()

    def _put_tables(self, index: int, tables: BlockTables) -> None:
        self._arrays["blocks"][index, : len(tables.full)] = tables.full
        self._arrays["window_blocks"][index, : len(tables.windowed)] = tables.windowed

    def put_state(self, index: int, span: StateSpan) -> None:
        """Where the state of sequence `index` is, and how far."""
        arrays = self._arrays
        arrays["slots"][index], arrays["state_lengths"][index] = span.slot, span.state.now.length
        arrays["folds"][index] = span.folded

    def advance(self) -> None:
        """Every sequence reads the token after its row. What was to be folded has been."""
        self.batch.lengths.add_(1)
        if self.batch.recurrent is not None:
            self.batch.recurrent.state_lengths.copy_(self.batch.recurrent.folds)

    def put_lead(self, index: int, ids: list[int], tables: BlockTables) -> None:
        """Sequence `index` of a drafting loop: its last two tokens."""
        arrays = self._arrays
        arrays["lengths"][index], arrays["counts"][index] = len(ids) - LEAD_TOKENS, LEAD_TOKENS
        self._put_tables(index, tables)
        arrays["depths"][index], arrays["tree_mask"][index] = CHAIN_DEPTHS[:LEAD_TOKENS], CHAIN_MASK[:LEAD_TOKENS]
        arrays["tokens"][index] = ids[-LEAD_TOKENS:]

    def send(self, num_seqs: int) -> None:
        """Send everything; there are no sequences beyond the first `num_seqs`."""
        self._arrays["counts"][num_seqs:] = 0
        self._upload.send()

    def send_tokens(self, rows: list[Row]) -> None:
        """Copy the tokens of rows that are on the device already, such as draft tokens."""
        for index, row in enumerate(rows):
            if row.tokens.is_cuda and row.tokens.shape[0]:
                first = len(row.parents) - row.tokens.shape[0]
                self.token_ids[index, first : len(row.parents)].copy_(row.tokens)
