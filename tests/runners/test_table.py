"""The toy itself: a test that leans on it must know that it is right."""

from __future__ import annotations

import pytest
import torch

from paceline.core.sampling import SamplingParams, distribution
from paceline.core.types import Row
from paceline.errors import OptionError
from paceline.runners.table import TableRunner


def test_the_enumerated_law_is_the_product_of_its_rows() -> None:
    toy = TableRunner(vocab_size=3, order=2, seed=1)
    law = toy.exact([0, 1], 2, SamplingParams(1.0))
    assert sum(law.values()) == pytest.approx(1.0)
    seq_cache = toy.new_cache()
    logits = toy.forward([Row.chain(seq_cache, [0, 1, 2])]).logits
    rows = distribution(logits, SamplingParams(1.0))
    assert law[2, 1] == pytest.approx(float(rows[1, 2] * rows[2, 1]))


def test_blur_makes_another_model_and_none_the_same() -> None:
    one, same, other = TableRunner(seed=4), TableRunner(seed=4), TableRunner(seed=4, blur=0.5)
    assert torch.equal(one.table, same.table)
    assert not torch.allclose(one.table, other.table)


@pytest.mark.parametrize("sizes", [{"vocab_size": 1}, {"order": 0}, {"blur": 1.5}])
def test_impossible_tables_are_refused(sizes: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        TableRunner(**sizes)  # type: ignore[arg-type]
