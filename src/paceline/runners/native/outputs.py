"""What the passes of a runner compute beyond logits: one record that all of them read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.draft_vocabulary import WHOLE_VOCABULARY
from paceline.core.protocols import Adapter
from paceline.core.types import ModelOutput, RowOutput
from paceline.device.memory import for_sampling
from paceline.layers.ops import Ops
from paceline.models.decoder import DecoderModel, LayerOutput


@dataclass(slots=True, eq=False)
class OutputOptions:
    """Which states a pass returns, and after which layer it stops. `expose` changes them."""

    last_layer: int  # layers that run; all of them, or fewer for an early exit
    want_hidden: bool = False
    feature_layers: tuple[int, ...] = ()
    vocab_rows: int = WHOLE_VOCABULARY  # tokens whose logits are wanted, from the first on
    adapter: Adapter | None = None  # of an early exit: applied between the final norm and the LM head


def logits_of(hidden: Tensor, model: DecoderModel, options: OutputOptions) -> Tensor:
    """Hidden states behind the final norm -> logits; of an early exit, through its adapter."""
    hidden = hidden if options.adapter is None else options.adapter(hidden)
    return for_sampling(model.logits(hidden, options.vocab_rows))


def joined(parts: list[RowOutput]) -> RowOutput:
    """The output of a row that was read in parts, of which only the last node is asked for."""
    hidden = [part.hidden for part in parts if part.hidden is not None]
    features = [part.features for part in parts if part.features is not None]
    return RowOutput(
        parts[-1].logits, torch.cat(hidden) if hidden else None, torch.cat(features) if features else None
    )


def row_ends(row_sizes: list[int], device: torch.device) -> Tensor:
    """The last node of each row in the packed rows."""
    return torch.tensor(list(itertools.accumulate(row_sizes)), device=device) - 1


def model_output(
    states: LayerOutput, row_sizes: list[int], last_only: bool, model: DecoderModel, options: OutputOptions, ops: Ops
) -> ModelOutput:
    """Final norm and LM head over the nodes that are asked for: with last_only one a row."""
    hidden_states = states.hidden_states
    if not last_only:
        hidden = model.norm(hidden_states, ops)
        shown = hidden if options.want_hidden else None
        return ModelOutput(logits_of(hidden, model, options), row_sizes, shown, states.features)
    ends = row_ends(row_sizes, hidden_states.device)
    hidden = model.norm(hidden_states if options.want_hidden else hidden_states[ends], ops)
    last = hidden[ends] if options.want_hidden else hidden
    shown = hidden if options.want_hidden else None
    return ModelOutput(logits_of(last, model, options), [1] * len(row_sizes), shown, states.features, row_sizes)


def by_sequence(rows: Tensor, nodes: int) -> Tensor:
    """[sequences · nodes, …] -> [sequences, nodes, …]"""
    return rows.view(-1, nodes, *rows.shape[1:])
