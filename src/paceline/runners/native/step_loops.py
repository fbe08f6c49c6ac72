"""Several greedy steps in a row: the device takes them alone, and the host is one step behind.

With draft tokens a step is
    draft     what the source of draft tokens queues: the drafting graph of a draft model, the block of a head
    verify    the forward graph of the target over the last token, the draft tokens and, where they promise enough,
              second choices for them: leaves, of which at most one is accepted
    settle    draft tokens that are the target's argmax, and the argmax after them: on the device
    go on     the inputs of target and source grow by what was accepted
and without them a pass over the last token, of which a few are read together.

The host queues a step, then reads the one before while the device is busy: what it does between two steps takes none of
the device's time. A step past the end of a sequence is computed in vain, and dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.confidence import EDGES
from paceline.core.draft_tree import ROOT
from paceline.core.draft_vocabulary import draft_vocabulary
from paceline.core.looped_steps import (
    MOST_LEAVES,
    STEPS_AHEAD,
    ChainLimits,
    LeafLimits,
    LoopedStep,
    LoopedSteps,
    LoopInput,
    LoopProgress,
    PlainGroups,
    leaf_places,
    loop_tokens,
)
from paceline.core.protocols import LoopSource
from paceline.core.types import DraftInput, DraftOutput, Row, RowOutput, SequenceCache, VerifyResult
from paceline.errors import OutOfMemory
from paceline.runners.native.decode_graphs import MAX_ROWS, DecodeGraphs, DraftGraph, ForwardGraph, PassOutput
from paceline.runners.native.kv_cache import KVCache
from paceline.runners.native.outputs import by_sequence
from paceline.runners.native.pass_inputs import LEAD_TOKENS, MAX_NODES
from paceline.runners.native.plain_steps import PLAIN_GROUP, plain_groups
from paceline.runners.native.step_kernels import move_leaf, put_drafts, settle
from paceline.runners.native.step_reader import StepReader, grow
from paceline.runners.native.tree_steps import TreeSteps

CatchUp = Callable[[list[DraftInput]], None]  # reads what a draft model lacks of sequences
CONFIDENCE_UNIT = 1 << 20  # parts of one that a confidence is sent to the host in
BLOCK = MAX_NODES + 1  # one size for all graphs, so that none has to compile
FIELDS = 5  # of the row that the device leaves of a step, before its draft tokens, their confidences, and leaves
BINS = 16  # of confidence, filled up to a power of two
SET_EVERY = 8  # steps after which a draft model is told again how far its chains go


# --- a runner's loops -------------------------------------------------------------------------------------------------


class StepLoops:
    """The loops of one runner, over its graphs and its cache."""

    def __init__(self, passes: DecodeGraphs, kv: KVCache, max_seq_len: int, vocab_size: int) -> None:
        self._passes, self._kv, self._max_seq_len, self._vocab_size = passes, kv, max_seq_len, vocab_size

    def source(self, catch_up: CatchUp, limits: Callable[[], ChainLimits] | None = None) -> DraftModelSource:
        """For the loop of another runner."""
        return DraftModelSource(self._passes, self._kv, self._max_seq_len, self._vocab_size, catch_up, limits)

    def plain(self, inputs: list[LoopInput], num_steps: int) -> PlainGroups | None:
        """None: these sequences cannot, or there is no room."""
        graph = self._graph(inputs, num_steps) if _is_within(inputs, num_steps, self._max_seq_len) else None
        if graph is None:
            return None
        reader = StepReader(len(inputs), PLAIN_GROUP, self._kv.device)
        return plain_groups(graph, reader, inputs, num_steps // PLAIN_GROUP)

    def drafted(self, source: LoopSource, inputs: list[LoopInput], num_steps: int) -> LoopedSteps | None:
        """The same with draft tokens; fewer steps where sequences would grow past the longest."""
        has_leaves = source.leaf_limits is not None and len(inputs) == 1
        places = leaf_places(inputs)
        nodes = max(loop.num_draft_tokens for loop in inputs) + 1
        longest = max(len(loop.ids) for loop in inputs)
        room = min(loop_tokens(inputs, num_steps) - places, self._max_seq_len - longest - nodes - places)
        if room < STEPS_AHEAD * nodes:
            return None
        graph = self._graph(inputs, room, trees=source.sends_trees or has_leaves)
        if graph is None:
            return None
        if not source.begin(inputs, room):
            for loop in inputs:
                self._kv.shrink(loop.seq_cache)
            return None
        steps: DraftedSteps | TreeSteps
        if source.sends_trees:
            ks = [loop.num_draft_tokens for loop in inputs]
            steps = TreeSteps(graph, source, self._kv, torch.tensor(ks, device=self._kv.device), max(ks))
        else:
            steps = DraftedSteps.of(graph, source, self._kv, inputs, leaves=has_leaves)
        return _steps(steps, StepReader(len(inputs), steps.width, self._kv.device), inputs, num_steps, room)

    @torch.inference_mode()
    def _graph(self, inputs: list[LoopInput], num_tokens: int, *, trees: bool = False) -> ForwardGraph | None:
        """The graph of one step, with the sequences in its inputs and blocks for all tokens that each may grow by."""
        nodes = max(loop.num_draft_tokens for loop in inputs) + 1
        longest = max(len(loop.ids) for loop in inputs) + num_tokens
        size = self._passes.fits(len(inputs), nodes, longest, trees=trees)
        if size is None or size.rows > MAX_ROWS:
            return None
        if any(loop.seq_cache.lora is not None for loop in inputs):
            return None
        rows = list(map(_row, inputs))
        try:
            self._kv.reserve_rows(rows, 1 + num_tokens - nodes + leaf_places(inputs))
            return self._passes.prepared(rows, size)
        except (OutOfMemory, torch.OutOfMemoryError):  # of blocks, or of a capture: step by step there is another way
            for row in rows:
                self._kv.shrink(row.seq_cache)
            return None


def _row(loop: LoopInput) -> Row:
    """The last token, and room for the draft tokens, which every step puts there itself."""
    k = loop.num_draft_tokens
    return Row(loop.seq_cache, torch.zeros(k, dtype=torch.int64), list(range(-1, k)), loop.ids[-1])


def _is_within(inputs: list[LoopInput], num_tokens: int, max_seq_len: int) -> bool:
    return max(len(loop.ids) for loop in inputs) + num_tokens <= max_seq_len


# --- steps of draft tokens --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Settled:
    """A step that was settled: rows for the host, and what the next step begins from."""

    rows: Tensor
    progress: LoopProgress


@dataclass(frozen=True, slots=True, eq=False)
class _SecondChoices:
    """For draft tokens, and how likely they are; any tensors where they are not read."""

    tokens: Tensor
    stated: Tensor


class LeafWords:
    """Which second choices are sent, in the memory of the device.

    words  float32: edges of the bins of confidence, how often draft tokens are accepted by bin, the same of second
           choices, and the least that one must promise
    """

    def __init__(self, device: torch.device) -> None:
        self.words = torch.zeros(3 * BINS + 1, device=device)
        self._set: ChainLimits | None = None

    @torch.inference_mode()
    def set(self, limits: ChainLimits) -> None:
        if self._set == limits:
            return
        self._set = limits
        leaves = limits.leaves or LeafLimits(math.inf, limits.rates)
        edges, rates, leaf_rates = (_filled_up(part) for part in (EDGES, limits.rates, leaves.rates))
        self.words.copy_(torch.tensor([*edges, *rates, *leaf_rates, leaves.least]), non_blocking=True)


def _filled_up(values: tuple[float, ...]) -> list[float]:
    return [*values, *[math.inf] * (BINS - len(values))]


@dataclass(frozen=True, slots=True, eq=False)
class DraftedSteps:
    """Queues steps.

    limits  draft tokens of each sequence in a step, on the device
    k       the most of them
    shift   places that the accepted leaf of the last step lay behind its own; None: steps have no leaves
    """

    graph: ForwardGraph
    source: LoopSource
    kv: KVCache
    limits: Tensor
    k: int
    shift: Tensor | None

    @classmethod
    def of(
        cls, graph: ForwardGraph, source: LoopSource, kv: KVCache, inputs: list[LoopInput], *, leaves: bool
    ) -> DraftedSteps:
        """leaves: steps may have some."""
        ks = [loop.num_draft_tokens for loop in inputs]
        shift = torch.zeros(1, dtype=torch.int64, device=kv.device) if leaves else None
        return cls(graph, source, kv, torch.tensor(ks, device=kv.device), max(ks), shift)

    @property
    def num_seqs(self) -> int:
        return self.limits.shape[0]

    @property
    def width(self) -> int:
        """Numbers of the row of a sequence."""
        return FIELDS + 2 * self.k + 3 * self.most_leaves

    @property
    def most_leaves(self) -> int:
        return 0 if self.shift is None else MOST_LEAVES

    @torch.inference_mode()
    def queue(self, step: int) -> Tensor:
        """A row of each sequence, for `looped_step`."""
        draft = self.source.draft()
        assert draft.tokens.stride(1) == 1, "kernels read the draft tokens of a sequence as neighbours"
        self._put(draft)
        output = self.graph.run()
        settled = self._settle(draft, output)
        if self.shift is not None:
            self._move_leaf(self.shift)
        self.source.go_on(step, settled.progress, self._states(output))
        return settled.rows

    def looped_step(self, row: list[int]) -> LoopedStep:
        """The row that the device has left of a step (step_kernels.settle)."""
        accepted, next_token, made, num_leaves, accepted_leaf = row[:FIELDS]
        drafted, stated = (row[start : start + made] for start in (FIELDS, FIELDS + self.k))
        nodes, parents = list(range(accepted)), list(range(ROOT, made - 1))
        if num_leaves:
            first = FIELDS + 2 * self.k
            leaves, depths, leaf_stated = (row[first + part * MOST_LEAVES :][:num_leaves] for part in range(3))
            drafted, stated = drafted + leaves, stated + leaf_stated
            parents += [depth - 2 for depth in depths]  # a node's depth is one more than its number in the chain
        if accepted_leaf:
            nodes.append(accepted_leaf - 1)
        confidence = [part / CONFIDENCE_UNIT for part in stated] if stated and stated[0] >= 0 else None
        verified = VerifyResult(nodes, next_token, [drafted[node] for node in nodes])
        return LoopedStep(drafted, verified, confidence=confidence, num_leaves=num_leaves, parents=parents)

    def _put(self, draft: DraftOutput) -> None:
        inputs, nodes = self.graph.buffers, self.graph.key.size.nodes
        batch, second, leaf_limits = inputs.batch, self._second(draft), self.source.leaf_limits
        put_drafts[(self.num_seqs,)](
            *(draft.tokens, self._stated(draft), second.tokens, second.stated),
            *(draft.tokens if leaf_limits is None else leaf_limits, self._count(draft), self.limits),
            *(inputs.token_ids, batch.counts, batch.depths, batch.tree_mask),
            *(draft.tokens.stride(0), nodes, self.k),
            HAS_COUNT=draft.count is not None,
            HAS_LEAVES=self._has_leaves(draft),
            MOST_LEAVES=self.most_leaves,
            BINS=BINS,
            BLOCK=BLOCK,
            num_warps=1,
        )

    def _settle(self, draft: DraftOutput, output: PassOutput) -> _Settled:
        inputs, nodes, device = self.graph.buffers, self.graph.key.size.nodes, self.limits.device
        accepted, grown = torch.empty(2, self.num_seqs, dtype=torch.int64, device=device)
        last_tokens = torch.empty(self.num_seqs, 2, dtype=torch.int64, device=device)
        rows = torch.empty(self.num_seqs, self.width, dtype=torch.int64, device=device)
        settle[(self.num_seqs,)](
            *(draft.tokens, self._stated(draft), self._second(draft).stated, self._count(draft), self.limits),
            *(output.best, inputs.token_ids, inputs.batch.counts, inputs.batch.depths, inputs.batch.lengths),
            *(accepted, grown, last_tokens, accepted if self.shift is None else self.shift, rows),
            *(draft.tokens.stride(0), nodes, self.k),
            HAS_COUNT=draft.count is not None,
            HAS_LEAVES=self._has_leaves(draft),
            MOST_LEAVES=self.most_leaves,
            HAS_CONFIDENCE=draft.confidence is not None,
            UNIT=CONFIDENCE_UNIT,
            FIELDS=FIELDS,
            BLOCK=BLOCK,
            num_warps=1,
        )
        return _Settled(rows, LoopProgress(accepted, self._by_sequence(output.best), grown, last_tokens))

    def _move_leaf(self, shift: Tensor) -> None:
        keys, batch = self.kv.keys, self.graph.buffers.batch
        size = keys[0, 0].numel()
        move_leaf[(keys.shape[0],)](
            *(keys, self.kv.values, batch.blocks, batch.lengths, shift, keys.stride(0), self.kv.block_size),
            SIZE=size,
            BLOCK=1 << (size - 1).bit_length(),
        )

    def _has_leaves(self, draft: DraftOutput) -> bool:
        return self.shift is not None and draft.second is not None and draft.confidence is not None

    def _second(self, draft: DraftOutput) -> _SecondChoices:
        if draft.second is None or draft.second_confidence is None:
            return _SecondChoices(draft.tokens, draft.tokens)
        return _SecondChoices(draft.second, draft.second_confidence)

    def _stated(self, draft: DraftOutput) -> Tensor:
        """Confidences; any tensor where they are not read."""
        return draft.tokens if draft.confidence is None else draft.confidence

    def _count(self, draft: DraftOutput) -> Tensor:
        return self.limits if draft.count is None else draft.count

    def _by_sequence(self, rows: Tensor) -> Tensor:
        return by_sequence(rows, self.graph.key.size.nodes)[: self.num_seqs, : self.k + 1]

    def _states(self, output: PassOutput) -> RowOutput:
        parts = (output.hidden, output.features)
        hidden, features = (None if part is None else self._by_sequence(part) for part in parts)
        return RowOutput(output.logits, hidden, features)


def _steps(
    steps: DraftedSteps | TreeSteps, reader: StepReader, inputs: list[LoopInput], num_steps: int, room: int
) -> LoopedSteps:
    """room: tokens that each sequence may grow by. The device goes on with one that is over, so it counts too."""
    reader.send(0, steps.queue(0))
    step, grown = 0, [0] * len(inputs)
    while step < num_steps:
        if max(grown) + STEPS_AHEAD * (steps.k + 1) > room:
            num_steps = step + 1
        if step + 1 < num_steps:
            reader.send(step + 1, steps.queue(step + 1))
        results = [steps.looped_step(row) for row in reader.read(step)]
        for index, (loop, result) in enumerate(zip(inputs, results)):
            num_tokens = len(result.verified.tokens) + 1
            grown[index] += num_tokens
            if not loop.has_ended():
                grow(loop, num_tokens)
                steps.source.keep(step, index, num_tokens)
        step += 1
        if (yield results):
            num_steps = min(num_steps, step + 1)


class DraftModelSource(LoopSource):
    """A draft model: its drafting graph reads the last two tokens of every sequence, whatever was accepted."""

    def __init__(
        self,
        passes: DecodeGraphs,
        kv: KVCache,
        max_seq_len: int,
        vocab_size: int,
        catch_up: CatchUp,
        limits: Callable[[], ChainLimits] | None = None,
    ) -> None:
        """limits: where chains end earlier, if the device can tell."""
        self._passes, self._kv, self._max_seq_len, self._vocab_size = passes, kv, max_seq_len, vocab_size
        self._catch_up, self._limits = catch_up, limits
        self._leaves = None if limits is None else LeafWords(kv.device)
        self.leaf_limits = None if self._leaves is None else self._leaves.words
        self._inputs: list[LoopInput] = []
        self._graph: DraftGraph | None = None

    @torch.inference_mode()
    def begin(self, inputs: list[LoopInput], num_tokens: int) -> bool:
        if not all(map(_can_draft, inputs)):
            return False
        k = max(loop.num_draft_tokens for loop in inputs)
        longest = max(len(loop.ids) for loop in inputs) + num_tokens + k
        size = self._passes.fits(len(inputs), LEAD_TOKENS, longest)
        if size is None or longest > self._max_seq_len:
            return False
        self._inputs, self._graph = inputs, self._passes.draft_graph(size, k, sampled=False)
        drafts = [DraftInput(_draft_cache(loop), loop.ids) for loop in inputs]
        if not self._made_ready(drafts, num_tokens + self._graph.key.num_tokens):
            return False
        self._passes.put_leads(self._graph, drafts)
        self._set_chain(self._graph)
        return True

    def _set_chain(self, graph: DraftGraph) -> None:
        """How far chains go, and the part of the vocabulary that they are chosen from, as it seems now."""
        limits, k = None if self._limits is None else self._limits(), max(map(_k, self._inputs))
        if self._leaves is not None and limits is not None:
            self._leaves.set(limits)
        graph.buffers.chain.set(k, limits, draft_vocabulary(self._vocab_size, [loop.ids for loop in self._inputs]))

    def _made_ready(self, drafts: list[DraftInput], num_tokens: int) -> bool:
        """Read what the graph does not read, before the loop, so that all its steps cost the same; and blocks for so
        many more tokens of every sequence. False: there are not enough."""
        try:
            self._catch_up(drafts)
            for loop in self._inputs:
                self._kv.reserve(_draft_cache(loop), len(loop.ids) - LEAD_TOKENS, len(loop.ids) + num_tokens)
        except OutOfMemory:
            for loop in self._inputs:
                self._kv.shrink(_draft_cache(loop))
            return False
        return True

    def draft(self) -> DraftOutput:
        assert self._graph is not None, "begin comes first"
        return self._graph.run()

    def go_on(self, step: int, progress: LoopProgress, states: RowOutput) -> None:
        assert self._graph is not None, "begin comes first"
        leads, count = self._graph.buffers.inputs, progress.grown.shape[0]
        leads.token_ids[:count] = progress.last_tokens
        leads.batch.lengths[:count] += progress.grown
        if step % SET_EVERY == SET_EVERY - 1:
            self._set_chain(self._graph)

    def keep(self, step: int, index: int, num_tokens: int) -> None:
        """What its next graph reads again does not count."""
        loop = self._inputs[index]
        _draft_cache(loop).length = loop.seq_cache.length + 1 - LEAD_TOKENS


def _k(loop: LoopInput) -> int:
    return loop.num_draft_tokens


def _draft_cache(loop: LoopInput) -> SequenceCache:
    assert loop.draft_cache is not None, "a loop with a draft model has its caches"
    return loop.draft_cache


def _can_draft(loop: LoopInput) -> bool:
    """Whether there is enough to begin from, and no graph would miss an adapter."""
    return _draft_cache(loop).lora is None and len(loop.ids) >= LEAD_TOKENS
