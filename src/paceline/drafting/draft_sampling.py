"""The next draft token of a chain: the argmax for a greedy sequence, a draw with its real q for a sampled one.

A device loop takes all steps of a chain without returning to the host. What such a loop needs to know of a sequence,
and how its draft tokens become a tree, is here too.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.draft_value import ChainStop
from paceline.core.sampling import distribution
from paceline.core.sequence import Sequence, group_by_sampling
from paceline.core.types import DraftOutput
from paceline.device.memory import for_sampling

UNUSED = 0.5  # the number for steps of a device loop past a sequence's own draft length


@dataclass(slots=True, eq=False)
class SampledDraft:
    """The draft tokens of one sequence in one step, as far as they are sampled.

    uniforms: numbers drawn before, one per token; None: each is drawn when its token is.
    """

    tokens: list[Tensor] = field(default_factory=list)  # each int64 [1], on the device of the drafter
    probs: list[Tensor] = field(default_factory=list)  # each [vocab]
    uniforms: Tensor | None = None  # float64 [steps]
    confidence: list[float] | None = None  # of each token, stated before it is drawn; None: not wanted
    stopped: bool = False  # no further token is likely to pay

    def next_uniform(self, seq: Sequence) -> Tensor:
        """The number the next token is drawn with. float64 [1]"""
        depth = len(self.tokens)
        return seq.draft_uniforms(depth) if self.uniforms is None else self.uniforms[depth : depth + 1]

    def chain(self, seq: Sequence) -> DraftTree:
        """The tokens as a tree. The draft tokens of a greedy sequence are chosen, not drawn."""
        if not self.tokens:
            return draft_tree.empty()
        probs = torch.stack(self.probs) if self.probs and not seq.sampling.greedy else None
        return draft_tree.chain(torch.cat(self.tokens), probs, self.confidence)


def state_confidences(seqs: list[Sequence], logits: Tensor, drafts: SequenceOf[SampledDraft], stop: ChainStop) -> None:
    """Of the next token of every sequence: the probability of the likeliest one. Before any of them is drawn.

    logits  [sequences, draft vocabulary]
    """
    for seq, draft, confidence in zip(seqs, drafts, likeliest(logits)):
        draft.confidence = [*(draft.confidence or ()), confidence]
        draft.stopped = not stop.goes_on(seq, draft.confidence)


def likeliest(logits: Tensor) -> list[float]:
    """The probability of the likeliest token of every row."""
    probabilities: list[float] = (logits.amax(dim=-1).float() - logits.float().logsumexp(dim=-1)).exp().tolist()
    return probabilities


def choose(
    seqs: list[Sequence], best: Tensor, logits_of: Callable[[list[int]], Tensor], drafts: SequenceOf[SampledDraft]
) -> None:
    """Add the next draft token of every sequence to its draft.

    best       int64 [sequences, 1]: the argmax, which is all a greedy sequence without penalties needs
    logits_of  of some of the sequences: [chosen, vocab] over the target's vocabulary; called only for draws
    """
    drawing = [index for index, seq in enumerate(seqs) if not seq.sampling.plain_greedy]
    for index, seq in enumerate(seqs):
        if seq.sampling.plain_greedy:
            drafts[index].tokens.append(best[index])
    for members in group_by_sampling([seqs[index] for index in drawing]):
        group = [drawing[member] for member in members]
        _draw([seqs[index] for index in group], logits_of(group), [drafts[index] for index in group])


def _draw(seqs: list[Sequence], logits: Tensor, drafts: list[SampledDraft]) -> None:
    sampling = seqs[0].sampling
    histories = None
    if sampling.penalised:
        histories = [seq.history([int(token) for token in draft.tokens]) for seq, draft in zip(seqs, drafts)]
    q = distribution(for_sampling(logits), sampling, histories)
    tokens = seqs[0].params.rule.draw(q, torch.cat([draft.next_uniform(seq) for seq, draft in zip(seqs, drafts)]))
    for index, draft in enumerate(drafts):
        draft.tokens.append(tokens[index : index + 1].to(logits.device))
        draft.probs.append(q[index])


# --- device loops -----------------------------------------------------------------------------------------------------


def can_draft_on_device(seq: Sequence) -> bool:
    """Whether a device loop can choose for this sequence: the argmax, or a draw at some temperature."""
    return seq.sampling.plain_greedy or seq.sampling.plainly_drawn


def predrawn(seq: Sequence, num_draft_tokens: int) -> Tensor | None:
    """The numbers all draft tokens of a step are drawn with; None for a greedy sequence.

    Exactly as many as the sequence drafts, whichever way it drafts: its randomness does not depend on its batch.
    """
    return None if seq.sampling.greedy else seq.draft_uniforms(0, num_draft_tokens)


def loop_uniforms(uniforms: Tensor | None, num_steps: int) -> list[float] | None:
    """The same numbers for a loop of `num_steps` steps, which may be more than the sequence drafts."""
    if uniforms is None:
        return None
    values: list[float] = uniforms.tolist()
    return values + [UNUSED] * (num_steps - len(values))


def first_tokens(drafted: DraftOutput, row: int, num_draft_tokens: int) -> DraftTree:
    """The first draft tokens a loop made for the sequence of this row, as a chain."""
    probs = None if drafted.probs is None else drafted.probs[row, :num_draft_tokens]
    return draft_tree.chain(drafted.tokens[row, :num_draft_tokens], probs)
