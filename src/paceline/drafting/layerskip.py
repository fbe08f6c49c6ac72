"""Self-speculation: the target itself, left after a few of its layers, guesses what all of them will say.

The exit works on the target's own slots and cache: what stands before the guesses has already been read by the
lower layers, so drafting begins at once and a text costs no second cache. What the exit writes lies behind the slot's
length, where verification writes again, unless the runner can go on from it (`Resuming`).

An exit adapter (heads/exit.py) translates the inner layer's state for the target's head; without one the head reads
it as it is, which only models trained for early exits do well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.core.protocols import Ability, OpenRunner, Output, Round, Row, Runner, Slot, as_outputs
from paceline.core.sequence import Sequence
from paceline.core.tree import DraftTree
from paceline.drafting.choosing import Drawn, choose
from paceline.errors import PairError
from paceline.heads.exit import ExitAdapter


@runtime_checkable
class Resuming(Protocol):
    """An exit whose work verification can go on from, instead of computing the drafted layers again."""

    def hand_over(self, slot: Slot, length: int) -> None:
        """Like trim; but the next pass over this slot may use what the exit has computed past `length`."""


class LayerSkip:
    """Drafts a chain with the lower layers of the target."""

    needs: frozenset[Ability] = frozenset({Ability.EXIT})

    def __init__(self, target: OpenRunner, layer: int | None = None, adapter: ExitAdapter | None = None) -> None:
        """layer: the exit lies after it; by default the adapter's, or a quarter of the model's layers."""
        if adapter is not None:
            _check_pair(adapter, target, layer)
            layer = adapter.config.layer
        self.layer = layer if layer is not None else max(1, target.card.layers // 4)
        self.exit: Runner = target.exit_at(self.layer, adapter)

    def through(self, exit_: Runner) -> LayerSkip:
        """The same drafter with another runner of its exit."""
        twin = copy.copy(self)
        twin.exit = exit_
        return twin

    def begin(self, text: Sequence, prompt: Output | None) -> None:
        """Nothing to read: the lower layers know the text."""

    @torch.inference_mode()
    def propose(self, texts: list[Sequence], budgets: list[int]) -> list[DraftTree]:
        drawn = [Drawn() for _ in texts]
        lengths = [_slot(text).length for text in texts]
        for depth in range(max(budgets, default=0)):
            active = [index for index, budget in enumerate(budgets) if depth < budget]
            rows = [_row(texts[index], drawn[index]) for index in active]
            logits = self._logits(rows)
            best = logits.argmax(dim=-1, keepdim=True)
            choose([texts[i] for i in active], best, logits.__getitem__, [drawn[i] for i in active])
        for text, length, mine in zip(texts, lengths, drawn):
            if mine.tokens:
                self._give_back(_slot(text), length)
        return [mine.chain(text) for mine, text in zip(drawn, texts)]

    def observe(self, texts: list[Sequence], rounds: list[Round]) -> None:
        pass

    def end(self, text: Sequence) -> None:
        pass

    def _logits(self, rows: list[Row]) -> Tensor:
        """One pass of the exit over one token a text. [texts, vocab]"""
        said = as_outputs(self.exit.forward(rows, last_only=True))
        for row in rows:
            self.exit.keep(row.slot, [0])
        return said.logits

    def _give_back(self, slot: Slot, length: int) -> None:
        """The slot as verification expects it: every token of the text but the last."""
        restore: Callable[[Slot, int], None] = self.exit.trim
        if isinstance(self.exit, Resuming):
            restore = self.exit.hand_over
        restore(slot, length)


def _slot(text: Sequence) -> Slot:
    assert text.slot is not None, "prefill opens the slot"
    return text.slot


def _row(text: Sequence, drawn: Drawn) -> Row:
    """The last token of the text, then the last guess."""
    if drawn.tokens:
        return Row(_slot(text), drawn.tokens[-1], [-1])
    return Row.chain(_slot(text), text.ids[-1:])


def _check_pair(adapter: ExitAdapter, target: OpenRunner, layer: int | None) -> None:
    """Raise PairError where an adapter was made for another target or another layer."""
    config, card = adapter.config, target.card
    if config.hidden_size != card.width:
        raise PairError(f"this adapter reads states of {config.hidden_size} values; {card.name} has {card.width}")
    if layer not in (None, config.layer):
        raise PairError(f"this adapter was trained for an exit after layer {config.layer}, not {layer}")
