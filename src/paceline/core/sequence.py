"""One sequence in progress: its ids, its own generator, why it ended."""

from __future__ import annotations

import itertools
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.rng import position_uniform
from paceline.core.sampling import History, SamplingParams
from paceline.core.stats import SpecStats
from paceline.core.stopping import StopRules
from paceline.core.types import SequenceCache, TokenLogprob

_numbers = itertools.count()


class Constraint(Protocol):
    """A grammar over one sequence. It never changes what it is asked about: the same path gives the same mask."""

    def allowed(self, path: list[int]) -> Tensor:
        """bool [vocab]: which tokens may follow the sequence and then `path`."""

    def advance(self, tokens: list[int]) -> None:
        """These tokens are now part of the sequence."""


class Sequence:
    """One sequence: what was given, what was written, and everything that belongs to it alone.

    Between steps the target's sequence cache holds every token of `ids` but the last (the invariant of decode/step.py).
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        stopping: StopRules,
        *,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
    ) -> None:
        self.seq_id = next(_numbers)  # state kept elsewhere is keyed by this
        self.ids = list(prompt)
        self.prompt_length = len(prompt)
        self.sampling = sampling
        self.stopping = stopping
        self.constraint = constraint
        self.logprobs = logprobs
        # Without a seed of its own a sequence draws one from torch's generator, so that torch.manual_seed still decides.
        self.seed = sampling.seed if sampling.seed is not None else int(torch.randint(2**63 - 1, ()))
        self.rng = torch.Generator().manual_seed(self.seed & (2**63 - 1))
        self.seq_cache: SequenceCache | None = None
        self.num_cached_tokens = 0  # tokens of its beginning that were in the cache before it came
        self.keep_cache = False  # once it is over: its cache is kept, and another sequence may go on from there
        self.finish_reason: str | None = None
        self.from_draft: list[bool] = []  # of each written token: was it a draft token that stood?
        self.token_logprobs: list[TokenLogprob] = []
        self.stats = SpecStats()
        self.acceptance: str | None = None  # a rule of its own; None: the judge's
        self.method: str | None = None  # which drafter writes this sequence, where there is a choice
        self.prediction: list[int] | None = None
        self.num_draft_tokens: int | None = None  # a draft length of its own

    @property
    def written(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def new_tokens(self) -> int:
        return len(self.ids) - self.prompt_length

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def room(self) -> int:
        """Tokens that may still be written."""
        return self.stopping.max_new_tokens - self.new_tokens

    def history(self, path: list[int]) -> History:
        """What stands before the node at the end of `path`."""
        return History(self.ids[: self.prompt_length], self.written + path)

    def seeded_uniforms(self, depth: int, count: int) -> Tensor:
        """Numbers of seed and position, from `depth` tokens on: the coupled rule draws with them. float64 [count]"""
        first = self.new_tokens + depth
        return torch.tensor([position_uniform(self.seed, first + step) for step in range(count)], dtype=torch.float64)

    def draft_uniforms(self, depth: int, count: int = 1) -> Tensor:
        """Numbers to draw draft tokens with, `depth` draft tokens on from here: float64 [count].

        Where the target will draw from numbers known beforehand, the draft tokens are drawn from the very same: the nearer
        the two distributions, the oftener the two draws agree.
        """
        if self.acceptance == "coupled":
            return self.seeded_uniforms(depth, count)
        return torch.rand(count, generator=self.rng, dtype=torch.float64)

    def extend(self, tokens: list[int], accepted: int) -> list[int]:
        """Append a run, the first `accepted` of them draft tokens; returns what of it really belongs to the sequence."""
        before = self.new_tokens
        self.ids += tokens
        stop = self.stopping.check(self.written, len(tokens))
        if stop is not None:
            self.finish_reason = stop.reason
            del self.ids[self.prompt_length + stop.kept :]
        emitted = self.written[before:]
        self.from_draft += [index < accepted for index in range(len(emitted))]
        if self.constraint is not None:
            self.constraint.advance(emitted)
        return emitted


def alike(seqs: list[Sequence]) -> list[list[int]]:
    """Places of sequences whose distributions are made the same way from logits alone: those are worked on together.

    A sequence with penalties, biases or a grammar has a way of its own.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, seq in enumerate(seqs):
        sampling = seq.sampling
        key: tuple[object, ...] = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        if sampling.penalised or sampling.logit_bias or seq.constraint is not None:
            key = (*key, index)
        groups.setdefault(key, []).append(index)
    return list(groups.values())
