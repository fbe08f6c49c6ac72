"""A trained head in a loop of steps: the states that the target returns go into its next draft without the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.core.looped_steps import STEPS_AHEAD, LoopInput, LoopProgress
from paceline.core.protocols import LoopSource
from paceline.core.state_view import StateView
from paceline.core.types import DraftOutput, RowOutput
from paceline.device.graphs import Graph
from paceline.drafting.eagle_state import HeadState


class HeadBuffers(Protocol):
    """What a loop knows of the inputs of a head's graph."""

    @property
    def states(self) -> Tensor:
        """Of the target, that the head has not read, [sequences, states, features]"""

    def go_on(self, accepted: Tensor, best: Tensor) -> None:
        """What was new is an entry now; each sequence brings a state for every accepted token and one more.

        best: the tokens after those states, and after draft tokens that were not accepted
        """


@dataclass(slots=True, eq=False)
class HeadSource(LoopSource):
    """Drafts for these sequences with the graph of a head.

    prepare  the graph that drafts while sequences grow by so many tokens, with them in its inputs
    _held    states of the target after the last steps, one that runs and one that is read, [sequences, draft tokens +
             1, features]
    """

    view: StateView
    states: list[HeadState]
    prepare: Callable[[list[LoopInput], int], Graph[Any, Any, DraftOutput]]
    sends_trees: bool = False
    _graph: Graph[Any, HeadBuffers, DraftOutput] | None = None
    _held: list[Tensor | None] = field(default_factory=lambda: [None] * STEPS_AHEAD)

    @torch.inference_mode()
    def begin(self, inputs: list[LoopInput], num_tokens: int) -> bool:
        self._graph = self.prepare(inputs, num_tokens)
        return True

    def draft(self) -> DraftOutput:
        assert self._graph is not None, "begin comes first"
        return self._graph.run()

    def go_on(self, step: int, progress: LoopProgress, states: RowOutput) -> None:
        features = self.view.of(states)
        assert self._graph is not None and features is not None, "the target returns the states that its head reads"
        given, (count, nodes) = self._graph.buffers, progress.best.shape
        given.go_on(progress.accepted, progress.best)
        given.states[:count, :nodes] = features
        self._held[step % STEPS_AHEAD] = features.clone()

    def keep(self, step: int, index: int, num_tokens: int) -> None:
        """The draft has read what was pending; what the step has brought is pending now."""
        held, state = self._held[step % STEPS_AHEAD], self.states[index]
        assert held is not None, "the step was queued before it is read"
        state.mark_read(state.num_pending)
        state.out = None
        state.add(held[index, :num_tokens], num_tokens)


def most_nodes(inputs: list[LoopInput]) -> int:
    """Tokens of one sequence that the target reads in a step."""
    return max(loop.num_draft_tokens for loop in inputs) + 1
