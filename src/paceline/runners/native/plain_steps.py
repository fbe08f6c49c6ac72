"""Plain steps in a row: a pass over the last token of every sequence, of which a few are read together.

States that the target returns come with them, so that a head goes on from where plain steps have ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.looped_steps import LoopInput, PlainGroups, PlainSteps
from paceline.core.types import RowOutput
from paceline.runners.native.decode_graphs import ForwardGraph
from paceline.runners.native.outputs import by_sequence
from paceline.runners.native.step_reader import StepReader, grow

PLAIN_GROUP = 2  # steps that are read together: the host needs less time than they take
NO_STATES = RowOutput(torch.empty(0, 0))


def plain_groups(
    graph: ForwardGraph, reader: StepReader, inputs: list[LoopInput], num_groups: int
) -> PlainGroups:
    states, group = _queue_group(graph, reader, 0, len(inputs)), 0
    while group < num_groups:
        own = states
        if group + 1 < num_groups:
            states = _queue_group(graph, reader, group + 1, len(inputs))
        steps = [PlainSteps(tokens, own.of(index)) for index, tokens in enumerate(reader.read(group))]
        for loop in inputs:
            if not loop.has_ended():
                grow(loop, PLAIN_GROUP)
        group += 1
        if (yield steps):
            num_groups = min(num_groups, group + 1)


@dataclass(frozen=True, slots=True, eq=False)
class _PlainStates:
    """What passes of a group have returned beside tokens, each [sequences, steps, …], where the target returns it."""

    hidden: Tensor | None
    features: Tensor | None

    def of(self, index: int) -> RowOutput:
        """Of the sequence at this place. There are no logits."""
        if self.hidden is None and self.features is None:
            return NO_STATES
        hidden, features = (None if part is None else part[index] for part in (self.hidden, self.features))
        return RowOutput(NO_STATES.logits, hidden, features)


@torch.inference_mode()
def _queue_group(graph: ForwardGraph, reader: StepReader, group: int, num_seqs: int) -> _PlainStates:
    inputs, nodes = graph.buffers, graph.key.size.nodes
    tokens: list[Tensor] = []
    hidden: list[Tensor | None] = []
    features: list[Tensor | None] = []
    for _ in range(PLAIN_GROUP):
        output = graph.run()
        tokens.append(output.best.view(-1, nodes)[:num_seqs, 0].clone())
        hidden.append(_copy_of_first(output.hidden, nodes, num_seqs))
        features.append(_copy_of_first(output.features, nodes, num_seqs))
        inputs.token_ids[:num_seqs, 0] = tokens[-1]
        inputs.advance()
    reader.send(group, torch.stack(tokens, dim=1))
    return _PlainStates(_stacked(hidden), _stacked(features))


def _copy_of_first(rows: Tensor | None, nodes: int, num_seqs: int) -> Tensor | None:
    """Of the first node of every sequence: the next pass writes where they are."""
    return None if rows is None else by_sequence(rows, nodes)[:num_seqs, 0].clone()


def _stacked(parts: list[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.stack(there, dim=1) if there else None
