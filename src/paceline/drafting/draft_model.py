"""A second, smaller model guesses, one token after another, with a cache of its own.

Its cache is kept in step by one rule: before drafting, read whatever the text has and the cache has not. After a full
acceptance that is the last guess and the target's own token; after a rejection the cache has first been cut back.

q is real: each guess is drawn from the draft's distribution under the text's own sampling settings, and that
distribution travels with the guess. A greedy text gets greedy guesses, whose q is one-hot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core import tree
from paceline.core.distribution import distribution, draw
from paceline.core.protocols import Ability, Output, Outputs, Round, Row, Runner, Slot, as_outputs
from paceline.core.sequence import Sequence
from paceline.core.tree import DraftTree


@dataclass(slots=True, eq=False)
class _Drawn:
    """The guesses made so far for one text in one round."""

    tokens: list[Tensor] = field(default_factory=list)  # each int64 [1], on the draft's device
    probs: list[Tensor] = field(default_factory=list)  # each [vocab]


class DraftModel:
    """Drafts a chain with a runner of its own."""

    needs: frozenset[Ability] = frozenset()

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        """vocab_size: the target's. A draft with a larger, padded head is cut to it, a smaller one padded."""
        self.runner = runner
        self._vocab = vocab_size
        self._slots: dict[int, Slot] = {}
        self._before: dict[int, int] = {}  # length of each text when its guesses were made

    def begin(self, text: Sequence, prompt: Output | None) -> None:
        """The draft reads the prompt when it is first asked; a text never guessed for costs it nothing."""

    def propose(self, texts: list[Sequence], budgets: list[int]) -> list[DraftTree]:
        drawn = {text.number: _Drawn() for text in texts}
        for text in texts:
            self._before[text.number] = len(text.ids)
        for depth in range(max(budgets, default=0)):
            active = [text for text, budget in zip(texts, budgets) if depth < budget]
            said = as_outputs(self.runner.forward([self._row(text, drawn[text.number]) for text in active], last_only=True))
            self._choose(active, said, drawn)
        return [self._tree(text, drawn[text.number]) for text in texts]

    def observe(self, texts: list[Sequence], rounds: list[Round]) -> None:
        for text, done in zip(texts, rounds):
            slot = self._slots.get(text.number)
            if slot is not None:
                self.runner.trim(slot, self._before[text.number] + len(done.verdict.path))
                self.runner.trim(slot, len(text.ids) - 1)  # the end may have cut inside the run

    def end(self, text: Sequence) -> None:
        self._before.pop(text.number, None)
        slot = self._slots.pop(text.number, None)
        if slot is not None:
            self.runner.close(slot)

    def _row(self, text: Sequence, drawn: _Drawn) -> Row:
        """What the draft has not read yet: the last guess, or at first all that is new in the text."""
        if drawn.tokens:
            return Row(self._slots[text.number], drawn.tokens[-1], [-1])
        slot = self._slots.get(text.number)
        if slot is None:
            slot = self._slots[text.number] = self.runner.open()
        return Row.chain(slot, text.ids[slot.length :])

    def _choose(self, texts: list[Sequence], said: Outputs, drawn: dict[int, _Drawn]) -> None:
        """Choose the next guess of every text: one argmax for all greedy texts, a draw for each other one."""
        logits = self._as_targets(said.logits)
        best = logits.argmax(dim=-1, keepdim=True)
        for index, text in enumerate(texts):
            mine = drawn[text.number]
            if text.sampling.plain_greedy:
                mine.tokens.append(best[index])
                continue
            path = [int(token) for token in mine.tokens] if text.sampling.penalised else []
            q = distribution(logits[index : index + 1], text.sampling, [text.history(path)])
            chance = torch.rand(1, generator=text.rng, dtype=torch.float64)
            mine.tokens.append(draw(q, chance))
            mine.probs.append(q[0])

    def _as_targets(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary: padding beyond it cannot be guessed."""
        size = logits.shape[-1]
        if size >= self._vocab:
            return logits[..., : self._vocab]
        return torch.nn.functional.pad(logits, (0, self._vocab - size), value=-torch.inf)

    def _tree(self, text: Sequence, drawn: _Drawn) -> DraftTree:
        if not drawn.tokens:
            return tree.empty()
        # A greedy text's guess is an argmax: chosen, not drawn.
        probs = torch.stack(drawn.probs) if drawn.probs and not text.sampling.greedy else None
        return tree.chain(torch.cat(drawn.tokens), probs)
