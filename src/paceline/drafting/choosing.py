"""The next guess of a chain: an argmax for a greedy text, a draw with its real q for a sampled one.

Where all steps of a chain are taken on the device without returning to the host, that is a loop; what a loop needs to
know of a text, and how its guesses become a tree, stands here too.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core import tree
from paceline.core.distribution import distribution, draw
from paceline.core.protocols import Guesses
from paceline.core.sequence import Sequence, alike
from paceline.core.tree import DraftTree


@dataclass(slots=True, eq=False)
class Drawn:
    """The guesses made so far for one text in one round."""

    tokens: list[Tensor] = field(default_factory=list)  # each int64 [1], where the drafter works
    probs: list[Tensor] = field(default_factory=list)  # each [vocab]

    def chain(self, text: Sequence) -> DraftTree:
        """All of them as a tree. A greedy text's guess is an argmax: chosen, not drawn."""
        if not self.tokens:
            return tree.empty()
        probs = torch.stack(self.probs) if self.probs and not text.sampling.greedy else None
        return tree.chain(torch.cat(self.tokens), probs)


def choose(
    texts: list[Sequence], best: Tensor, logits_of: Callable[[list[int]], Tensor], drawn: Several[Drawn]
) -> None:
    """Add the next guess of every text to what was drawn for it.

    best       int64 [texts, 1]: the likeliest token, which is all a plainly greedy text needs
    logits_of  of some of the texts: [chosen, vocab] over the target's vocabulary; asked only where a draw needs them
    """
    drawing = [index for index, text in enumerate(texts) if not text.sampling.plain_greedy]
    for index, text in enumerate(texts):
        if text.sampling.plain_greedy:
            drawn[index].tokens.append(best[index])
    for places in alike([texts[index] for index in drawing]):
        group = [drawing[place] for place in places]
        _draw([texts[index] for index in group], logits_of(group), [drawn[index] for index in group])


def _draw(texts: list[Sequence], logits: Tensor, drawn: list[Drawn]) -> None:
    sampling = texts[0].sampling
    histories = None
    if sampling.penalised:
        histories = [text.history([int(token) for token in mine.tokens]) for text, mine in zip(texts, drawn)]
    q = distribution(logits, sampling, histories)
    chance = torch.cat([text.guess_chances(len(mine.tokens)) for text, mine in zip(texts, drawn)])
    tokens = draw(q, chance)
    for index, mine in enumerate(drawn):
        mine.tokens.append(tokens[index : index + 1])
        mine.probs.append(q[index])


def can_loop(text: Sequence) -> bool:
    """Whether a loop on the device knows how to choose for this text: an argmax, or a draw at some temperature."""
    return text.sampling.plain_greedy or text.sampling.plainly_drawn


def loop_chances(text: Sequence, steps: int) -> list[float] | None:
    """The numbers a loop draws with."""
    if text.sampling.greedy:
        return None
    chances: list[float] = text.guess_chances(0, steps).tolist()
    return chances


def cut(drafted: Guesses, row: int, budget: int) -> DraftTree:
    """The first `budget` guesses that a loop made for the text in this row."""
    probs = None if drafted.probs is None else drafted.probs[row, :budget]
    return tree.chain(drafted.tokens[row, :budget], probs)
