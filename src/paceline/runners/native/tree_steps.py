"""Steps in a row whose draft tokens are trees: as those of step_loops.py, and nodes off a tree's first path count too.

The target reads a tree as it was made, parents before children. What was accepted of it lies apart in the cache, so its
keys and values move to where those of a chain would be, and states are handed on in the order of the path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.draft_tree import ROOT
from paceline.core.looped_steps import LoopedStep, LoopProgress
from paceline.core.protocols import LoopSource
from paceline.core.types import DraftOutput, RowOutput, VerifyResult
from paceline.runners.native.decode_graphs import ForwardGraph, PassOutput
from paceline.runners.native.kv_cache import KVCache
from paceline.runners.native.outputs import by_sequence
from paceline.runners.native.pass_inputs import MAX_NODES
from paceline.runners.native.tree_kernels import move_accepted, put_tree, settle_tree

BLOCK = MAX_NODES + 1  # one size for all graphs, so that none has to compile
FIELDS = 3  # of the row that the device leaves of a step, before its draft tokens, their parents and the accepted ones


@dataclass(frozen=True, slots=True, eq=False)
class _Path:
    """What was accepted of every tree. order: its nodes first, [sequences, k + 1]"""

    accepted: Tensor
    grown: Tensor
    last_tokens: Tensor
    order: Tensor

    def sort(self, nodes: Tensor) -> Tensor:
        """What belongs to nodes, [sequences, k + 1, …], in that order."""
        return nodes[torch.arange(len(nodes), device=nodes.device)[:, None], self.order]


@dataclass(frozen=True, slots=True, eq=False)
class TreeSteps:
    """Queues steps.

    limits  draft tokens of each sequence in a step, on the device
    k       the most of them
    """

    graph: ForwardGraph
    source: LoopSource
    kv: KVCache
    limits: Tensor
    k: int

    @property
    def num_seqs(self) -> int:
        return self.limits.shape[0]

    @property
    def width(self) -> int:
        """Numbers of the row of a sequence."""
        return FIELDS + 3 * self.k

    @torch.inference_mode()
    def queue(self, step: int) -> Tensor:
        """A row of each sequence, for `looped_step`."""
        draft = self.source.draft()
        parents = draft.parents
        assert parents is not None and parents.shape[1] >= self.k, "a source of trees says how they hang together"
        assert parents.stride() == draft.tokens.stride() and parents.stride(1) == 1, "both are read alike"
        self._put(draft, parents)
        output = self.graph.run()
        rows = torch.empty(self.num_seqs, self.width, dtype=torch.int64, device=self.limits.device)
        path = self._settle(parents, output, rows)
        self._move(path)
        best = path.sort(self._by_sequence(output.best))
        progress = LoopProgress(path.accepted, best, path.grown, path.last_tokens)
        self.source.go_on(step, progress, self._states(output, path))
        return rows

    def looped_step(self, row: list[int]) -> LoopedStep:
        """The row that the device has left of a step (tree_kernels.settle_tree)."""
        accepted, next_token, made = row[:FIELDS]
        parts = (row[FIELDS + index * self.k :] for index in range(3))
        tokens, parents, path = (part[:count] for part, count in zip(parts, (made, made, accepted)))
        nodes = [node - 1 for node in path]
        verified = VerifyResult(nodes, next_token, [tokens[node] for node in nodes])
        return LoopedStep(tokens, verified, parents=[parent - 1 if parent else ROOT for parent in parents])

    def _put(self, draft: DraftOutput, parents: Tensor) -> None:
        inputs, nodes = self.graph.buffers, self.graph.key.size.nodes
        batch = inputs.batch
        put_tree[(self.num_seqs,)](
            *(draft.tokens, parents, self.limits, inputs.token_ids, batch.counts, batch.depths, batch.tree_mask),
            *(parents.stride(0), nodes, self.k),
            BLOCK=BLOCK,
            num_warps=1,
        )

    def _settle(self, parents: Tensor, output: PassOutput, rows: Tensor) -> _Path:
        inputs, nodes, device = self.graph.buffers, self.graph.key.size.nodes, self.limits.device
        accepted, grown = torch.empty(2, self.num_seqs, dtype=torch.int64, device=device)
        last_tokens = torch.empty(self.num_seqs, 2, dtype=torch.int64, device=device)
        order = torch.empty(self.num_seqs, self.k + 1, dtype=torch.int64, device=device)
        settle_tree[(self.num_seqs,)](
            *(parents, self.limits, output.best, inputs.token_ids, inputs.batch.lengths),
            *(accepted, grown, last_tokens, order, rows, parents.stride(0), nodes, self.k),
            FIELDS=FIELDS,
            BLOCK=BLOCK,
            num_warps=1,
        )
        return _Path(accepted, grown, last_tokens, order)

    def _move(self, path: _Path) -> None:
        keys, batch = self.kv.keys, self.graph.buffers.batch
        size = keys[0, 0].numel()
        move_accepted[(keys.shape[0], self.num_seqs)](
            *(keys, self.kv.values, batch.blocks, batch.lengths, path.accepted, path.order, keys.stride(0)),
            *(self.kv.block_size, batch.blocks.shape[1], self.k),
            SIZE=size,
            BLOCK=1 << (size - 1).bit_length(),
        )

    def _by_sequence(self, rows: Tensor) -> Tensor:
        return by_sequence(rows, self.graph.key.size.nodes)[: self.num_seqs, : self.k + 1]

    def _states(self, output: PassOutput, path: _Path) -> RowOutput:
        parts = (output.hidden, output.features)
        hidden, features = (None if part is None else path.sort(self._by_sequence(part)) for part in parts)
        return RowOutput(output.logits, hidden, features)
