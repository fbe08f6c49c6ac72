"""The target as the linter uses it: its states over a text once, and what it predicts after every token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.hub.model_config import text_config
from paceline.train.corpus import TrainingSequence
from paceline.train.task import TrainingTarget, in_parts
from paceline.train.teacher import Teacher

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
        special = tuple(sorted(int(token) for token in target.tokenizer.all_special_ids))
        return cls(
            sizes.num_layers,
            sizes.hidden_size,
            sizes.head_dim,
            target.teacher.vocab_size,
            None if theta is None else float(theta),
            special,
        )

    def has_layers(self, layers: tuple[int, ...]) -> bool:
        """Whether states enter all of these layers."""
        return all(0 <= layer < self.num_layers for layer in layers)


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

    def part(self, num_seqs: int) -> StatedText:
        """The first sequences alone."""
        pieces = slice(0, num_seqs)
        return StatedText(
            self.teacher,
            self.tokens[pieces],
            self.lengths[pieces],
            self.starts[pieces],
            tuple(states[pieces] for states in self.inputs),
            self.last[pieces],
            self.final[pieces],
            self.best[pieces],
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
    with _recorded_input(_final_norm(teacher.model)) as before_norm:
        states = teacher.states(tokens)
    best = torch.cat([teacher.logits(part).argmax(dim=-1) for part in in_parts(states.final, ROWS_AT_A_TIME)])
    return StatedText(
        teacher,
        tokens,
        torch.tensor([len(seq.tokens) for seq in seqs], device=teacher.device),
        torch.tensor([seq.start for seq in seqs], device=teacher.device),
        states.inputs[: teacher.num_layers],
        before_norm[-1] if before_norm else states.inputs[-1],
        states.final,
        best.view(tokens.shape),
    )


def _final_norm(model: Any) -> nn.Module | None:
    """The last norm outside the layers; None where the model has none that can be seen."""
    norms = [child for name, child in model.base_model.named_children() if "norm" in name or name == "ln_f"]
    return norms[-1] if norms else None


@contextmanager
def _recorded_input(module: nn.Module | None) -> Iterator[list[Tensor]]:
    """What enters a module while the block runs."""
    recorded: list[Tensor] = []
    if module is None:
        yield recorded
        return
    handle = module.register_forward_pre_hook(lambda _, arguments: recorded.append(arguments[0]))
    try:
        yield recorded
    finally:
        handle.remove()
