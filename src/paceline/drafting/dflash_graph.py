"""A block of a DFlash head as one CUDA graph: write the context of the target's new states, then draft a block.

Every shape is fixed and all that varies lies in tensors: the host copies the inputs and replays the graph, and the
draft tokens stay on the device until the target has verified them. A graph always drafts a whole block, whatever
num_draft_tokens is: it is the same work, and fewer graphs are captured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from paceline.core.protocols import Preparation
from paceline.core.sampling import draw_keyed
from paceline.core.types import DraftOutput
from paceline.device.graphs import NUM_SEQS, Graph, GraphCache, GraphPool, rounded_up
from paceline.device.memory import host_buffer
from paceline.device.scratch import Scratch
from paceline.drafting.block_rows import DraftRows, block_rows
from paceline.drafting.eagle_graph import MAX_GRAPHS, ROOM_ROWS, ROOM_TOKENS, put_draws, widened
from paceline.heads.dflash import ContextProduct, DFlashHead
from paceline.heads.kv_cache import FIRST_CAPACITY, KeyBuffers

MAX_STATES = 32  # of the target that a sequence may bring. One size, so that no draft needs a graph that is not there
LONG_CONTEXT = 2048  # entries that blocks are prepared for; longer ones are captured when they come
MORE = 4  # times as many sequences and columns a graph may have: reading the head's weights is what takes time
BRANCHES = 4  # children of a node of a tree, at most
FACTS = 5  # integers of a sequence: row of the buffers, entries there, position of the next, new states, anchor


@dataclass(frozen=True, slots=True, eq=False)
class BlockInput:
    """What the block of one sequence starts from."""

    row: int  # of the buffers
    length: int  # entries in it
    place: int  # position of the next entry
    anchor: int  # the last token of the sequence
    states: list[Tensor]  # of the target, not read yet, each [count, features]
    num_states: int
    temperature: float = 0.0  # 0: the argmax
    uniforms: list[float] | None = None  # a uniform number a depth; needed where the temperature is above 0


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What a block is captured for."""

    num_seqs: int
    seen: int  # columns of the buffers
    drawn: bool
    trees: bool = False

    def runs(self, other: BlockShape) -> bool:
        """Whether the graph of this shape also drafts for another one, in not much more time."""
        alike = (self.drawn, self.trees) == (other.drawn, other.trees)
        few = other.num_seqs <= self.num_seqs <= MORE * other.num_seqs
        return alike and few and other.seen <= self.seen <= MORE * other.seen

    @property
    def cost(self) -> tuple[int, int]:
        """Of those that draft for a batch the least is the cheapest."""
        return self.num_seqs, self.seen


@dataclass(frozen=True, slots=True, eq=False)
class BlockBuffers:
    """The fixed tensors of one captured block."""

    host: Tensor  # int64 [sequences, FACTS], pinned where that helps
    facts: Tensor  # the same on the device
    states: Tensor  # [sequences, num_states, features]
    temperatures: Tensor  # float32 [sequences, 1]
    uniforms: Tensor  # float64 [sequences, depth]

    @classmethod
    def empty(cls, shape: BlockShape, head: DFlashHead) -> BlockBuffers:
        config, device = head.config, head.like.device
        features = len(config.feature_layers) * config.target_hidden_size
        return cls(
            host_buffer((shape.num_seqs, FACTS), torch.int64, device),
            torch.zeros(shape.num_seqs, FACTS, dtype=torch.int64, device=device),
            head.like.new_zeros(shape.num_seqs, MAX_STATES, features),
            torch.ones(shape.num_seqs, 1, device=device),
            torch.zeros(shape.num_seqs, config.max_draft_tokens, dtype=torch.float64, device=device),
        )

    def put(self, starts: list[BlockInput], spare_row: int) -> None:
        """Copy the inputs of these sequences. Unused rows of the batch work on the spare row, without a context."""
        lines = [[start.row, start.length, start.place, start.num_states, start.anchor] for start in starts]
        lines += [[spare_row, 0, 0, 0, 0]] * (self.host.shape[0] - len(starts))
        self.host.copy_(torch.tensor(lines))
        self.facts.copy_(self.host, non_blocking=True)
        for index, start in enumerate(starts):
            first = 0
            for part in start.states:
                self.states[index, first : first + part.shape[0]].copy_(part)
                first += part.shape[0]
        if starts[0].uniforms is not None:
            put_draws(starts, self.temperatures, self.uniforms)

    def go_on(self, accepted: Tensor, best: Tensor) -> None:
        """As head_loop.HeadBuffers says. The anchor is the token after the last of the states."""
        facts = self.facts[: accepted.shape[0]]
        facts[:, 1:3] += facts[:, 3:4]
        facts[:, 3], facts[:, 4] = accepted + 1, best.gather(1, accepted[:, None])[:, 0]


BlockGraph = Graph[BlockShape, BlockBuffers, DraftOutput]


class BlockGraphs:
    """The captured blocks of one head, captured on first use."""

    MAX_SEQS, MAX_STATES = NUM_SEQS[-1], MAX_STATES

    def __init__(
        self,
        head: DFlashHead,
        context_product: ContextProduct,
        buffers: KeyBuffers,
        vocab_size: int,
        pool: GraphPool | None = None,
        *,
        nodes: int = 0,
        branches: int = BRANCHES,
    ) -> None:
        """vocab_size: the target's. pool: captures blocks; by default a pool for the device of the head. nodes: of a
        tree, if more than a block has; branches: children of a node."""
        self._head, self._context_product, self._buffers, self._vocab = head, context_product, buffers, vocab_size
        self.num_nodes, self._branches = _num_nodes(head, nodes, branches), branches
        pool = pool or GraphPool("a block of draft tokens", head.like.device)
        self._graphs: GraphCache[BlockShape, BlockBuffers, DraftOutput] = GraphCache(
            pool, MAX_GRAPHS, near=BlockShape.runs, cost=lambda shape: shape.cost
        )
        self._spare_row = buffers.take()
        buffers.reserve(ROOM_TOKENS, ROOM_ROWS)
        self._drawn_from = Scratch()
        self._version = buffers.version

    def draft(self, starts: list[BlockInput]) -> DraftOutput:
        """A whole block of draft tokens for every sequence; its buffers then hold its states too."""
        output, count = self.prepared(starts).run(), len(starts)
        return DraftOutput(output.tokens[:count], None if output.probs is None else output.probs[:count])

    @property
    def makes_trees(self) -> bool:
        """Whether a block can be a tree: what its rows say must not depend on all tokens before them."""
        return self._branches > 1 and self._head.markov_head is None

    def preparations(self, batches: list[int], max_context: int) -> list[Preparation]:
        """Chains and trees of so many sequences, of a long context and of a short one: their graphs also run those
        between."""
        trees, longest = sorted({False, self.makes_trees}), min(max_context, LONG_CONTEXT)
        sizes = product(batches, trees, sorted({longest, min(longest, FIRST_CAPACITY)}, reverse=True))
        return [partial(self._prepare, *size) for size in sizes]

    @torch.inference_mode()
    def _prepare(self, num_seqs: int, trees: bool, tokens: int) -> None:
        further = max(0, tokens - MAX_STATES - self._head.config.block_size)
        self.prepared([BlockInput(self._spare_row, 0, 0, 0, [], 0)] * num_seqs, further, trees=trees)

    def prepared(self, starts: list[BlockInput], num_further: int = 0, *, trees: bool = False) -> BlockGraph:
        """The graph of a block with these sequences in its inputs.

        num_further: tokens that a sequence may grow by until a later block of the same graph
        trees: the likeliest nodes instead of a chain, as many
        """
        shape = replace(self._shape(starts, num_further), trees=trees)
        self._buffers.reserve(shape.seen)
        if self._version != self._buffers.version:  # they have moved, and captured blocks write where they were
            self._graphs.clear()
            self._version = self._buffers.version
        graph = self._graphs.nearest(shape) or self._graphs.get(
            shape, lambda: BlockBuffers.empty(shape, self._head), lambda buffers: self._work(buffers, shape)
        )
        graph.buffers.put(starts, self._spare_row)
        return graph

    def _shape(self, starts: list[BlockInput], num_further: int) -> BlockShape:
        seqs, states = rounded_up(len(starts), NUM_SEQS), max(start.num_states for start in starts)
        assert seqs is not None and states <= MAX_STATES, "more sequences or states than a block holds"
        longest = max(start.length for start in starts) + num_further + MAX_STATES + self._head.config.block_size
        seen = max(FIRST_CAPACITY, 1 << (longest - 1).bit_length())
        return BlockShape(seqs, seen, starts[0].uniforms is not None)

    # --- what is captured ---------------------------------------------------------------------------------------------

    def _work(self, given: BlockBuffers, shape: BlockShape) -> DraftOutput:
        rows = self._rows(given, shape)
        if shape.trees:
            from paceline.drafting.tree_kernel import likeliest_nodes  # where there is no graph there may be no Triton

            return likeliest_nodes(rows.ranked(self._branches), self.num_nodes)
        if not shape.drawn:
            return DraftOutput(rows.greedy().tokens)
        probs = self._drawn_from.of((shape.num_seqs, rows.depth, self._vocab), given.facts.device)
        tokens: list[Tensor] = [rows.anchors]
        for depth in range(rows.depth):
            logits = widened(rows.logits(depth, tokens[-1]), self._head.target_ids, self._vocab)
            probs[:, depth] = torch.softmax(logits / given.temperatures, dim=-1)
            tokens.append(draw_keyed(probs[:, depth], given.uniforms[:, depth]))
        return DraftOutput(torch.stack(tokens[1:], dim=1), probs)

    def _rows(self, given: BlockBuffers, shape: BlockShape) -> DraftRows:
        """The pass over a block, behind the context of the new states. Entries of padding are overwritten or masked."""
        head, config = self._head, self._head.config
        row, length, place, count, anchor = given.facts.unbind(dim=1)
        arange = torch.arange(max(shape.seen, config.block_size), device=given.facts.device)
        new, block = arange[:MAX_STATES], arange[: config.block_size]
        entries = self._context_product(head.context(given.states), place[:, None] + new)
        self._buffers.put(row, length[:, None] + new, entries)
        end, behind = length + count, place + count
        ids = torch.full((shape.num_seqs, config.block_size), config.mask_token_id, device=given.facts.device)
        ids[:, 0] = anchor
        stores = self._buffers.indexed_layers(row, end[:, None] + block, shape.seen, config.num_kv_heads)
        columns, positions = arange[: shape.seen], behind[:, None] + block
        mask = (columns < (end + config.block_size)[:, None])[:, None, None]
        masks = head.layer_masks(mask, positions, (place - length)[:, None] + columns)
        states = head.forward_block(ids, stores, positions, masks)
        return block_rows(head, states[:, config.first_row :], anchor)


def _num_nodes(head: DFlashHead, nodes: int, branches: int) -> int:
    """Nodes of a tree: as many as a block has tokens or as were asked for, and no more than there can be."""
    selector, depth = head.candidate_selector, head.config.max_draft_tokens
    ranks = min(branches, head.config.draft_vocab_size if selector is None else selector.top_k)
    paths: int = sum(ranks**place for place in range(1, depth + 1))
    return min(max(nodes, depth), paths)
