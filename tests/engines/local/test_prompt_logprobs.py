"""Log-probabilities of prompts, against the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.core.types import TokenLogprob
from paceline.engines.local import prompt_logprobs, scheduler
from tests.support.tiny import byte_tokenizer, tiny_llama

PROMPTS = ["to be or not to be", "abcabcabc", "x", "to be or not to see " * 5]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module", params=["none", "ngram"])
def decoder(request: pytest.FixtureRequest, model: Any) -> Iterator[SpeculativeDecoder]:
    options = {"method": request.param, "tokenizer": byte_tokenizer(), "max_num_seqs": 4}
    with SpeculativeDecoder(model, **options) as decoder:
        yield decoder


def by_the_model(model: Any, ids: list[int]) -> torch.Tensor:
    """float32 [tokens - 1, vocab]: the log-probabilities after every token but the last."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].float(), dim=-1)


def check(entries: list[TokenLogprob], model: Any, ids: list[int], top: int) -> None:
    scores = by_the_model(model, ids) if len(ids) > 1 else torch.empty(0, 1)
    assert [entry.token for entry in entries] == ids[1:]
    for entry, row in zip(entries, scores):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        assert entry.rank == int((row > row[entry.token]).sum()) + 1
        assert [value for _, value in entry.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)


def test_every_prompt_token_but_the_first_is_scored(decoder: SpeculativeDecoder, model: Any) -> None:
    for prompt, result in zip(PROMPTS, decoder.generate(PROMPTS, max_new_tokens=3, prompt_logprobs=2)):
        check(result.prompt_logprobs or [], model, decoder.tokenizer.encode(prompt), 2)


def test_a_prompt_that_the_prefix_cache_holds_is_scored_all_the_same(
    decoder: SpeculativeDecoder, model: Any
) -> None:
    first = decoder.generate(PROMPTS[3], max_new_tokens=4)
    again = decoder.generate(PROMPTS[3], max_new_tokens=4, prompt_logprobs=0)
    check(again.prompt_logprobs or [], model, decoder.tokenizer.encode(PROMPTS[3]), 0)
    assert again.token_ids == first.token_ids and first.prompt_logprobs is None


@pytest.mark.slow
def test_a_long_prompt_is_scored_in_parts(
    decoder: SpeculativeDecoder, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MAX_LOGPROB_ROWS", 32)
    monkeypatch.setattr(prompt_logprobs, "ROWS_AT_ONCE", 7)
    for prompt, result in zip(PROMPTS, decoder.generate(PROMPTS, max_new_tokens=3, prompt_logprobs=1)):
        check(result.prompt_logprobs or [], model, decoder.tokenizer.encode(prompt), 1)
