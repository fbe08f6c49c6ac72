"""One sequence being generated: its ids, its random numbers, why it ended."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.looped_steps import LoopInput
from paceline.core.rng import SequenceRng
from paceline.core.sampling import SamplingParams, TokenHistory
from paceline.core.stats import SpecStats
from paceline.core.stopping import StopRules
from paceline.core.types import CacheUse, SequenceCache, TokenLogprob
from paceline.core.verify import RULES, AcceptanceRule

_seq_ids = itertools.count()


class Constraint(Protocol):
    """What may follow in one sequence: a grammar, or a least length.

    `allowed` does not change it: the same path gives the same mask.
    """

    def allowed(self, path: list[int]) -> Tensor:
        """bool [vocab]: which tokens may follow the sequence and then `path`."""

    def advance(self, tokens: list[int]) -> None:
        """These tokens are now part of the sequence."""


class ScoreProcessor(Protocol):
    """Rewrites the scores of what may follow in one sequence: any function of the tokens before a node and its logits.

    `process` does not change it; what it must remember of accepted tokens it learns from `advance`.
    """

    def process(self, path: list[int], scores: Tensor) -> Tensor:
        """float32 [vocab], final: a sampled token is drawn from their softmax, a greedy one is their argmax.

        path    the draft tokens after the sequence, up to the node
        scores  float32 [vocab]: the logits of the node
        """

    def advance(self, tokens: list[int]) -> None:
        """These tokens are now part of the sequence."""


class MinNewTokens(Constraint):
    """No end-of-sequence token before so many new tokens. Drafts stay exact: every node has the mask of its depth."""

    def __init__(self, count: int, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._missing = count
        self._all = torch.ones(vocab_size, dtype=torch.bool)
        self._all_but_eos = self._all.clone()
        self._all_but_eos[sorted(eos_token_ids)] = False

    def allowed(self, path: list[int]) -> Tensor:
        return self._all_but_eos if len(path) < self._missing else self._all

    def advance(self, tokens: list[int]) -> None:
        self._missing -= len(tokens)


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """How one sequence is generated. Decided once, before it starts.

    rule              how its draft tokens are verified
    method            which drafter drafts for it, where there is a choice
    num_draft_tokens  its own number of draft tokens a step; None: the draft-length policy decides
    logprobs          alternatives to report for each token; None: no log-probabilities
    prompt_logprobs   the same for each prompt token, which is then read without the prefix cache
    """

    sampling: SamplingParams
    stopping: StopRules
    rule: AcceptanceRule = RULES["token"]
    constraint: Constraint | None = None
    processor: ScoreProcessor | None = None  # in place of sampling's own shaping of the logits
    method: str | None = None
    num_draft_tokens: int | None = None
    prediction: list[int] | None = None
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()  # the alternatives to report; empty: the likeliest
    lora: str | None = None  # which adapter of the target
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    @property
    def reads_paths(self) -> bool:
        """Whether what may follow a node depends on the tokens before it, beyond the logits and penalties."""
        return self.constraint is not None or self.processor is not None


class Sequence:
    """What was given, what was generated, and everything that belongs to one sequence alone.

    Between steps the target's sequence cache holds every token of `ids` but the last.
    """

    def __init__(self, prompt: list[int], params: SequenceParams) -> None:
        self.seq_id = next(_seq_ids)  # state kept elsewhere is keyed by this
        self.params = params
        self.ids = list(prompt)
        self.prompt_length = len(prompt)
        self.rng = SequenceRng(params.sampling.seed)
        self.seq_cache: SequenceCache | None = None
        self.cache_use = CacheUse()
        self.keep_cache = False  # once it has ended: its cache is kept, and another sequence may go on from there
        self.finish_reason: str | None = None
        self.from_draft: list[bool] = []  # for each generated token: whether it is an accepted draft token
        self.token_logprobs: list[TokenLogprob] = []
        self.stats = SpecStats()

    # --- its state ----------------------------------------------------------------------------------------------------

    @property
    def sampling(self) -> SamplingParams:
        return self.params.sampling

    @property
    def generated(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def num_new_tokens(self) -> int:
        return len(self.ids) - self.prompt_length

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of its prompt that the prefix cache held."""
        return self.cache_use.found

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token or stop string that ended it; None where it has not ended so, and for an end token."""
        return self.params.stopping.stop_reason(self.generated) if self.finish_reason == "stop" else None

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be generated."""
        return self.params.stopping.max_new_tokens - self.num_new_tokens

    @cached_property
    def is_greedy_argmax(self) -> bool:
        """Whether the argmax of the raw logits is all that decides, and nothing but the token is reported."""
        params = self.params
        return params.sampling.plain_greedy and not params.reads_paths and params.logprobs is None

    def history(self, path: list[int]) -> TokenHistory:
        """The tokens before the node at the end of `path`."""
        return TokenHistory(self.ids[: self.prompt_length], self.generated + path)

    # --- random numbers -----------------------------------------------------------------------------------------------

    def verify_uniforms(self, count: int) -> Tensor:
        """The numbers the acceptance rule draws with. float64 [count]"""
        return self.rng.at_positions(self.num_new_tokens, count) if self.params.rule.seeded else self.rng.next(count)

    def draft_uniforms(self, depth: int, count: int = 1) -> Tensor:
        """Numbers to draw draft tokens with, from `depth` draft tokens on. float64 [count]

        Under a seeded rule they are the numbers the target will draw with, and key the same noise for every token: the
        closer the two distributions, the more often the two draws agree.
        """
        if self.params.rule.seeded:
            return self.rng.at_positions(self.num_new_tokens + depth, count)
        return self.rng.next(count)

    # --- written by its owner, the engine -----------------------------------------------------------------------------

    def start(self, seq_cache: SequenceCache, num_kept_tokens: int = 0) -> None:
        """The target's cache of this sequence; what it already holds came from the prefix cache.

        num_kept_tokens: how much of the prompt the prefix cache holds once the sequence has ended.
        """
        self.seq_cache = seq_cache
        self.cache_use = CacheUse(seq_cache.length, max(0, num_kept_tokens - seq_cache.length))

    def release_cache(self) -> SequenceCache | None:
        """Take the cache away from the sequence."""
        seq_cache, self.seq_cache = self.seq_cache, None
        return seq_cache

    def extend(self, tokens: list[int], accepted: int) -> list[int]:
        """Append a run, the first `accepted` of them draft tokens; returns what of it belongs to the sequence."""
        before = len(self.ids)
        self.ids += tokens
        stop = self.params.stopping.check(self.ids, len(tokens), self.prompt_length)
        if stop is not None:
            self.finish_reason = stop.reason
            del self.ids[self.prompt_length + stop.kept :]
        emitted = self.ids[before:]
        self.from_draft += [index < accepted for index in range(len(emitted))]
        if self.params.constraint is not None:
            self.params.constraint.advance(emitted)
        if self.params.processor is not None:
            self.params.processor.advance(emitted)
        return emitted


def group_by_sampling(seqs: list[Sequence]) -> list[list[int]]:
    """Indices of sequences whose tokens are drawn the same way from logits alone: those are batched.

    A sequence with penalties, biases or a grammar is a group of its own.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, seq in enumerate(seqs):
        sampling = seq.sampling
        keyed = seq.params.rule.seeded
        key: tuple[object, ...] = (keyed, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        if sampling.penalised or sampling.logit_bias or seq.params.reads_paths:
            key = (*key, index)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def loop_input(seq: Sequence, num_draft_tokens: int = 0, draft_cache: SequenceCache | None = None) -> LoopInput:
    """The sequence for several steps in a row. draft_cache: of a draft model."""
    assert seq.seq_cache is not None, "its prompt has been read"
    room = seq.remaining_tokens
    return LoopInput(seq.seq_cache, seq.ids, lambda: seq.finished, num_draft_tokens, draft_cache, most_tokens=room)
