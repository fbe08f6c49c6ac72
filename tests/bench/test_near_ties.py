"""Differences of greedy outputs: the rounding of a pass, or a bug."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.bench.near_ties import Agreement, compare, rounding, summary
from paceline.core.types import ModelOutput, Row
from paceline.runners.table import TableRunner
from tests.support.bench_toys import CONTEXT


def test_greedy_differences_are_classified() -> None:
    target = TableRunner(vocab_size=5, seed=3)
    plain = [0, 3, 1]
    same = compare(target, CONTEXT, plain, plain)
    assert same.agreement is Agreement.SAME
    cut = compare(target, CONTEXT, plain, plain[:2])
    assert (cut.agreement, cut.index) == (Agreement.BUG, 2)
    other = compare(target, CONTEXT, [0], [1])
    assert other.agreement is Agreement.BUG
    assert "logit gap" in str(other)
    assert summary([same, other]) == f"1 of 2 outputs equal; {other}"
    assert rounding(target, CONTEXT) == 0.0


def test_two_tokens_within_the_rounding_are_a_near_tie() -> None:
    target = TableRunner(vocab_size=5, seed=3)
    target.table[:, 1] = target.table[:, 0] + 1e-6
    comparison = compare(target, CONTEXT, [0], [1])
    assert comparison.agreement is Agreement.NEAR_TIE
    assert summary([comparison]) == "0 of 1 outputs equal, 1 differ at a near-tie"


class OtherPrefillRounding(TableRunner):
    """Bit-equal at every width, but a prompt goes through kernels that round in another way."""

    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        output = super().forward(rows, last_only=last_only)
        return replace(output, logits=output.logits + 0.02 * torch.eye(5)[0]) if last_only else output


@pytest.mark.parametrize(("gap", "agreement"), [(0.05, Agreement.NEAR_TIE), (0.2, Agreement.BUG)])
def test_rounding_counts_the_kernels_of_prefill(gap: float, agreement: Agreement) -> None:
    """Else a bfloat16 model on a GPU, equal to itself bit for bit, would have to equal transformers to 1e-4."""
    target = OtherPrefillRounding(vocab_size=5, seed=3)
    target.table[:, 1] = target.table[:, 0] - gap
    assert rounding(target, CONTEXT) == pytest.approx(0.02, rel=1e-3)
    assert compare(target, CONTEXT, [0], [1]).agreement is agreement
