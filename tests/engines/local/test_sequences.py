"""Requests become sequences, or a typed error before any work is done."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import EngineConfig
from paceline.core.request_fields import text_list
from paceline.core.sampling import SamplingParams
from paceline.core.types import ModelInfo, Request
from paceline.engines.local.sequences import SequenceBuilder
from paceline.errors import ContextLengthExceeded, OptionError, PromptError
from tests.support.build import toy_engine
from tests.support.toy import letter_tokenizer

INFO = ModelInfo("toy", 6, frozenset({5}), 64, 4, 6, "cpu", "float32")


def builder(methods: tuple[str, ...] = ("ngram", "none"), capacity: int = 1000, **options: Any) -> SequenceBuilder:
    config = EngineConfig.create("toy", **{"method": methods[0], "num_draft_tokens": 3, **options})
    return SequenceBuilder(INFO, letter_tokenizer(), config, methods, capacity)


def request(**settings: Any) -> Request:
    return Request(**{"prompt": [0, 1, 2], "sampling": SamplingParams(), "max_new_tokens": 8, **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ("ok", 3)}, "stop"),
        ({"logprobs": -1}, "logprobs must be 0 to 6"),
        ({"logprobs": 10**6}, "logprobs must be 0 to 6"),
        ({"logprobs": 1.5}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"method": "magic"}, "method must be one of ngram, none"),
        ({"num_draft_tokens": 129}, "0 to 128"),
        ({"num_draft_tokens": -1}, "0 to 128"),
        ({"num_draft_tokens": "many"}, "0 to 128"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"max_new_tokens": None}, "max_new_tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens must be 0 or more"),
        ({"min_new_tokens": 1.5}, "min_new_tokens must be 0 or more"),
        ({"stop_token_ids": [6]}, "stop_token_ids is a list of token ids from 0 to 5"),
        ({"stop_token_ids": 3}, "stop_token_ids is a list"),
        ({"allowed_token_ids": ()}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids is a list"),
        ({"bad_words": [""]}, "bad_words is a string or a list of strings"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be 0 to 6"),
    ],
    ids=str,
)
def test_a_wrong_value_is_an_option_error_that_names_it(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        builder().build(request(**settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"seed": "abc"}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"logit_bias": [1, 2]}, "logit_bias maps"),
        ({"logit_bias": {"x": 1.0}}, "keyed by token ids"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {1: "much"}}, "logit_bias"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_k": "all"}, "top_k"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"temperature": True}, "temperature"),
    ],
    ids=str,
)
def test_wrong_sampling_settings_are_option_errors(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        SamplingParams(**settings)


def test_string_keys_of_a_bias_are_token_ids() -> None:
    assert SamplingParams(logit_bias={"3": 1, np.int64(2): np.float32(0.5)}).logit_bias == {3: 1.0, 2: 0.5}


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ([], PromptError, "empty"),
        ([0, 6], PromptError, "token 6 of the prompt is out of vocabulary: ids are below 6"),
        ([-1], PromptError, "token -1"),
        ([0] * 64, ContextLengthExceeded, "64 tokens; toy reads at most 63"),
        ([0] * 90, ContextLengthExceeded, "90 tokens"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_prompt_that_cannot_be_read_is_a_prompt_error(prompt: list[int], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        builder().build(request(prompt=prompt))


def test_a_prompt_that_does_not_fit_the_cache_names_the_option() -> None:
    with pytest.raises(ContextLengthExceeded, match="--kv-cache-tokens"):
        builder(capacity=16).build(request(prompt=[0] * 16))


def test_the_shortest_of_model_option_and_cache_limits_a_sequence() -> None:
    assert builder().build(request(max_new_tokens=500)).params.stopping.max_new_tokens == 61
    assert builder(max_model_len=20).build(request(max_new_tokens=500)).params.stopping.max_new_tokens == 17
    assert builder(capacity=10).build(request(max_new_tokens=500)).params.stopping.max_new_tokens == 7


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    params = builder().build(
        request(max_new_tokens=np.int64(4), logprobs=torch.tensor(2), num_draft_tokens=np.int32(1))
    )
    assert params.params.stopping.max_new_tokens == 4
    assert (params.params.logprobs, params.params.num_draft_tokens) == (2, 1)


def test_a_method_without_drafts_drafts_nothing() -> None:
    assert builder().build(request(method="none", num_draft_tokens=5)).params.num_draft_tokens == 0
    seq = builder().build(request())
    assert (seq.params.method, seq.params.num_draft_tokens) == ("ngram", None)


def test_a_prediction_without_a_method_is_drafted_from() -> None:
    methods = ("ngram", "none", "prediction")
    assert builder(methods).build(request(prediction=[1, 2])).params.method == "prediction"
    assert builder(methods).build(request(prediction=[1, 2], method="ngram")).params.method == "ngram"
    assert builder(("ngram",)).build(request(prediction=[1, 2])).params.method == "ngram"


@pytest.mark.parametrize(
    ("options", "seed", "rule"),
    [
        ({}, None, "token"),
        ({}, 3, "coupled"),
        ({"num_draft_tokens": "auto"}, None, "token"),
        ({"num_draft_tokens": "auto"}, 3, "coupled"),
        ({"per_request": True}, 3, "coupled"),
        ({"per_request": True}, None, "token"),
        ({"acceptance": "block"}, 3, "block"),
        ({"acceptance": "token", "per_request": True}, 3, "token"),
        ({"acceptance": "lossy-typical"}, None, "lossy-typical"),
    ],
    ids=str,
)
def test_the_acceptance_rule_is_decided_here_and_only_here(
    options: dict[str, Any], seed: int | None, rule: str
) -> None:
    """A seeded sequence is coupled, unless a rule is named."""
    seq = builder(**options).build(request(sampling=SamplingParams(1.0, seed=seed)))
    assert seq.params.rule.name == rule


def test_end_tokens_are_the_models_unless_they_are_ignored() -> None:
    assert builder().build(request()).params.stopping.eos_token_ids == {5}
    assert builder().build(request(ignore_eos=True)).params.stopping.eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, ()), ((), ()), ("a", ("a",)), (["a", "bc"], ("a", "bc")), (("a",), ("a",))], ids=str
)
def test_stop_strings_come_in_several_shapes(stop: Any, strings: tuple[str, ...]) -> None:
    assert text_list("stop", stop) == strings


def test_logprobs_are_limited_by_the_vocabulary() -> None:
    assert builder().build(request(logprobs=6)).params.logprobs == 6


def test_a_bias_on_a_token_that_does_not_exist_is_refused_before_any_work() -> None:
    """In a batch it would fail all the others too."""
    engine = toy_engine()
    with pytest.raises(OptionError, match="logit_bias is a list of token ids from 0 to"):
        engine.sequence(Request([1, 2, 3], SamplingParams(logit_bias={engine.info.vocab_size: 1.0}), 4))
