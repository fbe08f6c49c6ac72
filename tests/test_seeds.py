"""The same seed gives the same text: with every method, any number of draft tokens, alone and in a batch.

Passes of other widths and batches round otherwise. The rounding of a large model is imitated on a tiny one: every pass
adds its own random error to the logits. A text may differ only where a draw is closer than that, so the tests state how
many of their texts may be expected to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.drafting.registry import per_request_names
from tests.support.tiny import byte_tokenizer, tiny_llama

VOCAB_SIZE = 49152  # a cumulative sum over so many tokens turns a draw in 50 by the error below; keyed noise none
ROUNDING = 3e-6  # of a logit, as between a float32 pass of one row and one of eight on the default model
PROMPT = "to be or not to be, to be"
NEW_TOKENS = 8
SEEDS = 96  # of 768 tokens a cumulative sum turns 15; that it turns none has a probability of 2e-7
METHODS: dict[str, dict[str, Any]] = {
    **{f"{name}-{k}": {"method": name, "num_draft_tokens": k} for name in ("ngram", "suffix") for k in (1, 5)},
    "lookahead": {"method": "lookahead", "num_draft_tokens": 6},
    "auto": {"method": "auto"},
    "adaptive": {"method": "ngram"},
    "draft_model-2": {"num_draft_tokens": 2},
    "draft_model-6": {"num_draft_tokens": 6},
}

Texts = list[list[int]]


def rounded(model: Any) -> Any:
    """The model with another rounding error in each row of its passes, alike for tokens that are neighbours."""
    noise, slope = torch.Generator().manual_seed(5), torch.linspace(-1, 1, VOCAB_SIZE)

    def add_noise(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits + ROUNDING * torch.randn((*logits.shape[:-1], 1), generator=noise) * slope

    model.lm_head.register_forward_hook(add_noise)
    return model


def texts(batch_size: int, seeds: int, *, top_p: float = 1.0, **options: Any) -> Texts:
    """What every seed gives, so many sequences at a time; in a list, sequence i has seed + i."""
    outputs: Texts = []
    with SpeculativeDecoder(tokenizer=byte_tokenizer(), **options) as decoder:
        for seed in range(0, seeds, batch_size):
            results = decoder.generate(
                [PROMPT] * min(batch_size, seeds - seed),
                seed=seed,
                temperature=1.0,
                top_p=top_p,
                max_new_tokens=NEW_TOKENS,
                ignore_eos=True,
            )
            outputs += [result.token_ids for result in results]
    return outputs


def differences(first: Texts, second: Texts) -> int:
    assert len(first) == len(second)
    return sum(one != other for one, other in zip(first, second))


@pytest.fixture(scope="module")
def model() -> Any:
    return rounded(tiny_llama(vocab_size=VOCAB_SIZE))


@pytest.fixture(scope="module")
def plain(model: Any) -> Iterator[Callable[[int], Texts]]:
    """The texts of plain decoding, one at a time; generated once."""
    made = texts(1, SEEDS, model=model, method="none")
    yield lambda count: made[:count]


def options_of(name: str, model: Any) -> dict[str, Any]:
    """A draft model drafts with another rounding, or it would be the target itself."""
    drafts = {} if "method" in METHODS[name] else {"draft_model": rounded(tiny_llama(vocab_size=VOCAB_SIZE))}
    return {"model": model, **METHODS[name], **drafts}


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "seeds"), [(8, SEEDS), (1, 16)])
@pytest.mark.parametrize("name", METHODS)
def test_a_seed_gives_the_same_text_with_every_method_and_in_every_batch(
    name: str, batch_size: int, seeds: int, model: Any, plain: Callable[[int], Texts]
) -> None:
    """Zero of 768 tokens differ. A draw of two races flips with a probability below 4 · ROUNDING, so the probability
    that correct code fails one of these cases, were its seeds others, is below 1%."""
    assert differences(texts(batch_size, seeds, **options_of(name, model)), plain(seeds)) == 0


@pytest.mark.slow
def test_a_batch_of_plain_sequences_gives_what_each_gives_alone(model: Any, plain: Callable[[int], Texts]) -> None:
    for batch_size in (5, 16):
        assert differences(texts(batch_size, SEEDS, model=model, method="none"), plain(SEEDS)) == 0


@pytest.mark.slow
def test_the_texts_are_the_same_with_top_p(model: Any) -> None:
    """At the edge of the cut rounding decides whether a token is in; in one of these texts it is the token drawn."""
    cut = {"model": model, "top_p": 0.9}
    alone, together = (texts(size, 48, method=method, **cut) for size, method in ((1, "none"), (8, "ngram")))
    assert differences(alone, together) <= 1


@pytest.mark.slow
def test_other_seeds_give_other_texts(plain: Callable[[int], Texts]) -> None:
    assert len({tuple(text) for text in plain(SEEDS)}) == SEEDS


def test_every_method_that_needs_no_weights_is_among_them() -> None:
    named = {options.get("method", "draft_model") for options in METHODS.values()}
    assert set(per_request_names()) - {"none", "prediction"} <= named


@pytest.mark.slow
def test_the_default_model_gives_the_same_texts(default_decoder: Callable[..., Any]) -> None:
    """8 texts of 8 tokens over 49,152 tokens, with the rounding of real passes."""

    def generated(method: str, batch_size: int) -> Texts:
        settings = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        with default_decoder(method=method, num_draft_tokens=6) as decoder:
            batches = [decoder.generate([PROMPT] * batch_size, seed=at, **settings) for at in range(0, 8, batch_size)]
        return [result.token_ids for results in batches for result in results]

    alone = generated("none", 1)
    assert differences(alone, generated("none", 8)) == differences(alone, generated("lookahead", 4)) == 0
