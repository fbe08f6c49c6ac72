"""Greedy, float32, the default model: token for token what transformers generates, alone and in a batch.

The whole set of prompts is `python benchmarks/equality.py`; this is a part of it that fits into a test run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.equality import Difference, compared, rounded_copy
from paceline import SpeculativeDecoder
from paceline.layers import cpu_kernels
from paceline.quantization.int4 import has_int4_kernel

NEW_TOKENS = 24
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
def expected(default_model: Any, prompts: list[list[int]]) -> list[list[int]]:
    outputs = []
    for prompt in prompts:
        whole = default_model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        outputs.append(whole[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture(scope="module")
def draft(default_model: Any) -> Any:
    return rounded_copy(default_model, bits=4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_the_output_is_transformers_own(
    method: str,
    default_decoder: Callable[..., Any],
    default_model: Any,
    prompts: list[list[int]],
    expected: list[list[int]],
    draft: Any,
) -> None:
    draft_model = draft if method == "draft_model" else None
    differences: list[Difference] = []
    with default_decoder(method=method, draft_model=draft_model, num_draft_tokens=4) as decoder:
        for batch in (prompts, prompts[-1:]):
            for prompt, result in zip(batch, decoder.generate(batch, max_new_tokens=NEW_TOKENS)):
                tokens = expected[prompts.index(prompt)]
                differences += compared(default_model, prompt, tokens, result.token_ids)
    assert all(difference.near_tie for difference in differences), differences
    assert len(differences) <= 1, "near-ties are rare in float32"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integer_weights_write_the_same_text_with_and_without_speculation(
    dtype: str, default_folder: Path, prompts: list[list[int]]
) -> None:
    """Bit for bit the same numbers at every width of a pass, so no near-tie is allowed."""
    if dtype == "int4" and not (has_int4_kernel() or cpu_kernels.library()):
        pytest.skip("no int4 kernel on this machine")
    texts = []
    for method in ("none", "ngram", "suffix"):
        with SpeculativeDecoder(str(default_folder), dtype=dtype, method=method, num_draft_tokens=5) as decoder:
            alone = [decoder.generate(prompt, max_new_tokens=NEW_TOKENS).token_ids for prompt in prompts]
            batched = [result.token_ids for result in decoder.generate(prompts, max_new_tokens=NEW_TOKENS)]
            texts += [alone, batched]
    assert all(text == texts[0] for text in texts)
