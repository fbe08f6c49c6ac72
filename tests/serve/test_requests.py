"""Request bodies to engine requests, without a model or a server."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.core.sampling import SamplingParams
from paceline.core.types import StructuredOutput
from paceline.errors import ContextLengthExceeded, OptionError, PromptError
from paceline.serve.chat_messages import template_message
from paceline.serve.config import RequestLimits, ServerConfig
from paceline.serve.errors import ApiError
from paceline.serve.extra_fields import ExtraFields
from paceline.serve.output_schema import ResponseFormatParam
from paceline.serve.requests import (
    COMPLETION_MAX_TOKENS,
    CompletionTask,
    RequestBuilder,
    content_text,
    logit_bias,
    sampling_params,
    seeded_for_choice,
)
from paceline.serve.schema import (
    SEED_LIMIT,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
)
from paceline.serve.structured_fields import structured_output
from paceline.serve.token_text import TokenText
from tests.serve.toy_engine import ReversingEngine


def builder(**changes: Any) -> RequestBuilder:
    engine = ReversingEngine()
    return RequestBuilder(engine, TokenText(engine.tokenizer), ServerConfig(("model",), **changes))


def completion(*, config: dict[str, Any] | None = None, **body: Any) -> CompletionTask:
    return builder(**(config or {})).completion(CompletionRequest.model_validate({"prompt": "abc", **body}))


def chat(*, config: dict[str, Any] | None = None, **body: Any) -> CompletionTask:
    messages = [{"role": "user", "content": "abc"}]
    return builder(**(config or {})).chat(ChatRequest.model_validate({"messages": messages, **body}))


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_a_string_token_ids_or_a_list_of_either() -> None:
    expected = [97, 98, 99]
    for prompt in ("abc", expected):
        assert [choice.request.prompt for choice in completion(prompt=prompt).choices] == [expected]
    for prompts in (["abc", "d"], [expected, [100]]):
        assert [choice.request.prompt for choice in completion(prompt=prompts).choices] == [expected, [100]]


def test_echo_repeats_the_prompt_whatever_its_form() -> None:
    assert [choice.echo for choice in completion(prompt=["abc", "d"], echo=True).choices] == ["abc", "d"]
    assert [choice.echo for choice in completion(prompt=[97, 98], echo=True).choices] == ["ab"]
    assert [choice.echo for choice in completion().choices] == [""]


def test_prompt_tokens_count_each_prompt_once() -> None:
    task = completion(prompt=["abc", "d"], n=3)
    assert len(task.choices) == 6 and task.prompt_tokens == 4


def test_messages_are_prepared_for_the_chat_template() -> None:
    parts = [ContentPart(type="text", text="a"), ContentPart(type="text", text="b")]
    assert template_message(ChatMessage(role="developer", content=parts)) == {"role": "system", "content": "ab"}
    assert template_message(ChatMessage(role="assistant")) == {"role": "assistant", "content": ""}
    assert content_text("abc") == "abc"


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_a_refusal_that_is_sent_back_is_text_and_the_usual_verbosity_is_taken() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    body = ChatRequest.model_validate({"messages": [{"role": "assistant", "content": parts}], "verbosity": "medium"})
    assert content_text(body.messages[0].content or "") == "ab"
    assert ExtraFields(strict=True).ignored(body) == []
    with pytest.raises(ValidationError, match="text"):
        ChatRequest.model_validate({"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]})


def test_max_tokens_has_openai_defaults() -> None:
    config = {"limits": RequestLimits(default_max_tokens=20)}
    assert completion().choices[0].request.max_new_tokens == COMPLETION_MAX_TOKENS
    assert chat(config=config).choices[0].request.max_new_tokens == 20
    assert chat(max_tokens=5, max_completion_tokens=7).choices[0].request.max_new_tokens == 7


def test_a_chat_without_max_tokens_may_fill_the_context_and_no_more_than_the_server_allows() -> None:
    prompt_tokens = chat().prompt_tokens
    assert chat().choices[0].request.max_new_tokens == 64 - prompt_tokens
    for limits in (RequestLimits(max_new_tokens=9), RequestLimits(max_new_tokens=9, default_max_tokens=20)):
        assert chat(config={"limits": limits}).choices[0].request.max_new_tokens == 9


def test_only_a_default_is_cut_to_the_context_length() -> None:
    limits = RequestLimits(default_max_tokens=1000)
    assert chat(config={"limits": limits}).choices[0].request.max_new_tokens == 64 - 3
    assert completion(config={"max_model_len": 10}).choices[0].request.max_new_tokens == 7
    assert builder(max_model_len=1000).max_model_len == 64
    assert completion(max_tokens=61).choices[0].request.max_new_tokens == 61
    for refused in (lambda: completion(max_tokens=62), lambda: chat(max_completion_tokens=62)):
        with pytest.raises(ContextLengthExceeded, match=r"has 3 tokens and max_tokens is 62, .* ask for 61 or fewer"):
            refused()


def test_truncate_prompt_tokens_reads_the_last_ones() -> None:
    long = "x" * 100 + "abc"
    cut = completion(prompt=long, truncate_prompt_tokens=3, echo=True).choices[0]
    assert cut.request.prompt == [97, 98, 99] and cut.echo == "abc"
    assert len(completion(prompt=long, truncate_prompt_tokens=-1, max_tokens=60).choices[0].request.prompt) == 4
    assert len(completion(prompt="ab", truncate_prompt_tokens=-1, max_tokens=60).choices[0].request.prompt) == 2
    assert len(chat(truncate_prompt_tokens=2).choices[0].request.prompt) == 2


def test_no_tokens_are_for_an_echo_alone() -> None:
    assert completion(max_tokens=0, echo=True).choices[0].request.max_new_tokens == 0
    for refused in (lambda: completion(max_tokens=0), lambda: chat(max_tokens=0)):
        with pytest.raises(ApiError, match="echo"):
            refused()


def test_a_prompt_beyond_the_context_length_is_refused_by_type() -> None:
    with pytest.raises(ContextLengthExceeded, match="toy reads at most 63"):
        completion(prompt="x" * 64)
    with pytest.raises(ContextLengthExceeded, match="at most 2"):
        completion(config={"limits": RequestLimits(max_prompt_tokens=2)})
    with pytest.raises(PromptError, match="empty"):
        completion(prompt="")


# --- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"n": 33}, "n"),
        ({"max_tokens": 1 << 21}, "max_tokens"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"model": "another"}, "model"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_a_refused_field_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**body)
    assert caught.value.param == param and caught.value.status == (404 if param == "model" else 400)


def test_top_logprobs_need_logprobs() -> None:
    with pytest.raises(ApiError, match="logprobs: true"):
        chat(top_logprobs=2)
    assert chat().choices[0].request.logprobs is None
    assert chat(logprobs=True).choices[0].request.logprobs == 0
    assert chat(logprobs=True, top_logprobs=2).choices[0].request.logprobs == 2


# --- sampling and speculation -----------------------------------------------------------------------------------------


def test_sampling_has_openai_defaults() -> None:
    body = CompletionRequest(prompt="a")
    assert sampling_params(body, 10) == SamplingParams(temperature=1.0)
    changed = CompletionRequest(prompt="a", temperature=0.0, top_k=-1, min_p=0.1, logit_bias={"3": -1.0}, seed=5)
    assert sampling_params(changed, 10) == SamplingParams(temperature=0.0, min_p=0.1, logit_bias={3: -1.0}, seed=5)


@pytest.mark.parametrize("key", ["cat", "10", "-1", "9" * 20, "²", ""])
def test_a_logit_bias_is_keyed_by_token_ids(key: str) -> None:
    with pytest.raises(OptionError, match="from 0 to 9"):
        logit_bias({key: 1.0}, 10)


def test_each_choice_has_its_own_seed_and_the_same_one_every_time() -> None:
    assert [choice.request.sampling.seed for choice in completion(n=3, seed=5).choices] == [5, 6, 7]
    assert [choice.request.sampling.seed for choice in completion(n=2).choices] == [None, None]
    assert seeded_for_choice(SamplingParams(seed=SEED_LIMIT - 1), 1).seed == 0


@pytest.mark.parametrize(
    ("server_k", "request_k", "expected"),
    [(None, None, None), (3, None, 3), (3, 5, 5), (3, "auto", None), (3, 0, 0), (None, 4, 4)],
)
def test_a_request_may_choose_its_number_of_draft_tokens(server_k: Any, request_k: Any, expected: Any) -> None:
    speculative = {"method": "ngram", "num_draft_tokens": request_k}
    request = completion(config={"num_draft_tokens": server_k}, speculative=speculative).choices[0].request
    assert request.num_draft_tokens == expected and request.method == "ngram"


def test_a_prediction_becomes_tokens_and_a_method_overrides_it() -> None:
    prediction = {"type": "content", "content": [{"type": "text", "text": "ab"}]}
    choice = completion(prediction=prediction).choices[0]
    assert choice.request.prediction == [97, 98] and choice.uses_prediction
    assert not completion(prediction=prediction, speculative={"method": "ngram"}).choices[0].uses_prediction
    assert completion(prediction={"type": "content", "content": ""}).choices[0].request.prediction is None


def test_a_response_format_becomes_a_structured_output() -> None:
    assert structured_output(None) is None and structured_output(ResponseFormatParam(type="text")) is None
    assert structured_output(ResponseFormatParam(type="json_object")) == StructuredOutput("json_object")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    expected = StructuredOutput("json_schema", '{"type": "object"}')
    assert structured_output(ResponseFormatParam.model_validate(schema)) == expected


def test_the_other_fields_reach_the_engine_request() -> None:
    task = completion(stop="x", ignore_eos=True, stream=True, stream_options={"include_usage": True}, x_paceline=True)
    assert task.choices[0].request.stop == ("x",) and task.choices[0].request.ignore_eos
    assert task.stream and task.include_usage and task.include_stats
    assert completion(stop=["x", "", "y"]).choices[0].request.stop == ("x", "y")
    assert completion(stop="").choices[0].request.stop == ()
