"""The next draft token of a chain: an argmax for a greedy sequence, a draw with its real q for a sampled one.

Where all steps of a chain are taken on the device without returning to the host, that is a loop; what a loop needs to
know of a sequence, and how its draft tokens become a tree, stands here too.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.sampling import distribution, draw
from paceline.core.sequence import Sequence, group_by_sampling
from paceline.core.types import DraftOutput


@dataclass(slots=True, eq=False)
class SampledDraft:
    """The draft tokens made so far for one sequence in one step."""

    tokens: list[Tensor] = field(default_factory=list)  # each int64 [1], where the drafter works
    probs: list[Tensor] = field(default_factory=list)  # each [vocab]

    def chain(self, seq: Sequence) -> DraftTree:
        """All of them as a tree. A greedy sequence's draft token is an argmax: chosen, not drawn."""
        if not self.tokens:
            return draft_tree.empty()
        probs = torch.stack(self.probs) if self.probs and not seq.sampling.greedy else None
        return draft_tree.chain(torch.cat(self.tokens), probs)


def choose(
    seqs: list[Sequence], best: Tensor, logits_of: Callable[[list[int]], Tensor], drawn: Several[SampledDraft]
) -> None:
    """Add the next draft token of every sequence to what was drawn for it.

    best       int64 [sequences, 1]: the likeliest token, which is all a plainly greedy sequence needs
    logits_of  of some of the sequences: [chosen, vocab] over the target's vocabulary; asked only where a draw needs them
    """
    drawing = [index for index, seq in enumerate(seqs) if not seq.sampling.plain_greedy]
    for index, seq in enumerate(seqs):
        if seq.sampling.plain_greedy:
            drawn[index].tokens.append(best[index])
    for places in group_by_sampling([seqs[index] for index in drawing]):
        group = [drawing[place] for place in places]
        _draw([seqs[index] for index in group], logits_of(group), [drawn[index] for index in group])


def _draw(seqs: list[Sequence], logits: Tensor, drawn: list[SampledDraft]) -> None:
    sampling = seqs[0].sampling
    histories = None
    if sampling.penalised:
        histories = [seq.history([int(token) for token in mine.tokens]) for seq, mine in zip(seqs, drawn)]
    q = distribution(logits, sampling, histories)
    uniforms = torch.cat([seq.draft_uniforms(len(mine.tokens)) for seq, mine in zip(seqs, drawn)])
    tokens = draw(q, uniforms)
    for index, mine in enumerate(drawn):
        mine.tokens.append(tokens[index : index + 1])
        mine.probs.append(q[index])


def can_draft_on_device(seq: Sequence) -> bool:
    """Whether a loop on the device knows how to choose for this sequence: an argmax, or a draw at some temperature."""
    return seq.sampling.plain_greedy or seq.sampling.plainly_drawn


def device_uniforms(seq: Sequence, steps: int) -> list[float] | None:
    """The numbers a loop draws with."""
    if seq.sampling.greedy:
        return None
    uniforms: list[float] = seq.draft_uniforms(0, steps).tolist()
    return uniforms


def cut(drafted: DraftOutput, row: int, budget: int) -> DraftTree:
    """The first `budget` draft tokens that a loop made for the sequence in this row."""
    probs = None if drafted.probs is None else drafted.probs[row, :budget]
    return draft_tree.chain(drafted.tokens[row, :budget], probs)
