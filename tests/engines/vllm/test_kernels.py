"""The kernels that stand in for vLLM's on a CPU."""

from __future__ import annotations

import pytest
import torch

from paceline.engines.vllm.kernels import expand, for_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_value_is_repeated_for_its_draft_tokens_in_the_outputs_own_memory(dtype: torch.dtype) -> None:
    values = torch.tensor([7, -1, 3], dtype=dtype)
    output = torch.full((5,), 99, dtype=dtype)
    expand(output, values, torch.tensor([2, 3, 5], dtype=torch.int32), -1, 1, MAX_NUM_TOKENS=128)
    assert output.tolist() == [7, 7, 1, 3, 3]


def test_fractions_stay_fractions_and_sequences_without_draft_tokens_have_no_place() -> None:
    output = torch.zeros(3)
    expand(output, torch.tensor([0.25, 0.5, 0.95]), torch.tensor([0, 1, 3]), 0, 0)
    assert output.tolist() == pytest.approx([0.5, 0.95, 0.95])


def test_logits_without_rows_are_left_alone() -> None:
    largest = for_rows(lambda logits, k: logits - k.max())
    assert largest(torch.empty(0, 5), torch.empty(0)).shape == (0, 5)
    assert largest(torch.ones(1, 2), torch.ones(1)).tolist() == [[0.0, 0.0]]
