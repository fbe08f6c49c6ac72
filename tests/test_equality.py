"""Greedy, float32, the default model: token for token what transformers writes, alone and in a batch.

The whole set of prompts is `python benchmarks/equality.py`; this is a part of it that fits into a test run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.equality import Difference, compared, rounded_copy

NEW_TOKENS = 32
PROMPTS = (
    "Complete this Python function:\ndef total(prices, tax):\n    ",
    "A train leaves at 9:40 and arrives at 12:15. How long does it take?",
    "Summarize: Speculative decoding drafts several tokens with a small model and checks them with a large one. "
    "Tokens that the large model would have written itself are kept. Speculative decoding changes no text.",
)


@pytest.fixture(scope="module")
def prompts(default_tokenizer: Any) -> list[list[int]]:
    return [
        default_tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def theirs(default_model: Any, prompts: list[list[int]]) -> list[list[int]]:
    output = []
    for prompt in prompts:
        whole = default_model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        output.append(whole[0, len(prompt) :].tolist())
    return output


@pytest.fixture(scope="module")
def draft(default_model: Any) -> Any:
    return rounded_copy(default_model, bits=4)


@pytest.mark.parametrize("method", ["none", "ngram", "draft"])
def test_the_text_is_transformers_own(
    method: str,
    default_decoder: Callable[..., Any],
    default_model: Any,
    prompts: list[list[int]],
    theirs: list[list[int]],
    draft: Any,
) -> None:
    options = {"draft": draft, "num_draft_tokens": 4} if method == "draft" else {"draft": method, "num_draft_tokens": 4}
    decoder = default_decoder(**({} if method == "none" else options))
    found: list[Difference] = []
    for batch in (prompts, prompts[-1:]):
        results = decoder.generate(batch, max_new_tokens=NEW_TOKENS)
        for prompt, result in zip(batch, results):
            found += compared(default_model, prompt, theirs[prompts.index(prompt)], result.token_ids)
    assert not [difference for difference in found if not difference.near_tie], found
    assert len(found) <= 1, "near-ties are rare in float32"
