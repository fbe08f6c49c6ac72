"""Batches of token ids in the kinds users have them in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.token_arrays import append_generated, as_token_array, prompts_of
from paceline.errors import PromptError


@pytest.mark.parametrize(
    "ids", [[1, 2], (1, 2), torch.tensor([1, 2]), np.array([1, 2])], ids=lambda x: type(x).__name__
)
def test_one_row_comes_back_as_one_row_of_the_same_kind(ids: Any) -> None:
    array = as_token_array(ids)
    assert array.ids.tolist() == [[1, 2]]
    row = array.like_input(torch.tensor([[1, 2, 3]]))
    assert isinstance(row, np.ndarray if isinstance(ids, np.ndarray) else torch.Tensor)
    assert row.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [[], [[]], [[[1]]], [1.5], [True], "abc", None, [[1, 2], [3]], torch.zeros(2, 0, dtype=torch.int64)],
    ids=str,
)
def test_what_is_no_batch_of_prompts_is_a_prompt_error(wrong: Any) -> None:
    with pytest.raises(PromptError, match="input_ids"):
        as_token_array(wrong)


def test_a_mask_takes_the_padding_out() -> None:
    ids = torch.tensor([[9, 1, 2], [3, 4, 5]])
    assert prompts_of(ids, [[0, 1, 1], [1, 1, 1]]) == [[1, 2], [3, 4, 5]]
    with pytest.raises(PromptError, match="attention_mask"):
        prompts_of(ids, [1, 1])
    with pytest.raises(PromptError, match="empty"):
        prompts_of(ids, [[0, 0, 0], [1, 1, 1]])


def test_shorter_continuations_are_padded_on_the_right() -> None:
    assert append_generated(torch.tensor([[1], [2]]), [[5, 6], [7]], pad=0).tolist() == [[1, 5, 6], [2, 7, 0]]
