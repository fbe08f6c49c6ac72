"""A second, smaller model guesses, one token after another, with a cache of its own.

Its cache is kept in step by one rule: before drafting, read whatever the text has and the cache has not. After a full
acceptance that is the last guess and the target's own token; after a rejection the cache has first been cut back.

q is real: each guess is drawn from the draft's distribution under the text's own sampling settings, and that
distribution travels with the guess. A greedy text gets greedy guesses, whose q is one-hot.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from paceline.core import tree
from paceline.core.protocols import (
    TILE,
    Ability,
    Lead,
    LoopRunner,
    Output,
    Round,
    Row,
    Runner,
    Slot,
    as_outputs,
)
from paceline.core.sequence import Sequence
from paceline.core.tree import DraftTree
from paceline.drafting.choosing import Drawn, can_loop, choose, cut, loop_chances
from paceline.drafting.residents import Residents


class DraftModel:
    """Drafts a chain with a runner of its own."""

    needs: frozenset[Ability] = frozenset()

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        """vocab_size: the target's. A draft with a larger, padded head is cut to it, a smaller one padded."""
        self.runner = runner
        self._vocab = vocab_size
        self._slots: dict[int, Slot] = {}
        self._residents = Residents(runner)
        self._before: dict[int, int] = {}  # length of each text when its guesses were made

    def begin(self, text: Sequence, prompt: Output | None) -> None:
        """The draft reads the prompt when it is first asked; a text never guessed for costs it nothing."""

    def propose(self, texts: list[Sequence], budgets: list[int]) -> list[DraftTree]:
        for text in texts:
            self._before[text.number] = len(text.ids)
        self._make_room(texts, budgets)
        guessed = self._in_one_loop(texts, budgets)
        return self._step_by_step(texts, budgets) if guessed is None else guessed

    def _in_one_loop(self, texts: list[Sequence], budgets: list[int]) -> list[DraftTree] | None:
        """All steps without returning to the host, where the runner can. None: it cannot, or not for these texts."""
        asked = [text for text, budget in zip(texts, budgets) if budget]
        if Ability.LOOP not in self.runner.abilities or not asked or not all(map(can_loop, asked)):
            return None
        if self.runner.card.vocab_size != self._vocab:
            return None
        steps = max(budgets)
        leads = [
            Lead(self._slot(text), text.ids, text.sampling.temperature, loop_chances(text, steps)) for text in asked
        ]
        drafted = cast(LoopRunner, self.runner).loop(leads, steps)
        if drafted is None:
            return None
        rows = {text.number: row for row, text in enumerate(asked)}
        return [
            cut(drafted, rows[text.number], budget) if budget else tree.empty() for text, budget in zip(texts, budgets)
        ]

    def _step_by_step(self, texts: list[Sequence], budgets: list[int]) -> list[DraftTree]:
        drawn = {text.number: Drawn() for text in texts}
        for depth in range(max(budgets, default=0)):
            active = [text for text, budget in zip(texts, budgets) if depth < budget]
            rows = [self._row(text, drawn[text.number]) for text in active]
            logits = self._as_targets(as_outputs(self.runner.forward(rows, last_only=True)).logits)
            best = logits.argmax(dim=-1, keepdim=True)
            choose(active, best, logits.__getitem__, [drawn[text.number] for text in active])
        return [drawn[text.number].chain(text) for text in texts]

    def observe(self, texts: list[Sequence], rounds: list[Round]) -> None:
        for text, done in zip(texts, rounds):
            slot = self._slots.get(text.number)
            if slot is not None:
                self.runner.trim(slot, self._before[text.number] + len(done.verdict.path))
                self.runner.trim(slot, len(text.ids) - 1)  # the end may have cut inside the run

    def end(self, text: Sequence) -> None:
        self._before.pop(text.number, None)
        slot = self._slots.pop(text.number, None)
        if slot is None:
            return
        if text.stays:
            self.runner.trim(slot, len(text.ids) - 1)
            self._residents.keep(text.ids, slot)
        else:
            self.runner.close(slot)

    def _row(self, text: Sequence, drawn: Drawn) -> Row:
        """What the draft has not read yet: the last guess, or at first all that is new in the text."""
        if drawn.tokens:
            return Row(self._slots[text.number], drawn.tokens[-1], [-1])
        slot = self._slot(text)
        return Row.chain(slot, text.ids[slot.length :])

    def _slot(self, text: Sequence) -> Slot:
        slot = self._slots.get(text.number)
        if slot is None:
            slot = self._slots[text.number] = self._residents.open(text.ids)
        return slot

    def _make_room(self, texts: list[Sequence], budgets: list[int]) -> None:
        """For all that this round may write, rounded up to pages; what earlier texts left behind goes first."""
        asked = [(text, budget) for text, budget in zip(texts, budgets) if budget]
        unread = [len(text.ids) - self._slot(text).length for text, _ in asked]
        self._residents.make_room(sum(unread) + sum(budget + TILE for _, budget in asked))

    def _as_targets(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary: padding beyond it cannot be guessed."""
        size = logits.shape[-1]
        if size >= self._vocab:
            return logits[..., : self._vocab]
        return torch.nn.functional.pad(logits, (0, self._vocab - size), value=-torch.inf)
