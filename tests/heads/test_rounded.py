"""A head whose products are rounded to 8 bits: nearly the same head, and the same output of the target."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline import SpeculativeDecoder
from paceline.heads.rounded import RoundedLinear, round_linears
from paceline.layers.cpu_kernels import library

needs_kernels = pytest.mark.skipif(library() is None, reason="this machine has no compiled CPU kernels")


@needs_kernels
def test_products_are_close_and_sizes_that_do_not_fit_stay() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 40), nn.ModuleDict({"odd": nn.Linear(40, 8), "even": nn.Linear(32, 8)}))
    x, before = torch.randn(3, 64), module[0]
    round_linears(module)
    assert isinstance(module[0], RoundedLinear) and isinstance(module[1]["even"], RoundedLinear)
    assert isinstance(module[1]["odd"], nn.Linear), "40 columns do not fill groups of 32"
    with torch.no_grad():
        assert torch.allclose(module[0](x), before(x), atol=0.03)


@needs_kernels
@pytest.mark.model
@pytest.mark.slow
def test_rounding_the_shipped_head_costs_no_acceptance_to_speak_of() -> None:
    prompt = [{"role": "user", "content": "Write a Python function that merges two sorted lists."}]
    outputs, rates = [], []
    for draft_dtype in ("fp32", "int8"):
        options = {"dtype": "int8", "method": "eagle", "num_draft_tokens": 3, "draft_dtype": draft_dtype}
        with SpeculativeDecoder("default", **options) as decoder:
            result = decoder.generate(prompt, max_new_tokens=96, ignore_eos=True)
        outputs.append(result.token_ids)
        rates.append(result.stats.tokens_per_step)
    assert outputs[0] == outputs[1], "what a head rounds never shows in the output"
    assert rates[1] > 0.85 * rates[0]
