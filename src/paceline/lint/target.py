"""The target as the linter uses it: its states over a text once, and what it predicts after every token."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.hub.model_config import text_config
from paceline.runners.last_states import LastStates
from paceline.train.corpus import TrainingSequence
from paceline.train.task import TrainingTarget, in_parts
from paceline.train.teacher import Teacher

ALIKE = 0.01  # of a vector's length, within which two are taken to be the same
MOST_ADDED = 16  # tokens that a tokenizer has added to its vocabulary, of which one may be a mask
ROWS_AT_A_TIME = 1024  # logits over a whole vocabulary are computed for this many rows at once


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What readings take from the target: sizes, its rotary base, and tokens that may serve as a mask."""

    num_layers: int
    hidden_size: int
    head_dim: int
    vocab_size: int
    rope_theta: float | None
    special_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, target: TrainingTarget) -> TargetFacts:
        sizes, config = target.teacher.sizes, text_config(target.model.config)
        theta = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta")
        added = sorted(int(token) for token in target.tokenizer.added_tokens_decoder)  # a mask is often the last unused
        special = {*(int(token) for token in target.tokenizer.all_special_ids), *added[-MOST_ADDED:]}
        return cls(
            sizes.num_layers,
            sizes.hidden_size,
            sizes.head_dim,
            target.teacher.vocab_size,
            None if theta is None else float(theta),
            _distinct(target.teacher, sorted(special)),
        )

    def has_layers(self, layers: tuple[int, ...]) -> bool:
        """Whether states enter all of these layers, or leave the last one."""
        return all(0 <= layer <= self.num_layers for layer in layers)


@torch.no_grad()
def _distinct(teacher: Teacher, tokens: list[int]) -> tuple[int, ...]:
    """Without tokens that have the vector of a later one: unused tokens are often alike, and alike as masks."""
    if not tokens:
        return ()
    vectors = teacher.embed(torch.tensor(tokens, device=teacher.device)).float()
    near = torch.cdist(vectors, vectors) < ALIKE * vectors.norm(dim=-1)
    return tuple(token for row, token in enumerate(tokens) if not near[row, row + 1 :].any())


@dataclass(frozen=True, slots=True, eq=False)
class Anchors:
    """Places of a text from which a head drafts: the last known token of each."""

    row: Tensor  # [anchors]
    column: Tensor

    def __len__(self) -> int:
        return int(self.row.shape[0])

    def pick(self, values: Tensor, offset: int = 0) -> Tensor:
        """[batch, length, …] -> [anchors, …], `offset` tokens further on."""
        return values[self.row, self.column + offset]


@dataclass(frozen=True, slots=True, eq=False)
class StatedText:
    """A text with the states of the target over it.

    tokens   int64 [batch, length], padded on the right; lengths, starts: of each sequence and of its answer
    inputs   [batch, length, hidden_size] of each layer: the states that enter it
    last     the states after the last layer, before the final norm; final: after it
    best     int64 [batch, length]: the target's likeliest next token after every token
    """

    teacher: Teacher
    tokens: Tensor
    lengths: Tensor
    starts: Tensor
    inputs: tuple[Tensor, ...] = field(repr=False)
    last: Tensor = field(repr=False)
    final: Tensor = field(repr=False)
    best: Tensor = field(repr=False)

    def features(self, layers: tuple[int, ...]) -> Tensor:
        """States that enter these layers, joined; the number of layers means the states after the last one."""
        inputs = (*self.inputs, self.last)
        return torch.cat([inputs[layer] for layer in layers], dim=-1)

    def anchors(self, k: int) -> Anchors:
        """Every place of an answer after which k tokens are known."""
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)[None]
        first, last = self.starts.clamp(min=1)[:, None], self.lengths[:, None] - k
        row, column = ((columns >= first) & (columns <= last)).nonzero(as_tuple=True)
        return Anchors(row, column)

    def labels(self, anchors: Anchors, k: int) -> Tensor:
        """What the target predicts for the k tokens after every anchor. int64 [anchors, k]"""
        return torch.stack([anchors.pick(self.best, offset) for offset in range(k)], dim=-1)

    def seqs(self, indices: list[int]) -> StatedText:
        """Some of the sequences alone, in this order."""
        rows = torch.tensor(indices, device=self.tokens.device)
        return StatedText(
            self.teacher,
            self.tokens[rows],
            self.lengths[rows],
            self.starts[rows],
            tuple(states[rows] for states in self.inputs),
            self.last[rows],
            self.final[rows],
            self.best[rows],
        )

    def beginning(self, num_anchors: int, k: int) -> StatedText:
        """The first sequence alone, cut behind so many of its anchors."""
        first = self.seqs([0])
        end = min(int(first.lengths), max(1, int(first.starts)) + num_anchors + k - 1)
        return StatedText(
            self.teacher,
            first.tokens[:, :end],
            torch.full_like(first.lengths, end),
            first.starts,
            tuple(states[:, :end] for states in first.inputs),
            first.last[:, :end],
            first.final[:, :end],
            first.best[:, :end],
        )

    @property
    def answer_tokens(self) -> int:
        return int((self.lengths - self.starts).sum())


@torch.no_grad()
def stated(teacher: Teacher, seqs: list[TrainingSequence]) -> StatedText:
    """One pass of the target over these sequences."""
    length = max(len(seq.tokens) for seq in seqs)
    padded = [[*seq.tokens, *[0] * (length - len(seq.tokens))] for seq in seqs]
    tokens = torch.tensor(padded, device=teacher.device)
    last = LastStates(teacher.model)
    try:
        states = teacher.states(tokens)
    finally:
        last.close()
    best = torch.cat([teacher.logits(part).argmax(dim=-1) for part in in_parts(states.final, ROWS_AT_A_TIME)])
    return StatedText(
        teacher,
        tokens,
        torch.tensor([len(seq.tokens) for seq in seqs], device=teacher.device),
        torch.tensor([seq.start for seq in seqs], device=teacher.device),
        states.inputs[: teacher.num_layers],
        states.inputs[-1] if last.states is None else last.states,
        states.final,
        best.view(tokens.shape),
    )
