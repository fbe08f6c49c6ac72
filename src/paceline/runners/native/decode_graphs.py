"""Graphs of narrow passes: a few nodes a sequence, fed through one small upload a pass.

Two kinds. A forward graph reads the last token and the draft tokens of every sequence. A drafting graph reads the last
two tokens of every sequence (the draft model may lack the target's own token, or the last draft token too; reading a
token twice writes the same numbers again) and then takes step after step without returning to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from paceline.core.protocols import Preparation
from paceline.core.sampling import draw_keyed
from paceline.core.types import DraftInput, DraftOutput, ModelOutput, Row, WarmupPlan
from paceline.device.graphs import NUM_SEQS, Graph, GraphCache, GraphPool, rounded_up
from paceline.device.scratch import Scratch
from paceline.layers.attention_kernels import CHUNK
from paceline.layers.attention_triton import TritonAttention, TritonBatch
from paceline.layers.gemm import GemmLauncher
from paceline.layers.linear_attention import DeltaNetStates
from paceline.layers.triton_ops import TritonOps
from paceline.models.decoder import DecoderModel
from paceline.runners.native.eager_pass import attention_sizes
from paceline.runners.native.kv_cache import KVCache, own
from paceline.runners.native.outputs import OutputOptions, logits_of, row_ends
from paceline.runners.native.pass_inputs import LEAD_TOKENS, MAX_NODES, PassInputs, PassSize
from paceline.runners.native.persistent_pass import ChainLink, DraftChain, OutputWish, PersistentPass, TokenSource
from paceline.runners.native.prepared_sizes import CHUNKS, draft_sizes, forward_sizes
from paceline.runners.native.sequence_state import StateSpan

NODES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, MAX_NODES)
# One sequence: all sizes up to a tile cost the same within 3%, and each graph costs a second or two, once.
FEW_NODES = (1, 2, 6, 16, 24, 32, 48, MAX_NODES)
# The same where a pass is one kernel: it reads only the nodes that there are, but tiles of eight cost more than one.
FEW_TILES = (1, 2, 8, 16, 24, 32, 48, MAX_NODES)
MAX_ROWS = 512  # nodes of a pass, over all sequences
# Rows of a graph, times those of a pass that it runs: cheap, but in the one kernel rows wait for their inputs.
MORE_ROWS, MORE_PERSISTENT_ROWS = 4, 2
MAX_FORWARD_GRAPHS = 512
MAX_DRAFT_GRAPHS = 64
CHAIN_LENGTHS = (8, 16, 32, MAX_NODES)  # of one graph's passes, where those that are not needed end at once
OFTEN = 4  # a number of draft tokens that is asked for so often in a row gets a graph of its own


@dataclass(frozen=True, slots=True)
class ForwardKey:
    """What a forward graph is captured for."""

    size: PassSize
    want_hidden: bool
    feature_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftKey:
    """What a drafting graph is captured for."""

    size: PassSize
    num_tokens: int
    sampled: bool


@dataclass(frozen=True, slots=True, eq=False)
class PassOutput:
    """Tensors of a forward graph, to be read before the next pass of the same runner."""

    logits: Tensor  # float32 [sequences · nodes, vocab]
    best: Tensor  # int64 [sequences · nodes]
    hidden: Tensor | None
    features: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class DraftBuffers:
    """The fixed tensors of a drafting graph."""

    inputs: PassInputs
    chain: DraftChain
    temperatures: Tensor  # float32 [sequences, 1]
    uniforms: Tensor  # float64 [sequences, draft tokens]

    def put_sampling(self, inputs: list[DraftInput]) -> None:
        count = len(inputs)
        uniforms = torch.tensor([draft.uniforms or [] for draft in inputs], dtype=torch.float64)
        temperatures = torch.tensor([draft.temperature for draft in inputs])
        self.temperatures[:count, 0].copy_(temperatures, non_blocking=True)
        self.uniforms[:count, : uniforms.shape[1]].copy_(uniforms, non_blocking=True)


ForwardGraph = Graph[ForwardKey, PassInputs, PassOutput]
DraftGraph = Graph[DraftKey, DraftBuffers, DraftOutput]


def triton_ops(
    model: DecoderModel,
    kv: KVCache,
    rope_caches: tuple[Tensor, ...],
    *,
    use_vectors: bool = False,
    batch_invariant: bool = False,
) -> TritonOps:
    """The fused operations of a model over its cache."""
    eps = model.config.rms_norm_eps
    gemm = GemmLauncher(kv.dtype, kv.device, eps, use_vectors=use_vectors, batch_invariant=batch_invariant)
    return TritonOps(gemm, TritonAttention(attention_sizes(model, kv), kv.caches, rope_caches, gemm))


class DecodeGraphs:
    """The narrow passes of one runner, captured on first use."""

    def __init__(
        self,
        model: DecoderModel,
        kv: KVCache,
        rope_caches: tuple[Tensor, ...],
        options: OutputOptions,
        pool: GraphPool,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._model, self._kv, self._options = model, kv, options
        extra = rope_caches[0].shape[0] - model.config.max_seq_len  # positions past the longest sequence
        self._table_width = -(-(min(model.config.max_seq_len, kv.num_tokens) + extra) // kv.block_size)
        self._persistent = _persistent_pass(model, kv, rope_caches, options)
        self.ops = triton_ops(model, kv, rope_caches, batch_invariant=batch_invariant)
        self._draft_ops = triton_ops(model, kv, rope_caches, use_vectors=True)
        self._forward: GraphCache[ForwardKey, PassInputs, PassOutput] = GraphCache(
            pool, MAX_FORWARD_GRAPHS, near=self._runs_forward, cost=lambda key: key.size.cost
        )
        self._draft: GraphCache[DraftKey, DraftBuffers, DraftOutput] = GraphCache(
            pool,
            MAX_DRAFT_GRAPHS,
            near=self._runs_draft,
            cost=lambda key: (key.num_tokens, *key.size.cost),
        )
        self._asked: tuple[int, bool] = (0, False)  # how many draft tokens, drawn or not, were asked for last
        self._times_asked = 0  # in a row
        self._draft_probs = Scratch()

    # --- sizes --------------------------------------------------------------------------------------------------------

    def fits(self, num_seqs: int, nodes: int, tokens: int, *, trees: bool = False) -> PassSize | None:
        """The size a pass runs at; None: too wide, too many or too long for any. trees: rows need not be chains."""
        chunks = rounded_up(-(-tokens // CHUNK), CHUNKS)
        few = FEW_TILES if self.is_persistent(nodes) else FEW_NODES
        width, seqs = rounded_up(nodes, few if num_seqs == 1 else NODES), rounded_up(num_seqs, NUM_SEQS)
        if chunks is None or width is None or seqs is None:
            return None
        # The one kernel reads as much context as there is, so one graph serves every length; and trees.
        if self.is_persistent(seqs * width):
            return PassSize(seqs, width, CHUNKS[-1])
        return PassSize(seqs, width, chunks, trees)

    def fits_rows(self, rows: list[Row], last_only: bool) -> PassSize | None:
        """The size these rows run at; None: another pass is better or the only one."""
        nodes = max(len(row.parents) for row in rows)
        if (last_only and nodes > 2) or len(rows) * nodes > MAX_ROWS:
            return None
        trees = not all(row.is_chain for row in rows)
        return self.fits(len(rows), nodes, max(row.seq_cache.length for row in rows) + nodes, trees=trees)

    # --- passes -------------------------------------------------------------------------------------------------------

    def forward(self, rows: list[Row], size: PassSize, last_only: bool) -> ModelOutput:
        """Read these rows."""
        if not self._model.config.recurrent_layers:
            return self._read(rows, size, last_only)
        with self._kv.states.reading(rows, [own(row.seq_cache).recurrent for row in rows]) as spans:
            return self._read(rows, size, last_only, spans)

    def _read(self, rows: list[Row], size: PassSize, last_only: bool, spans: Sequence[StateSpan] = ()) -> ModelOutput:
        graph = self.prepared(rows, size, spans)
        output = unpadded(graph.run(), [len(row.parents) for row in rows], graph.key.size.nodes, last_only)
        return output if self._options.adapter is None else self._adapted(output)

    def decode(self, rows: list[Row], size: PassSize, num_steps: int) -> Tensor:
        """One token a sequence, then its argmax, and so on: the tokens written [rows, steps].

        The device goes from pass to pass by itself. The host only queues them, so its own work costs nothing here.
        """
        if not self._model.config.recurrent_layers:
            return self._decode(self.prepared(rows, size), num_steps)[: len(rows)]
        states = [own(row.seq_cache).recurrent for row in rows]
        with self._kv.states.reading(rows, states) as spans:
            written = self._decode(self.prepared(rows, size, spans), num_steps)[: len(rows)]
        for state, tokens in zip(states, written):
            self._kv.states.read_further(state, tokens[:-1])
        return written

    def _decode(self, graph: ForwardGraph, num_steps: int) -> Tensor:
        inputs, nodes = graph.buffers, graph.key.size.nodes
        shape = (graph.key.size.num_seqs, num_steps)
        written = torch.empty(shape, dtype=torch.int64, device=self._kv.device)
        for step in range(num_steps):
            written[:, step] = graph.run().best.view(-1, nodes)[:, 0]
            inputs.token_ids[:, 0] = written[:, step]
            inputs.advance()
        return written

    def draft(self, graph: DraftGraph, inputs: list[DraftInput], num_tokens: int) -> DraftOutput:
        """Draft tokens for these sequences; blocks for all tokens of the graph are reserved."""
        self.put_leads(graph, inputs)
        graph.buffers.chain.set(num_tokens)
        if graph.key.sampled:
            graph.buffers.put_sampling(inputs)
        output = graph.run()
        probs = None if output.probs is None else output.probs[: len(inputs), :num_tokens]
        return DraftOutput(output.tokens[: len(inputs), :num_tokens], probs)

    def put_leads(self, graph: DraftGraph, inputs: list[DraftInput]) -> None:
        """The last tokens of these sequences into the inputs of a drafting graph."""
        buffers = graph.buffers.inputs
        buffers.begin()
        for index, draft in enumerate(inputs):
            buffers.put_lead(index, draft.ids, self._kv.tables(draft.seq_cache))
        buffers.send(len(inputs))

    def prepared(self, rows: list[Row], size: PassSize, spans: Sequence[StateSpan] = ()) -> ForwardGraph:
        """The graph of this size with these rows in its inputs."""
        graph = self.forward_graph(size)
        graph.buffers.begin()
        for index, row in enumerate(rows):
            graph.buffers.put_row(index, row, self._kv.tables(row.seq_cache))
        for index, span in enumerate(spans):
            graph.buffers.put_state(index, span)
        graph.buffers.send(len(rows))
        graph.buffers.send_tokens(rows)
        return graph

    def _adapted(self, output: ModelOutput) -> ModelOutput:
        """The graph of an early exit leaves its adapter out; apply it to the hidden states."""
        assert output.hidden is not None, "an exit returns its hidden states"
        hidden = output.hidden if output.read is None else output.hidden[row_ends(output.read, output.hidden.device)]
        return replace(output, logits=logits_of(hidden, self._model, self._options), best=None)

    # --- graphs -------------------------------------------------------------------------------------------------------

    def forward_graph(self, size: PassSize) -> ForwardGraph:
        """The graph of this size, or of a near one; captured if there is none."""
        key = ForwardKey(size, self._options.want_hidden, self._options.feature_layers)
        return self._forward.nearest(key) or self._forward.get(
            key,
            lambda: self._inputs(size, self._kv.states.memory),
            self._forward_work,
        )

    def draft_graph(self, size: PassSize, num_tokens: int, sampled: bool) -> DraftGraph:
        """The graph of so many draft tokens; captured if there is none.

        A graph of a few more serves the end of a sequence, where every step has room for fewer than the one before. But
        each costs time: a number that is asked for again and again gets a graph of its own. Where passes end at once
        that are not needed, one graph serves many numbers.
        """
        if not sampled and self.is_persistent(size.rows):
            num_tokens = rounded_up(num_tokens, CHAIN_LENGTHS) or num_tokens
        key = DraftKey(size, num_tokens, sampled)
        near = self._draft.nearest(key)
        asked = (num_tokens, sampled)
        self._times_asked = self._times_asked + 1 if asked == self._asked else 1
        self._asked = asked
        if near is not None and (near.key.num_tokens == num_tokens or self._times_asked < OFTEN):
            return near
        return self._draft.get(key, lambda: self._draft_buffers(key), lambda buffers: self._draft_work(buffers, key))

    def _runs_forward(self, captured: ForwardKey, key: ForwardKey) -> bool:
        kind, other = (captured.want_hidden, captured.feature_layers), (key.want_hidden, key.feature_layers)
        return kind == other and self._runs(captured.size, key.size, self.ops)

    def _runs_draft(self, captured: DraftKey, key: DraftKey) -> bool:
        enough = captured.sampled == key.sampled and captured.num_tokens >= key.num_tokens
        return enough and self._runs(captured.size, key.size, self._draft_ops)

    def _runs(self, captured: PassSize, size: PassSize, ops: TritonOps) -> bool:
        """Whether a graph of one size may run another. Not if that is multiplied in another way: its numbers differ."""
        if self.is_persistent(captured.rows) != self.is_persistent(size.rows):
            return False
        if self.is_persistent(size.rows):
            return captured.runs(size, MORE_PERSISTENT_ROWS)
        return ops.path(captured.rows) == ops.path(size.rows) and captured.runs(size, MORE_ROWS)

    @property
    def persistent_rows(self) -> int | None:
        """Rows that one kernel reads at most; None: there is no such kernel."""
        return None if self._persistent is None else self._persistent.max_rows

    def is_persistent(self, rows: int) -> bool:
        """Whether so many rows are read by one kernel."""
        return self._persistent is not None and self._persistent.holds(rows)

    def _inputs(self, size: PassSize, memory: DeltaNetStates | None = None) -> PassInputs:
        has_windows = self._kv.windowed is not None
        return PassInputs(size, self._table_width, self._kv.device, memory, has_windows=has_windows)

    def _draft_buffers(self, key: DraftKey) -> DraftBuffers:
        device, num_seqs = self._kv.device, key.size.num_seqs
        return DraftBuffers(
            self._inputs(key.size),
            DraftChain(num_seqs, device),
            torch.ones(num_seqs, 1, device=device),
            torch.zeros(num_seqs, key.num_tokens, dtype=torch.float64, device=device),
        )

    def preparations(self, plan: WarmupPlan) -> list[Preparation]:
        """Captures of every size of the plan."""
        forward = forward_sizes(plan, NODES[-1], self.is_persistent)
        pieces: list[Preparation] = [partial(self._prepare_forward, *size) for size in forward]
        return pieces + [partial(self._prepare_draft, *size) for size in draft_sizes(plan, self.is_persistent)]

    def _prepare_forward(self, num_seqs: int, width: int, tokens: int, trees: bool) -> None:
        size = self.fits(num_seqs, width, tokens, trees=trees)
        if size is not None and size.rows <= MAX_ROWS:
            self.forward_graph(size)

    def _prepare_draft(self, num_seqs: int, num_tokens: int, tokens: int) -> None:
        size = self.fits(num_seqs, LEAD_TOKENS, tokens)
        if size is not None and len(self._draft) < MAX_DRAFT_GRAPHS:
            self.draft_graph(size, num_tokens, sampled=False)

    # --- what is captured ---------------------------------------------------------------------------------------------

    def _forward_work(self, inputs: PassInputs) -> PassOutput:
        model, options, ops = self._model, self._options, self.ops
        if self._persistent is not None and self._persistent.holds(inputs.token_ids.numel()):
            return self._persistent_forward(self._persistent, inputs)
        hidden_states = model.embed(inputs.token_ids.view(-1))
        states = model.run_layers(hidden_states, inputs.batch, ops, options.feature_layers, last=options.last_layer)
        hidden = model.norm(states.hidden_states, ops) if options.want_hidden else None
        logits = model.fused_logits(states.hidden_states, ops)
        return PassOutput(logits.out, ops.argmax(logits).token, hidden, states.features)

    def _persistent_forward(self, run: PersistentPass, inputs: PassInputs) -> PassOutput:
        wish = OutputWish(hidden=self._options.want_hidden, features=self._options.feature_layers)
        output = run(TokenSource(inputs.token_ids, inputs.batch.nodes), inputs.batch, wish)
        return PassOutput(output.logits, output.best, output.hidden, output.features)

    def _persistent_draft(self, run: PersistentPass, buffers: DraftBuffers, key: DraftKey) -> DraftOutput:
        """One launch a draft token; each reads its tokens where the one before has left them."""
        batch, wish = buffers.inputs.batch, OutputWish(logits=key.sampled)
        source, tokens, outputs = TokenSource(buffers.inputs.token_ids, LEAD_TOKENS), [], []
        probs = self._new_draft_probs(batch, key)
        for step in range(key.num_tokens):
            output = run(source, batch, wish, None if key.sampled else ChainLink(buffers.chain, step))
            if probs is None:
                source = TokenSource(output.best, batch.nodes, batch.nodes - 1)
                outputs.append(output)
            else:
                last = output.logits.view(batch.num_seqs, batch.nodes, -1)[:, -1]
                probs[:, step] = torch.softmax(last / buffers.temperatures, dim=-1)
                tokens.append(draw_keyed(probs[:, step], buffers.uniforms[:, step]))
                source = TokenSource(tokens[-1], 1)
            batch = replace(batch, nodes=1, offset=LEAD_TOKENS + step)  # of single nodes the kernel reads no depths
        if probs is not None:
            return DraftOutput(torch.stack(tokens, dim=1), probs)

        chosen = [(each.best, each.confidence, each.second_best, each.second_confidence) for each in outputs]
        best, stated, second, second_stated = (_of_last_nodes(parts, batch.num_seqs) for parts in zip(*chosen))
        return DraftOutput(best, None, stated, buffers.chain.count, second, second_stated)

    def _new_draft_probs(self, batch: TritonBatch, key: DraftKey) -> Tensor | None:
        shape = (batch.num_seqs, key.num_tokens, self._model.lm_head.out_features)
        return self._draft_probs.of(shape, self._kv.device) if key.sampled else None

    def _draft_work(self, buffers: DraftBuffers, key: DraftKey) -> DraftOutput:
        if self._persistent is not None and self._persistent.holds(buffers.inputs.token_ids.numel()):
            return self._persistent_draft(self._persistent, buffers, key)
        model, ops, batch = self._model, self._draft_ops, buffers.inputs.batch
        hidden_states = model.embed(buffers.inputs.token_ids.view(-1))
        tokens: list[Tensor] = []
        probs = self._new_draft_probs(batch, key)
        for step in range(key.num_tokens):
            states = model.run_layers(hidden_states, batch, ops, last=self._options.last_layer).hidden_states
            last = states if step else states.view(batch.num_seqs, LEAD_TOKENS, -1)[:, -1].contiguous()
            logits = model.fused_logits(last, ops)
            if probs is None:
                best = model.argmax_embedded(logits, ops)
                token, vectors = best.token, best.hidden_states
            else:
                probs[:, step] = torch.softmax(logits.out / buffers.temperatures, dim=-1)
                token, vectors = draw_keyed(probs[:, step], buffers.uniforms[:, step]), None
            tokens.append(token)
            hidden_states = model.embed(token) if vectors is None else vectors
            batch = _single(batch, LEAD_TOKENS + step)
        return DraftOutput(torch.stack(tokens, dim=1), probs)


def _persistent_pass(
    model: DecoderModel, kv: KVCache, rope_caches: tuple[Tensor, ...], options: OutputOptions
) -> PersistentPass | None:
    """The pass that is one kernel; None: for this model or device there is none, or the pass ends at an early exit."""
    if options.last_layer < model.config.num_layers:
        return None
    return PersistentPass.of(model, kv, rope_caches[0])


def _of_last_nodes(parts: Sequence[Tensor], num_seqs: int) -> Tensor:
    """What passes left for the last node of every sequence: [sequences, passes]"""
    return torch.stack([part.view(num_seqs, -1)[:, -1] for part in parts], dim=1)


def _single(batch: TritonBatch, offset: int) -> TritonBatch:
    """One node a sequence, `offset` tokens behind where the loop began."""
    zeros = torch.zeros(batch.num_seqs, 1, dtype=torch.int64, device=batch.lengths.device)
    counts = batch.counts.clamp_max(1)
    return replace(batch, nodes=1, counts=counts, depths=zeros, tree_mask=zeros + 1, offset=offset, recurrent=None)


def unpadded(output: PassOutput, row_sizes: list[int], nodes: int, last_only: bool) -> ModelOutput:
    """Drop the padding of a captured pass."""
    hidden, features = (_without_padding(part, row_sizes, nodes) for part in (output.hidden, output.features))
    if last_only:
        ends = [index * nodes + size - 1 for index, size in enumerate(row_sizes)]
        logits = torch.stack([output.logits[end] for end in ends])
        best = torch.stack([output.best[end] for end in ends])
        return ModelOutput(logits, [1] * len(row_sizes), hidden, features, row_sizes, best)
    logits, best = (_dense(part, row_sizes, nodes) for part in (output.logits, output.best))
    return ModelOutput(logits, row_sizes, hidden, features, None, best)


def _without_padding(padded: Tensor | None, row_sizes: list[int], nodes: int) -> Tensor | None:
    return None if padded is None else _dense(padded, row_sizes, nodes)


def _dense(padded: Tensor, row_sizes: list[int], nodes: int) -> Tensor:
    """[sequences · nodes, …] -> [all nodes, …]"""
    if len(row_sizes) == 1 or all(size == nodes for size in row_sizes):
        return padded[: (len(row_sizes) - 1) * nodes + row_sizes[-1]]
    return torch.cat([padded[index * nodes : index * nodes + size] for index, size in enumerate(row_sizes)])
