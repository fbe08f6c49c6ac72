"""Several greedy steps in a row: the device takes them alone, and the host is one step behind.

With draft tokens a step is
    draft     what the source of draft tokens queues: the drafting graph of a draft model, the block of a head
    verify    the forward graph of the target over the last token and the draft tokens
    accept    draft tokens that are the target's argmax, and the argmax after them: on the device
    go on     the inputs of target and source grow by what was accepted
and without them a pass over the last token, of which a few are read together.

The host queues a step, then reads the one before while the device is busy: what it does between two steps takes none of
the device's time. A step past the end of a sequence is computed in vain, and dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.protocols import LoopSource
from paceline.core.types import (
    DraftInput,
    LoopedStep,
    LoopedSteps,
    LoopInput,
    PlainGroups,
    Row,
    RowOutput,
    SequenceCache,
    VerifyResult,
)
from paceline.device.memory import host_buffer
from paceline.errors import OutOfMemory
from paceline.runners.native.decode_graphs import MAX_ROWS, DecodeGraphs, DraftGraph, ForwardGraph, PassOutput
from paceline.runners.native.kv_cache import KVCache, own
from paceline.runners.native.pass_inputs import LEAD_TOKENS

AHEAD = 2  # results that are queued or being read
CatchUp = Callable[[list[DraftInput]], None]  # reads what a draft model lacks of sequences
PLAIN_GROUP = 2  # plain steps that are read together: the host needs less time than they take


# --- reading ----------------------------------------------------------------------------------------------------------


class StepReader:
    """Brings the results of steps to the host, each in a place of its own until it is read.

    width: numbers of each sequence
    """

    def __init__(self, num_seqs: int, width: int, device: torch.device) -> None:
        self._places = [host_buffer((num_seqs, width), torch.int64, device) for _ in range(AHEAD)]
        cuda = device.type == "cuda"
        self._events = [torch.cuda.Event() if cuda else None for _ in range(AHEAD)]  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def send(self, step: int, result: Tensor) -> None:
        place, event = step % AHEAD, self._events[step % AHEAD]
        self._places[place].copy_(result, non_blocking=True)
        if event is not None:
            event.record()

    def read(self, step: int) -> list[list[int]]:
        event = self._events[step % AHEAD]
        if event is not None:
            event.synchronize()
        rows: list[list[int]] = self._places[step % AHEAD].tolist()
        return rows


# --- a runner's loops -------------------------------------------------------------------------------------------------


class StepLoops:
    """The loops of one runner, over its graphs and its cache."""

    def __init__(self, passes: DecodeGraphs, kv: KVCache, max_seq_len: int) -> None:
        self._passes, self._kv, self._max_seq_len = passes, kv, max_seq_len

    def source(self, catch_up: CatchUp) -> DraftModelSource:
        """For the loop of another runner."""
        return DraftModelSource(self._passes, self._kv, self._max_seq_len, catch_up)

    def plain(self, inputs: list[LoopInput], num_steps: int) -> PlainGroups | None:
        """None: these sequences cannot, or there is no room."""
        graph = self._graph(inputs, num_steps)
        if graph is None:
            return None
        reader = StepReader(len(inputs), PLAIN_GROUP, self._kv.device)
        return _plain_groups(graph, reader, inputs, num_steps // PLAIN_GROUP)

    def drafted(self, source: LoopSource, inputs: list[LoopInput], num_steps: int) -> LoopedSteps | None:
        """The same with draft tokens."""
        graph = self._graph(inputs, num_steps)
        if graph is None:
            return None
        if not source.begin(inputs, num_steps):
            for loop in inputs:
                self._kv.shrink(loop.seq_cache)
            return None
        k = max(loop.num_draft_tokens for loop in inputs)
        steps, reader = DraftedSteps(graph, source, len(inputs), k), StepReader(len(inputs), 2 * k + 2, self._kv.device)
        return _steps(steps, reader, inputs, num_steps)

    @torch.inference_mode()
    def _graph(self, inputs: list[LoopInput], num_steps: int) -> ForwardGraph | None:
        """The graph of one step, with the sequences in its inputs and blocks for all tokens of the loop."""
        nodes = max(loop.num_draft_tokens for loop in inputs) + 1
        longest = max(len(loop.ids) for loop in inputs) + num_steps * nodes
        size = self._passes.fits(len(inputs), nodes, longest)
        if size is None or size.rows > MAX_ROWS or longest > self._max_seq_len:
            return None
        if any(loop.seq_cache.lora is not None for loop in inputs):
            return None
        rows = list(map(_row, inputs))
        try:
            self._kv.reserve_rows(rows, 1 + (num_steps - 1) * nodes)
        except OutOfMemory:
            return None
        return self._passes.prepared(rows, size)


def _row(loop: LoopInput) -> Row:
    """The last token, and room for the draft tokens, which every step puts there itself."""
    k = loop.num_draft_tokens
    return Row(loop.seq_cache, torch.zeros(k, dtype=torch.int64), list(range(-1, k)), loop.ids[-1])


def _grow(loop: LoopInput, num_tokens: int) -> None:
    """The target's cache holds so many tokens more."""
    cache = own(loop.seq_cache)
    cache.last_row_start = cache.length
    cache.length += num_tokens


# --- plain steps ------------------------------------------------------------------------------------------------------


def _plain_groups(
    graph: ForwardGraph, reader: StepReader, inputs: list[LoopInput], num_groups: int
) -> PlainGroups:
    _queue_group(graph, reader, 0, len(inputs))
    group = 0
    while group < num_groups:
        if group + 1 < num_groups:
            _queue_group(graph, reader, group + 1, len(inputs))
        tokens = reader.read(group)
        for loop in inputs:
            if not loop.has_ended():
                _grow(loop, PLAIN_GROUP)
        group += 1
        if (yield tokens):
            num_groups = min(num_groups, group + 1)


@torch.inference_mode()
def _queue_group(graph: ForwardGraph, reader: StepReader, group: int, num_seqs: int) -> None:
    inputs, nodes = graph.buffers, graph.key.size.nodes
    written = []
    for _ in range(PLAIN_GROUP):
        written.append(graph.run().best.view(-1, nodes)[:num_seqs, 0].clone())
        inputs.token_ids[:num_seqs, 0] = written[-1]
        inputs.advance()
    reader.send(group, torch.stack(written, dim=1))


# --- steps of draft tokens --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class DraftedSteps:
    """Queues steps. k: draft tokens of a step at most."""

    graph: ForwardGraph
    source: LoopSource
    num_seqs: int
    k: int

    @torch.inference_mode()
    def queue(self, step: int) -> Tensor:
        """Of each sequence: the number accepted, k + 1 argmaxes, k draft tokens. [num_seqs, 2k + 2]"""
        inputs = self.graph.buffers
        drafted = self.source.draft()[: self.num_seqs, : self.k]
        inputs.token_ids[: self.num_seqs, 1 : self.k + 1] = drafted
        output = self.graph.run()
        best = self._by_sequence(output.best)
        accepted = num_accepted(drafted, best, inputs.batch.counts[: self.num_seqs] - 1)
        self.source.go_on(step, accepted, best, self._states(output))
        inputs.token_ids[: self.num_seqs, :1] = best.gather(1, accepted[:, None])
        inputs.batch.lengths[: self.num_seqs] += accepted + 1
        return torch.cat([accepted[:, None], best, drafted], dim=1)

    def _by_sequence(self, rows: Tensor) -> Tensor:
        """[sequences · nodes, …] -> [num_seqs, k + 1, …]"""
        nodes = self.graph.key.size.nodes
        return rows.view(-1, nodes, *rows.shape[1:])[: self.num_seqs, : self.k + 1]

    def _states(self, output: PassOutput) -> RowOutput:
        parts = (output.hidden, output.features)
        hidden, features = (None if part is None else self._by_sequence(part) for part in parts)
        return RowOutput(output.logits, hidden, features)


def num_accepted(drafted: Tensor, best: Tensor, limits: Tensor) -> Tensor:
    """Draft tokens up to the first that is not the argmax before it, at most `limits` of them. int64 [sequences]"""
    places = torch.arange(drafted.shape[1], device=drafted.device)
    right = (drafted == best[:, :-1]) & (places < limits[:, None])
    return right.long().cumprod(dim=1).sum(dim=1)


def _steps(
    steps: DraftedSteps, reader: StepReader, inputs: list[LoopInput], num_steps: int
) -> LoopedSteps:
    reader.send(0, steps.queue(0))
    step = 0
    while step < num_steps:
        if step + 1 < num_steps:
            reader.send(step + 1, steps.queue(step + 1))
        results = [_looped_step(row, steps.k, loop) for row, loop in zip(reader.read(step), inputs)]
        for index, (loop, result) in enumerate(zip(inputs, results)):
            if not loop.has_ended():
                num_tokens = len(result.verified.accepted) + 1
                _grow(loop, num_tokens)
                steps.source.keep(step, index, num_tokens)
        step += 1
        if (yield results):
            num_steps = min(num_steps, step + 1)


def _looped_step(row: list[int], k: int, loop: LoopInput) -> LoopedStep:
    count, best, drafted = row[0], row[1 : k + 2], row[k + 2 :]
    return LoopedStep(drafted[: loop.num_draft_tokens], VerifyResult(list(range(count)), best[count], best[:count]))


class DraftModelSource(LoopSource):
    """A draft model: its drafting graph reads the last two tokens of every sequence, whatever was accepted."""

    def __init__(self, passes: DecodeGraphs, kv: KVCache, max_seq_len: int, catch_up: CatchUp) -> None:
        self._passes, self._kv, self._max_seq_len, self._catch_up = passes, kv, max_seq_len, catch_up
        self._inputs: list[LoopInput] = []
        self._graph: DraftGraph | None = None

    @torch.inference_mode()
    def begin(self, inputs: list[LoopInput], num_steps: int) -> bool:
        if not all(map(_can_draft, inputs)):
            return False
        k = max(loop.num_draft_tokens for loop in inputs)
        longest = max(len(loop.ids) for loop in inputs) + num_steps * (k + 1) + k
        size = self._passes.fits(len(inputs), LEAD_TOKENS, longest)
        if size is None or longest > self._max_seq_len:
            return False
        self._inputs, self._graph = inputs, self._passes.draft_graph(size, k, sampled=False)
        drafts = [DraftInput(_draft_cache(loop), loop.ids) for loop in inputs]
        if not self._made_ready(drafts, num_steps * (k + 1) + self._graph.key.num_tokens):
            return False
        self._passes.put_leads(self._graph, drafts)
        return True

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

    def draft(self) -> Tensor:
        assert self._graph is not None, "begin comes first"
        return self._graph.run().tokens

    def go_on(self, step: int, accepted: Tensor, best: Tensor, states: RowOutput) -> None:
        assert self._graph is not None, "begin comes first"
        leads, count = self._graph.buffers.inputs, best.shape[0]
        tokens = leads.token_ids[:count]
        run = torch.cat([tokens[:, -1:], best], dim=1)  # the last token, then what follows if all is accepted
        tokens[:] = run.gather(1, accepted[:, None] + torch.arange(LEAD_TOKENS, device=run.device))
        leads.batch.lengths[:count] += accepted + 1

    def keep(self, step: int, index: int, num_tokens: int) -> None:
        """What its next graph reads again does not count."""
        loop = self._inputs[index]
        _draft_cache(loop).length = loop.seq_cache.length + 1 - LEAD_TOKENS


def _draft_cache(loop: LoopInput) -> SequenceCache:
    assert loop.draft_cache is not None, "a loop with a draft model has its caches"
    return loop.draft_cache


def _can_draft(loop: LoopInput) -> bool:
    """Whether there is enough to begin from, and no graph would miss an adapter."""
    return _draft_cache(loop).lora is None and len(loop.ids) >= LEAD_TOKENS
