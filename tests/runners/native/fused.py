"""Decode passes without graphs: through the fused kernels, which Triton interprets where there is no GPU, or torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.core.confidence import bin_of
from paceline.core.types import DraftOutput, Row
from paceline.device.graphs import EagerPool
from paceline.layers.attention_triton import TritonBatch
from paceline.runners.native import NativeRunner
from paceline.runners.native.decode_graphs import DecodeGraphs, DraftBuffers, DraftKey, PassOutput
from paceline.runners.native.kv_cache import NativeSequenceCache
from paceline.runners.native.pass_inputs import LEAD_TOKENS, PassInputs
from paceline.runners.native.persistent_pass import (
    CHAIN_COUNT,
    CHAIN_GOES_ON,
    CHAIN_LEAST,
    CHAIN_MOST,
    CHAIN_RATES,
    CHAIN_SURVIVAL,
    CHAIN_VOCAB_ROWS,
)


def eager_graphs(runner: NativeRunner) -> DecodeGraphs:
    parts = (runner.model, runner.kv, runner._rope_caches, runner.options)
    return DecodeGraphs(*parts, EagerPool(), batch_invariant=runner.batch_invariant)


class ChainReference:
    """What the kernel does with a draft chain (persistent_pass.cu), in torch."""

    def __init__(self, words: Tensor) -> None:
        self.words = words

    def has_ended(self, step: int) -> bool:
        return step > 0 and not self.words[CHAIN_GOES_ON]

    def cut(self, logits: Tensor) -> Tensor:
        """What draft tokens are chosen from."""
        return logits[..., : int(self.words[CHAIN_VOCAB_ROWS]) or None]

    def extend(self, step: int, confidence: Tensor, counts: Tensor) -> None:
        words, survival = self.words, self.words[CHAIN_SURVIVAL:]
        rates = words[CHAIN_RATES:CHAIN_SURVIVAL][[bin_of(value) for value in confidence.tolist()]]
        survival[:] = (survival if step else 1.0) * rates
        words[CHAIN_COUNT] = step + 1
        gain = float((survival * rates)[counts > 0].sum())
        words[CHAIN_GOES_ON] = float(step + 1 < words[CHAIN_MOST] and gain >= words[CHAIN_LEAST])


class TorchGraphs(DecodeGraphs):
    """Graphs whose work is the runner's eager pass over the inputs that a graph reads: quick without a GPU.

    What the inputs say of a sequence (its blocks, its length, its tokens) is all that it knows.
    """

    def __init__(self, runner: NativeRunner, pool: EagerPool | None = None) -> None:
        super().__init__(runner.model, runner.kv, runner._rope_caches, runner.options, pool or EagerPool())
        self._runner = runner

    def _forward_work(self, inputs: PassInputs) -> PassOutput:
        return self._pass(inputs.batch, inputs.token_ids)

    def _draft_work(self, buffers: DraftBuffers, key: DraftKey) -> DraftOutput:
        batch, tokens, chosen = buffers.inputs.batch, [buffers.inputs.token_ids], []
        chain = ChainReference(buffers.chain.words)
        for step in range(key.num_tokens):
            if chain.has_ended(step):
                break
            output = self._pass(replace(batch, nodes=tokens[-1].shape[1]), tokens[-1], single=step > 0)
            logits = chain.cut(output.logits)
            tokens.append(logits.argmax(-1).view(batch.num_seqs, -1)[:, -1:])
            nodes = logits.softmax(-1).view(batch.num_seqs, -1, logits.shape[-1])
            chosen.append(nodes[:, -1].topk(2))
            chain.extend(step, chosen[-1].values[:, 0], batch.counts)
            batch = replace(batch, offset=LEAD_TOKENS + step)
        missing = (0, key.num_tokens - len(chosen))
        drafted = pad(torch.cat(tokens[1:], dim=1), missing)
        probs, others = (torch.stack([getattr(two, name) for two in chosen], dim=1) for name in ("values", "indices"))
        stated, second_stated = pad(probs[..., 0], missing), pad(probs[..., 1], missing)
        return DraftOutput(drafted, None, stated, buffers.chain.count, pad(others[..., 1], missing), second_stated)

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
