"""Suffix lookup and the draft-length policy inside vLLM: a class that vLLM loads into its worker (method auto).

vLLM calls `propose` after every pass with the tokens of all sequences, by their row of the batch and without their
names. A sequence is therefore recognised by its tokens. Draft tokens are verified as chosen, not drawn, so nothing
here can change an output; the policy returns none of them where drafting does not pay.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.cost_model import CostModel, StepTiming
from paceline.core.draft_length import AdaptiveDraftLength, DraftLengthPolicy, FixedDraftLength
from paceline.core.draft_tree import DraftTree, chain
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence, SequenceParams
from paceline.core.stopping import StopRules
from paceline.core.types import RowOutput, StepResult, VerifyResult
from paceline.drafting.chain_drafter import ChainDrafter
from paceline.drafting.suffix import Suffix
from paceline.engines.vllm.arguments import ADDITIONAL

Tokens = NDArray[np.int32]
NO_OUTPUT = RowOutput(torch.empty(0, 0))  # vLLM shows no logits


@dataclass(slots=True, eq=False)
class _Row:
    """One sequence of the batch, and the draft tokens that the pass under way verifies for it."""

    seq: Sequence
    draft: DraftTree


@dataclass(frozen=True, slots=True)
class _RowResult:
    """What became of the draft tokens of a sequence."""

    row: _Row
    step: StepResult


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the pass under way verifies, and when it began."""

    rows: list[_Row]
    began: float
    draft_seconds: float


class Proposer:
    """Drafts for all sequences of a vLLM engine."""

    def __init__(self, vllm_config: Any) -> None:
        settings = vllm_config.additional_config[ADDITIONAL]
        k = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._drafter = ChainDrafter(Suffix(**settings["options"]))
        self._policy: DraftLengthPolicy = (
            AdaptiveDraftLength(CostModel(), k) if settings["adaptive"] else FixedDraftLength(k)
        )
        self._pass = _Pass([], 0.0, 0.0)

    def load_model(self, *args: Any, **options: Any) -> None:
        """vLLM asks every proposer; this one has no weights."""

    def dummy_run(self, *args: Any, **options: Any) -> None:
        """vLLM asks every proposer while it measures its memory; this one takes none."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: Tokens,
        **options: Any,
    ) -> list[list[int]]:
        """At most num_speculative_tokens for each row; none for a row whose prompt is still being read."""
        seconds = time.perf_counter() - self._pass.began
        left = list(self._pass.rows)
        rows: dict[int, _Row] = {}
        results: list[_RowResult] = []
        for index, sampled in enumerate(sampled_token_ids):
            if sampled:
                tokens = token_ids_cpu[index, : int(num_tokens_no_spec[index])]
                rows[index] = self._row(left, tokens, sampled, results)
        self._forget(left)
        self._learn(results, seconds, complete=len(results) == len(rows) == len(self._pass.rows))
        return self._drafts(rows, len(sampled_token_ids))

    # --- sequences ----------------------------------------------------------------------------------------------------

    def _row(self, left: list[_Row], tokens: Tokens, sampled: list[int], results: list[_RowResult]) -> _Row:
        """The sequence with these tokens: one `left` of the last pass, which then has a result, or a new one."""
        row = _matching(left, tokens, len(sampled))
        if row is None:
            row = self._new_row(tokens, len(sampled))
        else:
            left.remove(row)
            results.append(_RowResult(row, _result(row, sampled)))
        row.seq.ids += [int(token) for token in tokens[len(row.seq.ids) :]]
        return row

    def _new_row(self, tokens: Tokens, num_sampled: int) -> _Row:
        prompt = [int(token) for token in tokens[: len(tokens) - num_sampled]]
        room = max(1, self._max_model_len - len(prompt))
        seq = Sequence(prompt, SequenceParams(SamplingParams(), StopRules(room)))
        self._drafter.begin(seq, None)
        return _Row(seq, chain([]))

    def _forget(self, rows: list[_Row]) -> None:
        for row in rows:
            self._drafter.end(row.seq)
            self._policy.forget(row.seq)

    # --- learning and drafting ----------------------------------------------------------------------------------------

    def _learn(self, results: list[_RowResult], seconds: float, *, complete: bool) -> None:
        """complete: the pass had these sequences and no prompt, so that its time is what such a step costs."""
        if not results:
            return
        seqs, sizes = [result.row.seq for result in results], [len(result.row.draft) for result in results]
        timing = StepTiming(
            self._pass.draft_seconds,
            seconds,
            len(results) + sum(sizes),
            max(sizes),
            len(results),
            sum(size > 0 for size in sizes),
            clean=complete,
        )
        steps = [result.step for result in results]
        self._drafter.observe(seqs, steps)
        self._policy.observe(seqs, steps, timing)

    def _drafts(self, rows: dict[int, _Row], size: int) -> list[list[int]]:
        began = time.perf_counter()
        seqs = [row.seq for row in rows.values()]
        drafts: list[list[int]] = [[] for _ in range(size)]
        trees = self._drafter.propose(seqs, self._policy.plan(seqs)) if seqs else []
        for (index, row), tree in zip(rows.items(), trees):
            row.draft, drafts[index] = tree, tree.tokens.tolist()
        ended = time.perf_counter()
        self._pass = _Pass(list(rows.values()), ended, ended - began)
        return drafts


def _matching(rows: list[_Row], tokens: Tokens, num_sampled: int) -> _Row | None:
    """The row that these tokens continue by as many as were sampled."""
    length = len(tokens) - num_sampled
    for row in rows:
        ids = row.seq.ids
        if len(ids) == length and ids[-1] == tokens[length - 1] and np.array_equal(tokens[:length], ids):
            return row
    return None


def _result(row: _Row, sampled: list[int]) -> StepResult:
    """What became of a draft: all sampled tokens but the last are accepted draft tokens."""
    accepted = min(len(sampled) - 1, len(row.draft))
    verified = VerifyResult(list(range(accepted)), sampled[-1], sampled[:accepted])
    return StepResult(row.draft, verified, NO_OUTPUT, list(sampled), accepted)
