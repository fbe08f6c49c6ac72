"""A chain of an EAGLE head as one CUDA graph: read the target's new hidden states, then draft token after token.

Launched one by one, the thirty small operations of a draft token cost as much as a pass of a large target. Here every
shape is fixed and all that varies lies in tensors, so the whole chain is one graph: the host copies the inputs, replays
it, and the draft tokens stay on the device until the target has verified them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.sampling import draw_keyed
from paceline.core.types import DraftOutput
from paceline.device.graphs import NUM_SEQS, Graph, GraphCache, GraphPool, rounded_up
from paceline.device.memory import host_buffer
from paceline.device.scratch import Scratch
from paceline.heads.eagle import ChainHead
from paceline.heads.kv_cache import FIRST_CAPACITY, KeyBuffers

ROWS = (8, 16)  # hidden states of the target that a sequence may bring
MAX_GRAPHS = 32
# The first size of the buffers: whenever they grow, every graph is captured again, half a second each.
ROOM_ROWS = 16
ROOM_TOKENS = 2048
FACTS = 4  # integers about a sequence before its tokens: row of the buffers, entries there, position, states it brings


@dataclass(frozen=True, slots=True, eq=False)
class ChainInput:
    """What the chain of one sequence starts from."""

    row: int  # of the buffers
    length: int  # entries in it
    place: int  # position of the next entry
    states: Tensor  # of the target, not read yet, [count, features]
    tokens: list[int]  # the token after each of them
    temperature: float = 0.0  # 0: the argmax
    uniforms: list[float] | None = None  # a uniform number a step; needed where the temperature is above 0


@dataclass(frozen=True, slots=True)
class ChainSize:
    """What a chain is captured for."""

    num_seqs: int
    rows: int
    steps: int
    seen: int  # columns of the buffers
    drawn: bool


@dataclass(frozen=True, slots=True, eq=False)
class ChainBuffers:
    """The fixed tensors of one captured chain."""

    host: Tensor  # int64 [sequences, FACTS + rows], pinned where that helps
    numbers: Tensor  # the same on the device
    states: Tensor  # [sequences, rows, features]
    temperatures: Tensor  # float32 [sequences, 1]
    uniforms: Tensor  # float64 [sequences, steps]

    @classmethod
    def empty(cls, size: ChainSize, like: Tensor) -> ChainBuffers:
        """like: hidden states as the target returns them."""
        device, shape = like.device, (size.num_seqs, FACTS + size.rows)
        return cls(
            host_buffer(shape, torch.int64, device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            like.new_zeros(size.num_seqs, size.rows, like.shape[-1]),
            torch.ones(size.num_seqs, 1, device=device),
            torch.zeros(size.num_seqs, size.steps, dtype=torch.float64, device=device),
        )

    def put(self, starts: list[ChainInput], spare_row: int) -> None:
        """Copy the inputs of these sequences. Unused rows of the batch work on the spare row, one state long."""
        lines = [[start.row, start.length, start.place, len(start.tokens), *start.tokens] for start in starts]
        lines += [[spare_row, 0, 0, 1]] * (self.host.shape[0] - len(starts))
        width = self.host.shape[1]
        self.host.copy_(torch.tensor([line + [0] * (width - len(line)) for line in lines]))
        self.numbers.copy_(self.host, non_blocking=True)
        for index, start in enumerate(starts):
            self.states[index, : len(start.tokens)].copy_(start.states)
        if starts[0].uniforms is not None:
            put_draws(starts, self.temperatures, self.uniforms)

    def go_on(self, accepted: Tensor, best: Tensor) -> None:
        """As head_loop.HeadBuffers says."""
        facts = self.numbers[: accepted.shape[0]]
        facts[:, 1:3] += facts[:, 3:4]
        facts[:, 3] = accepted + 1
        facts[:, FACTS : FACTS + best.shape[1]] = best


ChainGraph = Graph[ChainSize, ChainBuffers, DraftOutput]


class DrawnInput(Protocol):
    """The part of a chain's or block's input that says how its tokens are drawn."""

    @property
    def temperature(self) -> float: ...

    @property
    def uniforms(self) -> list[float] | None: ...


def put_draws(starts: Sequence[DrawnInput], temperatures: Tensor, uniforms: Tensor) -> None:
    """Copy how the tokens of these sequences are drawn to the fixed tensors of a graph."""
    count = len(starts)
    temperatures[:count, 0].copy_(torch.tensor([start.temperature for start in starts]), non_blocking=True)
    numbers = torch.tensor([start.uniforms for start in starts], dtype=torch.float64)
    uniforms[:count].copy_(numbers, non_blocking=True)


class EagleGraphs:
    """The captured chains of one head, captured on first use."""

    MAX_SEQS, MAX_STATES = NUM_SEQS[-1], ROWS[-1]

    def __init__(
        self, head: ChainHead, buffers: KeyBuffers, vocab_size: int, pool: GraphPool | None = None
    ) -> None:
        """vocab_size: the target's. pool: captures chains; by default a pool for the device of the head."""
        self._head, self._buffers, self._vocab = head, buffers, vocab_size
        pool = pool or GraphPool("a chain of draft tokens", head.target_ids.device)
        self._graphs: GraphCache[ChainSize, ChainBuffers, DraftOutput] = GraphCache(pool, MAX_GRAPHS)
        self._spare_row = buffers.take()
        buffers.reserve(ROOM_TOKENS, ROOM_ROWS)
        self._drawn_from = Scratch()
        self._version = buffers.version

    def draft(self, starts: list[ChainInput], steps: int) -> DraftOutput:
        """`steps` draft tokens for every sequence; its buffers then hold its states, and behind them the draft."""
        output, count = self.prepared(starts, steps).run(), len(starts)
        return DraftOutput(output.tokens[:count], None if output.probs is None else output.probs[:count])

    def prepared(
        self, starts: list[ChainInput], steps: int, num_states: int = 0, num_further: int = 0
    ) -> ChainGraph:
        """The graph of a chain of `steps` draft tokens with these sequences in its inputs.

        num_states   that a later chain of the same graph may bring
        num_further  tokens that a sequence may grow by until then
        """
        size = self._size(starts, steps, num_states, num_further)
        self._buffers.reserve(size.seen)
        if self._version != self._buffers.version:  # they have moved, and captured chains write where they were
            self._graphs.clear()
            self._version = self._buffers.version
        graph = self._graphs.get(
            size,
            lambda: ChainBuffers.empty(size, starts[0].states),
            lambda buffers: self._work(buffers, size),
        )
        graph.buffers.put(starts, self._spare_row)
        return graph

    def _size(self, starts: list[ChainInput], steps: int, num_states: int, num_further: int) -> ChainSize:
        most = max(num_states, *(len(start.tokens) for start in starts))
        seqs, rows = rounded_up(len(starts), NUM_SEQS), rounded_up(most, ROWS)
        assert seqs is not None and rows is not None, "more sequences or states than a chain holds"
        longest = max(start.length for start in starts) + num_further + rows + steps
        seen = max(FIRST_CAPACITY, 1 << (longest - 1).bit_length())
        return ChainSize(seqs, rows, steps, seen, starts[0].uniforms is not None)

    # --- what is captured ---------------------------------------------------------------------------------------------

    def _work(self, given: ChainBuffers, size: ChainSize) -> DraftOutput:
        head, facts = self._head, given.numbers
        row, length, place, count = (facts[:, index] for index in range(FACTS))
        steps = torch.arange(size.rows, device=facts.device)
        columns, positions = length[:, None] + steps, place[:, None] + steps
        output = self._pass(facts[:, FACTS:], head.fuse(given.states), row, columns, positions, size.seen)
        out = output[torch.arange(size.num_seqs, device=facts.device), count - 1]
        tokens: list[Tensor] = []
        probs = self._drawn_from.of((size.num_seqs, size.steps, self._vocab), facts.device) if size.drawn else None
        for step in range(size.steps):
            if step:
                behind = (count + step - 1)[:, None]
                last, g = tokens[-1][:, None], out[:, None]
                out = self._pass(last, g, row, length[:, None] + behind, place[:, None] + behind, size.seen)[:, 0]
            logits = head.logits(out)
            if probs is not None:
                probs[:, step] = torch.softmax(self._widened(logits) / given.temperatures, dim=-1)
                tokens.append(draw_keyed(probs[:, step], given.uniforms[:, step]))
            else:
                tokens.append(head.to_target_ids(logits.argmax(dim=-1)))
        return DraftOutput(torch.stack(tokens, dim=1), probs)

    def _pass(self, tokens: Tensor, g: Tensor, row: Tensor, columns: Tensor, positions: Tensor, seen: int) -> Tensor:
        """Rows one after another for every sequence; each sees its sequence up to itself."""
        store = self._buffers.indexed(row, columns, seen)
        mask = (torch.arange(seen, device=columns.device) <= columns[..., None])[:, None]
        return self._head.block(self._head.embed(tokens), g, positions, mask, store)

    def _widened(self, logits: Tensor) -> Tensor:
        return widened(logits, self._head.target_ids, self._vocab)


def widened(logits: Tensor, target_ids: Tensor, vocab_size: int) -> Tensor:
    """Rows over a head's own vocabulary as rows over the target's: what the head cannot say has no probability."""
    output = logits.float()
    if output.shape[-1] == vocab_size:  # rising ids as many as the target's: the same vocabulary
        return output
    return output.new_full((output.shape[0], vocab_size), -torch.inf).index_copy_(1, target_ids, output)
