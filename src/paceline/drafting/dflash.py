"""A DFlash head drafts: one pass writes a whole block of draft tokens.

The target's states at every position but the last of the sequence are the head's context; their keys and values are
written once, for all layers by one product. The last token is the anchor of a block: the pass over the anchor and mask
tokens predicts the positions behind it. The block's own keys and values lie behind the context and are overwritten by
the target's next states.

A block costs the same whatever num_draft_tokens is: its first tokens are sent, at most block_size - 1.

chain   (nodes = 0)  one token a depth; a sampled sequence draws from the real q (block_rows.py)
tree    (nodes = n)  the likeliest paths through the likeliest tokens of every depth (block_tree.py); with nodes = 0
                     too where a device takes greedy steps in a row: it makes trees as quickly (tree_kernel.py)
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.draft_value import DraftValue
from paceline.core.looped_steps import LoopedSteps, LoopInput
from paceline.core.protocols import Drafter, Preparation, Runner
from paceline.core.sequence import Sequence, loop_input
from paceline.core.types import Capability, RowOutput, StepResult, WarmupPlan
from paceline.device.graphs import GraphPool
from paceline.device.properties import supports_graphs
from paceline.drafting.block_rows import DraftRows, block_rows
from paceline.drafting.block_tree import likeliest_trees
from paceline.drafting.dflash_graph import BRANCHES, BlockGraph, BlockGraphs, BlockInput
from paceline.drafting.draft_sampling import (
    SampledDraft,
    can_draft_on_device,
    choose,
    first_tokens,
    loop_uniforms,
    predrawn,
)
from paceline.drafting.eagle_graph import widened
from paceline.drafting.eagle_state import HeadState
from paceline.drafting.head_contexts import HeadContexts
from paceline.drafting.head_folder import checked_target, head_folder
from paceline.drafting.head_loop import HeadSource, most_nodes
from paceline.drafting.registry import DrafterContext, DrafterSpec, WeightsNeeded, options_of
from paceline.errors import OptionError, PairError
from paceline.heads.attention import KeyValues
from paceline.heads.compiled_block import CompiledHead, RopeTable, compiled_head
from paceline.heads.dflash import ContextProduct, DFlashHead
from paceline.heads.kv_cache import KeyBuffers
from paceline.heads.registry import load_head
from paceline.heads.rounded import round_linears
from paceline.kv.prefix_cache import PrefixCache
from paceline.layers.cpu_block import BlockCache, CompiledBlock, CompiledContext

OWNER = "dflash"  # in the prefix cache
CONTEXT_SIZES = (40, 64, 128, 256, 512)  # states; fewer are read by the graph of a block


class DFlash(Drafter):
    """Drafts with a DFlash, DFlash 2, DSpark or JetSpec head."""

    def __init__(
        self,
        head: DFlashHead,
        target: Runner,
        *,
        nodes: int = 0,
        branches: int = BRANCHES,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """nodes: of a tree, at most (num_draft_tokens may be fewer); 0 drafts chains. branches: children of a node."""
        if nodes < 0 or branches < 1:
            raise OptionError("dflash needs nodes of 0 or more, and branches of 1 or more")
        _check_pair(head, target)
        self.needs = frozenset({Capability.HIDDEN_STATES, Capability.TREE} if nodes else {Capability.HIDDEN_STATES})
        self.nodes, self.branches = nodes, branches
        self._view = target.expose(features=head.config.feature_layers)
        head.bind_target(target.embed, target.lm_head)
        self._head, self._vocab_size, self._target_ids = head, target.info.vocab_size, head.target_ids
        self._context_product = ContextProduct(head)
        heads = head.config.num_layers * head.config.num_kv_heads  # of all layers side by side
        buffers = KeyBuffers(heads, head.config.head_dim, head.like)
        self.contexts = HeadContexts(buffers, prefix_cache, OWNER, ahead=0)
        # Where launches dominate the cost, a whole block is one graph. On a CPU only the work counts; eager has less.
        self.graphs = self._block_graphs() if supports_graphs(self._device) else None
        self._compiled = CompiledHead(RopeTable(head))  # all layers in one call, where products are rounded
        self._states_confidence = False

    def use_value(self, value: DraftValue, source: str = "") -> None:
        """Where the host waits for nothing, confidences are free: those tokens of a block are sent that pay."""
        self._states_confidence = not supports_graphs(self._device)

    def loops_trees(self, plan: WarmupPlan) -> bool:
        return self.graphs is not None and self.graphs.makes_trees

    def preparations(self, plan: WarmupPlan) -> list[Preparation]:
        """Blocks of one sequence and of a batch. And what prompts and rests leave to be read at once: other sizes may
        be other kernels, loaded on first use."""
        if self.graphs is None:
            return []
        contexts: list[Preparation] = [partial(self._rehearse_context, count) for count in CONTEXT_SIZES]
        largest = max(plan.quick_batches or plan.num_seqs, default=1)
        return contexts + self.graphs.preparations(sorted({1, largest}), plan.max_context)

    @torch.inference_mode()
    def _rehearse_context(self, count: int) -> None:
        config = self._head.config
        width = config.target_hidden_size * len(config.feature_layers)
        features = torch.zeros(count, width, dtype=self._head.like.dtype, device=self._device)
        self._context_product(self._head.context(features)[None], torch.arange(count, device=self._device)[None])

    @property
    def _device(self) -> torch.device:
        return self._target_ids.device

    @property
    def _buffers(self) -> KeyBuffers:
        return self.contexts.buffers

    def _block_graphs(self, pool: GraphPool | None = None) -> BlockGraphs:
        parts = (self._head, self._context_product, self._buffers, self._vocab_size, pool)
        return BlockGraphs(*parts, nodes=self.nodes, branches=self.branches)

    def round_products(self) -> None:
        """Keep the products in the 8-bit blocks of the CPU kernels."""
        round_linears(self._head)
        round_linears(self._context_product)
        self._compiled = compiled_head(self._head, self._context_product)
        if self._head.candidate_selector is not None:
            self._head.candidate_selector.compile_path(self._target_ids)

    # --- states of the target -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self.contexts.begin(seq, None if prompt is None else self._view.of(prompt))

    @torch.inference_mode()
    def draft_loop(
        self, target: Runner, seqs: list[Sequence], num_draft_tokens: list[int], num_steps: int
    ) -> LoopedSteps | None:
        """Trees, where a block is a graph: they cost the host nothing. What a prompt has brought is read first."""
        graphs, depth = self.graphs, self._head.config.max_draft_tokens
        if graphs is None or not all(map(self.contexts.has, seqs)) or (self.nodes and not graphs.makes_trees):
            return None
        trees = graphs.makes_trees
        most = graphs.num_nodes if trees else depth
        inputs = [loop_input(seq, min(k, most)) for seq, k in zip(seqs, num_draft_tokens)]
        if not self._fits_graph(graphs, seqs) or most_nodes(inputs) > graphs.MAX_STATES:
            return None
        states = [self.contexts.of(seq) for seq in seqs]
        self._read_pending([state for state in states if state.num_pending > graphs.MAX_STATES])

        def prepare(inputs: list[LoopInput], num_tokens: int) -> BlockGraph:
            starts = [_start(state, loop.num_draft_tokens, depth) for state, loop in zip(states, inputs)]
            return graphs.prepared(starts, num_tokens, trees=trees)

        return target.draft_loop(HeadSource(self._view, states, prepare, trees), inputs, num_steps)

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        for seq, result in zip(seqs, results):
            states = self._view.of(result.output)
            if states is not None:
                self.contexts.extend(seq, result, states, alone=len(seqs) == 1)

    def end(self, seq: Sequence) -> None:
        self.contexts.end(seq)

    # --- drafting -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        active = [index for index, seq in enumerate(seqs) if num_draft_tokens[index] > 0 and self.contexts.has(seq)]
        trees = [draft_tree.empty() for _ in seqs]
        if not active:
            return trees
        states = [self.contexts.of(seqs[index]) for index in active]
        most = self.nodes or self._head.config.max_draft_tokens
        lengths = [min(num_draft_tokens[index], most) for index in active]
        for index, tree in zip(active, self._trees(states, lengths) if self.nodes else self._chains(states, lengths)):
            trees[index] = tree
        return trees

    def _trees(self, states: list[HeadState], limits: list[int]) -> list[DraftTree]:
        self._read_pending([state for state in states if state.pending])
        depth = min(max(limits), self._head.config.max_draft_tokens)
        return likeliest_trees(self._block(states, depth), self.branches, limits)

    def _chains(self, states: list[HeadState], num_draft_tokens: list[int]) -> list[DraftTree]:
        if self.graphs is not None and self._fits_graph(self.graphs, [state.seq for state in states]):
            return self._with_graph(self.graphs, states, num_draft_tokens)
        self._read_pending([state for state in states if state.pending])
        rows = self._block(states, max(num_draft_tokens))
        seqs = [state.seq for state in states]
        if all(seq.sampling.plain_greedy for seq in seqs):
            return self._likeliest(rows, num_draft_tokens)
        return self._one_by_one(rows, seqs, num_draft_tokens)

    def _likeliest(self, rows: DraftRows, num_draft_tokens: list[int]) -> list[DraftTree]:
        block = rows.greedy(self._states_confidence)
        chains = [draft_tree.chain(block.tokens[index, :k]) for index, k in enumerate(num_draft_tokens)]
        if block.confidence is None:
            return chains
        confidences: list[list[float]] = block.confidence.tolist()
        return [replace(tree, confidence=own[: len(tree)]) for tree, own in zip(chains, confidences)]

    def _fits_graph(self, graphs: BlockGraphs, seqs: list[Sequence]) -> bool:
        """Whether one graph drafts for all: tokens are chosen in one way."""
        if not all(map(can_draft_on_device, seqs)) or len({seq.sampling.greedy for seq in seqs}) > 1:
            return False
        return len(seqs) <= graphs.MAX_SEQS

    def _with_graph(self, graphs: BlockGraphs, states: list[HeadState], num_draft_tokens: list[int]) -> list[DraftTree]:
        self._read_pending([state for state in states if state.num_pending > graphs.MAX_STATES])  # prompts
        depth = self._head.config.max_draft_tokens
        drafted = graphs.draft([_start(state, k, depth) for state, k in zip(states, num_draft_tokens)])
        for state in states:
            state.mark_read(state.num_pending)
        return [first_tokens(drafted, row, k) for row, k in enumerate(num_draft_tokens)]

    def _read_pending(self, states: list[HeadState]) -> None:
        """Write the context of the states that came since the last call, of all sequences by one product."""
        if not states:
            return
        if self._compiled.context is not None:
            for state in states:
                self._read_compiled(self._compiled.context, state)
            return
        counts = [state.num_pending for state in states]
        features = torch.cat([part for state in states for part in state.pending])
        places = [state.next_position + step for state, count in zip(states, counts) for step in range(count)]
        positions = torch.tensor([places], device=self._device)
        entries = self._context_product(self._head.context(features)[None], positions)
        parts = zip(entries.keys[0].split(counts, dim=1), entries.values[0].split(counts, dim=1))
        for state, count, (keys, values) in zip(states, counts, parts):
            self._buffers.write(state.row, KeyValues(keys, values), state.length)
            state.mark_read(count)

    def _read_compiled(self, compiled: CompiledContext, state: HeadState) -> None:
        count = state.num_pending
        self._buffers.reserve(state.length + count)
        compiled.run(torch.cat(state.pending).float(), self._cache(state, count))
        state.mark_read(count)

    def _cache(self, state: HeadState, count: int) -> BlockCache:
        """For a compiled call that writes so many rows behind the context."""
        cached, rope = self._buffers.row(state.row), self._compiled.rope.rows(state.next_position, count)
        return BlockCache(cached.keys, cached.values, state.length, rope)

    def _block(self, states: list[HeadState], depth: int) -> DraftRows:
        """One pass over the anchor and mask tokens of every sequence; the rows of the first `depth` drafts."""
        config = self._head.config
        # A causal block may end with the last row that is needed; in any other the rows see those behind them.
        size = config.first_row + depth if config.is_causal else config.block_size
        anchors = [state.seq.ids[-1] for state in states]
        ids = torch.tensor([[anchor] + [config.mask_token_id] * (size - 1) for anchor in anchors], device=self._device)
        rows = torch.tensor([[state.next_position] for state in states], device=self._device)
        rows = rows + torch.arange(size, device=self._device)
        output = self._pass(states, ids, rows)[:, config.first_row : config.first_row + depth]
        return block_rows(self._head, output, ids[:, 0])

    def _pass(self, states: list[HeadState], ids: Tensor, rows: Tensor) -> Tensor:
        """The head's states of blocks of all sequences. ids, rows (positions): [sequences, size]"""
        lengths, size = [state.length for state in states], ids.shape[1]
        if self._compiled.block is not None:
            self._buffers.reserve(max(lengths) + size)
            return torch.stack([self._compiled_pass(self._compiled.block, *parts) for parts in zip(states, ids)])
        steps = torch.arange(max(lengths) + size, device=self._device)
        mask = None
        if len(set(lengths)) > 1:
            ends = torch.tensor(lengths, device=self._device) + size
            mask = (steps < ends[:, None])[:, None, None]
        columns = torch.tensor([state.start for state in states], device=self._device)[:, None] + steps
        stores = self._buffers.layers([state.row for state in states], lengths, size, self._head.config.num_kv_heads)
        return self._head.forward_block(ids, stores, rows, self._head.layer_masks(mask, rows, columns))

    def _compiled_pass(self, compiled: CompiledBlock, state: HeadState, ids: Tensor) -> Tensor:
        return compiled.run(self._head.embed(ids).float(), self._cache(state, len(ids)))

    def _one_by_one(self, rows: DraftRows, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        """One depth after another: a draw needs its logits final, and they may depend on the token before."""
        drafts = [SampledDraft() for _ in seqs]
        previous = rows.anchors
        for depth in range(max(num_draft_tokens)):
            logits = rows.logits(depth, previous)
            best = self._head.to_target_ids(logits.argmax(dim=-1, keepdim=True))
            active = [index for index, k in enumerate(num_draft_tokens) if depth < k]
            if self._states_confidence:
                confidences: list[float] = rows.confidence(depth, previous, logits)[active].tolist()
                for index, confidence in zip(active, confidences):
                    drafts[index].confidence = [*(drafts[index].confidence or ()), confidence]
            wide = partial(self._over_target_vocab, logits, active)
            choose([seqs[index] for index in active], best[active], wide, [drafts[index] for index in active])
            previous = previous.clone()
            previous[active] = torch.cat([drafts[index].tokens[-1] for index in active]).to(self._device)
        return [draft.chain(seq) for draft, seq in zip(drafts, seqs)]

    def _over_target_vocab(self, logits: Tensor, active: list[int], rows: list[int]) -> Tensor:
        return widened(logits[[active[row] for row in rows]], self._target_ids, self._vocab_size)


def _start(state: HeadState, num_draft_tokens: int, depth: int) -> BlockInput:
    """Where a graph starts the block of one sequence."""
    sampling = state.seq.sampling
    return BlockInput(
        state.row,
        state.length,
        state.next_position,
        state.seq.ids[-1],
        state.pending,
        state.num_pending,
        0.0 if sampling.greedy else sampling.temperature,
        loop_uniforms(predrawn(state.seq, num_draft_tokens), depth),
    )


def _check_pair(head: DFlashHead, target: Runner) -> None:
    """Raise PairError where a head was trained for another target."""
    config, info = head.config, target.info
    if config.target_hidden_size != info.hidden_size:
        raise PairError(
            f"this head reads states of {config.target_hidden_size} values; {info.name} has {info.hidden_size}"
        )
    if not (config.own_embeddings and config.own_lm_head) and config.hidden_size != info.hidden_size:
        raise PairError(
            f"this head has hidden size {config.hidden_size} and uses the embeddings and the output head of "
            f"{info.name}, which have {info.hidden_size} values"
        )
    if config.feature_layers[-1] > info.num_layers:
        raise PairError(
            f"this head reads the output of layer {config.feature_layers[-1] - 1}; "
            f"{info.name} has {info.num_layers} layers"
        )
    largest = max(int(head.target_ids.max()), config.mask_token_id)
    if largest >= info.vocab_size:
        raise PairError(f"this head uses token {largest}; {info.name} has {info.vocab_size} tokens")


# --- building ---------------------------------------------------------------------------------------------------------


def build(context: DrafterContext) -> DFlash:
    target = checked_target(SPEC.name, context.target, Capability.HIDDEN_STATES)
    folder = head_folder(SPEC.name, context)
    head = load_head(folder, DFlashHead, dtype=context.head_dtype, device=context.device)
    drafter = DFlash(head, target, prefix_cache=context.prefix_cache, **context.options)
    if context.head_in_int8:
        drafter.round_products()
    return drafter


SPEC = DrafterSpec(
    name="dflash",
    summary="a DFlash, DFlash 2, DSpark or JetSpec head writes a block of draft tokens in one pass",
    weights=WeightsNeeded.HEAD,
    build=build,
    options=options_of(DFlash),
    reference="DFlash, https://arxiv.org/abs/2602.06036; DSpark, https://arxiv.org/abs/2607.05147; "
    "JetSpec, https://arxiv.org/abs/2606.18394",
    head_kind="dflash",
    one_pass=True,
)
