"""A chain of an EAGLE head as one piece of work: read the true states that came in, then draft token, step after step.

Launch by launch the thirty small operations of a step cost as much as a pass of a large target. Here every shape is
fixed and all that varies lies in tensors, so the whole chain is captured as a graph: the host lays down what is new,
starts it, and the draft tokens stay on the device until the target has checked them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.sampling import draw
from paceline.core.types import DraftOutput
from paceline.device.graphs import NUM_SEQS, GraphCache, GraphPool, rounded_up
from paceline.device.memory import host_buffer
from paceline.device.scratch import Scratch
from paceline.heads.cache import FIRST_CAPACITY, KeyBuffers
from paceline.heads.eagle import EagleHead

ROWS = (8, 16)  # true states a sequence may bring
LARGEST = 32  # chains that are kept; beyond it the oldest go
# Room the buffers have from the start: whenever they move, all that was captured is captured anew, half a second each.
ROOM_ROWS = 16
ROOM_TOKENS = 2048
FACTS = 4  # integers about a sequence before its tokens: row of the buffers, entries there, position, states it brings


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Where the chain of one sequence begins."""

    row: int  # of the buffers
    length: int  # entries in it
    place: int  # position of the next entry
    states: Tensor  # true ones not read yet, [count, features]
    tokens: list[int]  # the token after each of them
    temperature: float = 0.0  # 0: the argmax
    uniforms: list[float] | None = None  # a uniform number a step; needed where the temperature is above 0


@dataclass(frozen=True, slots=True)
class Size:
    """What a chain is captured for."""

    seqs: int
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
    def empty(cls, size: Size, like: Tensor) -> ChainBuffers:
        """like: states as the target hands them out."""
        device, shape = like.device, (size.seqs, FACTS + size.rows)
        return cls(
            host_buffer(shape, torch.int64, device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            like.new_zeros(size.seqs, size.rows, like.shape[-1]),
            torch.ones(size.seqs, 1, device=device),
            torch.zeros(size.seqs, size.steps, dtype=torch.float64, device=device),
        )

    def put(self, starts: list[Start], spare_row: int) -> None:
        """Lay these sequences down. Places without a sequence work on the spare row, one state long."""
        lines = [[start.row, start.length, start.place, len(start.tokens), *start.tokens] for start in starts]
        lines += [[spare_row, 0, 0, 1]] * (self.host.shape[0] - len(starts))
        width = self.host.shape[1]
        self.host.copy_(torch.tensor([line + [0] * (width - len(line)) for line in lines]))
        self.numbers.copy_(self.host, non_blocking=True)
        for index, start in enumerate(starts):
            self.states[index, : len(start.tokens)].copy_(start.states)
        if starts[0].uniforms is not None:
            count = len(starts)
            temperatures = torch.tensor([start.temperature for start in starts])
            self.temperatures[:count, 0].copy_(temperatures, non_blocking=True)
            uniforms = torch.tensor([start.uniforms for start in starts], dtype=torch.float64)
            self.uniforms[:count].copy_(uniforms, non_blocking=True)


class EagleGraphs:
    """The captured chains of one head, made when first asked for."""

    MAX_SEQS, MOST_STATES = NUM_SEQS[-1], ROWS[-1]

    def __init__(
        self, head: EagleHead, buffers: KeyBuffers, vocab_size: int, pool: GraphPool | None = None
    ) -> None:
        """vocab_size: the target's. pool: captures chains; by default a pool for the device of the head."""
        self._head, self._buffers, self._vocab = head, buffers, vocab_size
        pool = pool or GraphPool("a chain of draft tokens", head.target_ids.device)
        self._graphs: GraphCache[Size, ChainBuffers, DraftOutput] = GraphCache(pool, LARGEST)
        self._spare_row = buffers.take()
        buffers.reserve(ROOM_TOKENS, ROOM_ROWS)
        self._drawn_from = Scratch()
        self._version = buffers.version

    def guess(self, starts: list[Start], steps: int) -> DraftOutput:
        """`steps` draft tokens for every sequence; its buffers then hold all of its states."""
        size = self._size(starts, steps)
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
        made = graph.run()
        count = len(starts)
        return DraftOutput(made.tokens[:count], None if made.probs is None else made.probs[:count])

    def _size(self, starts: list[Start], steps: int) -> Size:
        seqs, rows = rounded_up(len(starts), NUM_SEQS), rounded_up(max(len(start.tokens) for start in starts), ROWS)
        assert seqs is not None and rows is not None, "more texts or states than a chain is made for"
        longest = max(start.length for start in starts) + rows + steps
        seen = max(FIRST_CAPACITY, 1 << (longest - 1).bit_length())
        return Size(seqs, rows, steps, seen, starts[0].uniforms is not None)

    # --- what is captured ---------------------------------------------------------------------------------------------

    def _work(self, given: ChainBuffers, size: Size) -> DraftOutput:
        head, facts = self._head, given.numbers
        row, length, place, count = (facts[:, index] for index in range(FACTS))
        steps = torch.arange(size.rows, device=facts.device)
        columns, positions = length[:, None] + steps, place[:, None] + steps
        output = self._pass(facts[:, FACTS:], head.fuse(given.states), row, columns, positions, size.seen)
        out = output[torch.arange(size.seqs, device=facts.device), count - 1]
        tokens: list[Tensor] = []
        probs = self._drawn_from.of((size.seqs, size.steps, self._vocab), facts.device) if size.drawn else None
        for step in range(size.steps):
            if step:
                behind = (count + step - 1)[:, None]
                last, g = tokens[-1][:, None], out[:, None]
                out = self._pass(last, g, row, length[:, None] + behind, place[:, None] + behind, size.seen)[:, 0]
            logits = head.logits(out)
            if probs is not None:
                probs[:, step] = torch.softmax(self._widened(logits) / given.temperatures, dim=-1)
                tokens.append(draw(probs[:, step], given.uniforms[:, step]))
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
