"""Requests in vLLM's words, without vLLM. What it cannot do is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.sampling import SamplingParams
from paceline.core.types import ModelInfo, Request, StructuredOutput
from paceline.engines.vllm.requests import RequestTranslator, VllmRequest
from paceline.errors import ContextLengthExceeded, OptionError, PromptError
from paceline.hub.tokenizer import Tokenizer
from tests.support.tiny import byte_tokenizer

INFO = ModelInfo("tiny", 259, frozenset({257}), 64, 3, 32, "cpu", "float32")


def translated(started_with: str = "ngram", k: int = 4, **settings: Any) -> VllmRequest:
    translator = RequestTranslator(INFO, Tokenizer(byte_tokenizer()), started_with, k)
    return translator.translate(
        Request(**{"prompt": [1, 2, 3], "sampling": SamplingParams(), "max_new_tokens": 9, **settings})
    )


def test_sampling_is_passed_on() -> None:
    sampling = SamplingParams(0.7, top_k=5, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.2, seed=-1)
    settings = translated(sampling=sampling).settings
    assert (settings["temperature"], settings["top_k"], settings["top_p"]) == (0.7, 5, 0.9)
    assert settings["repetition_penalty"] == 1.1 and settings["presence_penalty"] == 0.2
    assert settings["seed"] == (1 << 63) - 1 and settings["detokenize"] is False
    assert translated().settings["seed"] is None


def test_the_end_is_passed_on_and_stop_strings_stay_here() -> None:
    request = translated(stop="x", min_new_tokens=2, max_new_tokens=1000)
    assert request.settings["max_tokens"] == 61 and request.settings["min_tokens"] == 2
    assert request.settings["stop_token_ids"] == [257] and "stop" not in request.settings
    assert request.seq.params.stopping.stop_strings == ("x",)
    endless = translated(ignore_eos=True).settings
    assert endless["ignore_eos"] is True and endless["stop_token_ids"] == []
    assert translated(stop_token_ids=(7,)).settings["stop_token_ids"] == [7, 257]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (StructuredOutput("json_schema", "{}"), {"json": "{}"}),
        (StructuredOutput("json_object"), {"json_object": True}),
        (StructuredOutput("choice", '["a", "b"]'), {"choice": ["a", "b"]}),
        (StructuredOutput("regex", "a+"), {"regex": "a+"}),
        (StructuredOutput("grammar", "start: x"), {"grammar": "start: x"}),
    ],
)
def test_structured_output_is_passed_on(output: StructuredOutput, expected: dict[str, Any]) -> None:
    assert translated(structured_output=output).settings["structured"] == expected


def test_the_method_and_k_it_was_started_with_may_be_named() -> None:
    assert translated(method="ngram", num_draft_tokens=4).seq.params.method == "ngram"
    assert translated("none", 0, num_draft_tokens=7).seq.params.method == "none"


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"method": "suffix"}, OptionError, "method must be ngram, as the engine vllm was started"),
        ({"num_draft_tokens": 3}, OptionError, "num_draft_tokens must be 4, as the engine vllm was started"),
        ({"prediction": [1]}, OptionError, "takes no prediction"),
        ({"sampling": SamplingParams(1.0, min_p=0.1)}, OptionError, "under min_p; start it with --method none"),
        ({"sampling": SamplingParams(logit_bias={1: 2.0})}, OptionError, "under logit_bias"),
        ({"structured_output": StructuredOutput("json_schema", "{")}, OptionError, "not JSON"),
        ({"structured_output": StructuredOutput("poem")}, OptionError, "of the engine vllm is one of"),
        ({"structured_output": StructuredOutput("json_object"), "min_new_tokens": 2}, OptionError, "exclude"),
        ({"min_new_tokens": -1}, OptionError, "min_new_tokens"),
        ({"max_new_tokens": 0}, OptionError, "max_new_tokens"),
        ({"logprobs": 999}, OptionError, "logprobs must be 0 to 259"),
        ({"stop": [""]}, OptionError, "stop is a string"),
        ({"stop_token_ids": [259]}, OptionError, "stop_token_ids is a list of token ids from 0 to 258"),
        ({"bad_words": ("x",)}, OptionError, "takes no bad_words"),
        ({"allowed_token_ids": (1,)}, OptionError, "takes no allowed_token_ids"),
        ({"prompt_logprobs": 0}, OptionError, "takes no prompt_logprobs"),
        ({"prompt": []}, PromptError, "empty"),
        ({"prompt": [259]}, PromptError, "token 259"),
        ({"prompt": [1] * 64}, ContextLengthExceeded, "reads at most 63"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_done_is_refused(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        translated(**settings)


def test_a_bias_is_taken_without_speculation_and_must_name_a_token() -> None:
    assert translated("none", 0, sampling=SamplingParams(logit_bias={1: 2.0})).settings["logit_bias"] == {1: 2.0}
    with pytest.raises(OptionError, match="logit_bias names token 400"):
        translated("none", 0, sampling=SamplingParams(logit_bias={400: 2.0}))
