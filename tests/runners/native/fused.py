"""Decode passes without graphs: through the fused kernels, which Triton interprets where there is no GPU, or torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.types import DraftOutput, Row
from paceline.device.graphs import EagerPool
from paceline.layers.attention_triton import TritonBatch
from paceline.runners.native import NativeRunner
from paceline.runners.native.decode_graphs import DecodeGraphs, DraftBuffers, DraftKey, PassOutput
from paceline.runners.native.kv_cache import NativeSequenceCache
from paceline.runners.native.pass_inputs import LEAD_TOKENS, PassInputs


def eager_graphs(runner: NativeRunner) -> DecodeGraphs:
    parts = (runner.model, runner.kv, runner._rope_caches, runner.options)
    return DecodeGraphs(*parts, EagerPool(), batch_invariant=runner.batch_invariant)


class TorchGraphs(DecodeGraphs):
    """Graphs whose work is the runner's eager pass over the inputs that a graph reads: quick without a GPU.

    What the inputs say of a sequence (its blocks, its length, its tokens) is all that it knows.
    """

    def __init__(self, runner: NativeRunner) -> None:
        super().__init__(runner.model, runner.kv, runner._rope_caches, runner.options, EagerPool())
        self._runner = runner

    def _forward_work(self, inputs: PassInputs) -> PassOutput:
        return self._pass(inputs.batch, inputs.token_ids)

    def _draft_work(self, buffers: DraftBuffers, key: DraftKey) -> DraftOutput:
        batch, tokens = buffers.inputs.batch, [buffers.inputs.token_ids]
        for step in range(key.num_tokens):
            best = self._pass(replace(batch, nodes=tokens[-1].shape[1]), tokens[-1], single=step > 0).best
            tokens.append(best.view(batch.num_seqs, -1)[:, -1:])
            batch = replace(batch, offset=LEAD_TOKENS + step)
        return DraftOutput(torch.cat(tokens[1:], dim=1))

    def _pass(self, batch: TritonBatch, token_ids: Tensor, *, single: bool = False) -> PassOutput:
        """Padding has zeros."""
        rows, places = [], []
        for index, count in enumerate(batch.counts.tolist()):
            if count:
                count = 1 if single else count
                cache = _over_blocks(self._runner, batch.blocks[index], int(batch.lengths[index]) + batch.offset, count)
                parents = [-1] if single else _parents(batch.tree_mask[index, :count])
                rows.append(Row(cache, token_ids[index, :count].clone(), parents))
                places += range(index * batch.nodes, index * batch.nodes + count)
        output = self._runner.eager.forward(rows, last_only=False)
        for row in rows:
            self._runner.kv.blocks._tables.pop(row.seq_cache)
        parts = (output.logits.float(), output.hidden, output.features)
        logits, hidden, features = (_padded(part, places, batch.num_seqs * batch.nodes) for part in parts)
        assert logits is not None
        return PassOutput(logits, logits.argmax(-1), hidden, features)


def _parents(tree_mask: Tensor) -> list[int]:
    """The node before each node: of those it sees, the last one beside itself."""
    return [(mask ^ (1 << node)).bit_length() - 1 for node, mask in enumerate(tree_mask.tolist())]


def _padded(part: Tensor | None, places: list[int], rows: int) -> Tensor | None:
    if part is None:
        return None
    padded = part.new_zeros(rows, part.shape[-1])
    padded[places] = part
    return padded


def _over_blocks(runner: NativeRunner, blocks: Tensor, length: int, count: int) -> NativeSequenceCache:
    """A sequence cache over the blocks that a graph's inputs name. It holds none of them for the pool."""
    cache = NativeSequenceCache()
    cache.length = length
    needed = -(-(length + count) // runner.kv.block_size)
    runner.kv.blocks._tables[cache] = blocks[:needed].tolist()
    return cache
