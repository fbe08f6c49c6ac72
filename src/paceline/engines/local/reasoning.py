"""Reasoning under a constraint: a grammar waits until it is over, and it is closed once it is too long.

Every node of a draft has the mask of its own path, so drafting stays on and the output keeps its distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from paceline.core.sequence import Constraint
from paceline.core.types import ModelInfo, ReasoningSpan

BYTES_A_CHARACTER = 4  # a character may be spread over this many byte tokens


class Phase(Enum):
    """Where a sequence is."""

    BEFORE = "before the reasoning, if there is any"
    REASONING = "inside the reasoning"
    ANSWER = "after it"


@dataclass(frozen=True, slots=True)
class Progress:
    """A sequence after some tokens.

    count   tokens of the reasoning so far
    tokens  since the phase began; of the reasoning only the last, enough to see its closing mark
    """

    phase: Phase
    count: int = 0
    tokens: list[int] = field(default_factory=list)


class ReasoningConstraint(Constraint):
    """Limits the reasoning of one sequence, then applies the constraint of its answer."""

    def __init__(
        self,
        span: ReasoningSpan,
        answer: Constraint | None,
        info: ModelInfo,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._span, self._answer, self._decode = span, answer, decode
        self._vocab_size, self._eos = info.vocab_size, sorted(info.eos_token_ids)
        self._window = BYTES_A_CHARACTER * max(len(span.begin), len(span.end)) + 8
        self._progress = Progress(Phase.REASONING if span.is_open else Phase.BEFORE)

    def allowed(self, path: list[int]) -> Tensor:
        progress = self._after(path)
        if progress.phase is Phase.ANSWER:
            return self._all() if self._answer is None else self._answer.allowed(progress.tokens)
        return self._in_reasoning(progress) if progress.phase is Phase.REASONING else self._before(progress)

    def advance(self, tokens: list[int]) -> None:
        self._progress = self._after(tokens)
        if self._progress.phase is Phase.ANSWER:
            if self._answer is not None:
                self._answer.advance(self._progress.tokens)
            self._progress = Progress(Phase.ANSWER)

    # --- masks --------------------------------------------------------------------------------------------------------

    def _all(self) -> Tensor:
        return torch.ones(self._vocab_size, dtype=torch.bool)

    def _before(self, progress: Progress) -> Tensor:
        """Any start. Where the answer has a constraint: its own tokens, and the next one of the mark."""
        if self._answer is None:
            return self._all()
        tokens, opening = progress.tokens, list(self._span.opening_tokens)
        mask = self._answer.allowed(tokens).clone() if self._begins_answer(tokens) else ~self._all()
        if tokens == opening[: len(tokens)]:
            mask[opening[len(tokens)]] = True
        return mask

    def _begins_answer(self, tokens: list[int]) -> bool:
        """Whether tokens that begin the mark could begin the answer too."""
        answer = self._answer
        return answer is None or all(answer.allowed(tokens[:place])[token] for place, token in enumerate(tokens))

    def _in_reasoning(self, progress: Progress) -> Tensor:
        """Any token, then those that close it. Where the answer has a constraint, the sequence cannot end here."""
        excess = progress.count - (self._span.max_tokens or 0)
        if self._span.max_tokens is not None and excess >= 0:
            mask = torch.zeros(self._vocab_size, dtype=torch.bool)
            mask[self._span.closing_tokens[min(excess, len(self._span.closing_tokens) - 1)]] = True
            return mask
        mask = self._all()
        if self._answer is not None:
            mask[self._eos] = False
        return mask

    # --- where a path leads -------------------------------------------------------------------------------------------

    def _after(self, path: list[int]) -> Progress:
        progress = self._progress
        for index, token in enumerate(path):
            if progress.phase is Phase.ANSWER:
                return Progress(Phase.ANSWER, tokens=progress.tokens + path[index:])
            progress = self._step(progress, token)
        return progress

    def _step(self, progress: Progress, token: int) -> Progress:
        tokens = [*progress.tokens, token]
        if progress.phase is Phase.BEFORE:
            return self._step_before(tokens)
        if self._span.end in self._decode(tokens):
            return Progress(Phase.ANSWER)
        return Progress(Phase.REASONING, progress.count + 1, tokens[-self._window :])

    def _step_before(self, tokens: list[int]) -> Progress:
        opening = list(self._span.opening_tokens)
        if tokens == opening:
            return Progress(Phase.REASONING)
        if self._answer is not None:
            is_mark = tokens == opening[: len(tokens)]
            return Progress(Phase.BEFORE if is_mark else Phase.ANSWER, tokens=tokens)
        text = self._decode(tokens).lstrip()
        if text.startswith(self._span.begin):
            return Progress(Phase.REASONING)
        return Progress(Phase.BEFORE if self._span.begin.startswith(text) else Phase.ANSWER, tokens=tokens)
