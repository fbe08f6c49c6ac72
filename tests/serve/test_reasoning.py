"""Reasoning through the API: split from the answer, counted, limited, switched off; with the real `openai` client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from paceline.errors import OptionError
from paceline.serve.app import create_app
from paceline.serve.config import ServerConfig
from tests.serve.running import NAME, RunningServer, serving, serving_model
from tests.serve.scripted import OPEN_THINKING_TEMPLATE, THINKING_TEMPLATE, ScriptedEngine, tokenizer_with
from tests.support.tiny import tiny_llama

ASK: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
THOUGHT = "Two and two.\nFour, then."
OUTPUT = f"<think>\n{THOUGHT}\n</think>\n\nFour."


@pytest.fixture(scope="module")
def shared_engine() -> ScriptedEngine:
    return ScriptedEngine(tokenizer_with(THINKING_TEMPLATE))


@pytest.fixture
def engine(shared_engine: ScriptedEngine) -> ScriptedEngine:
    shared_engine.requests, shared_engine.outputs = [], []
    return shared_engine


@pytest.fixture(scope="module")
def server(shared_engine: ScriptedEngine) -> Iterator[RunningServer]:
    with serving(shared_engine, ServerConfig((NAME,))) as running:
        yield running


def ask(server: RunningServer, messages: list[Any] = ASK, **params: Any) -> Any:
    return server.client().chat.completions.create(model=NAME, messages=messages, **params)


def test_reasoning_is_split_from_the_answer_and_counted(server: RunningServer, engine: ScriptedEngine) -> None:
    engine.outputs = [OUTPUT]
    response = ask(server)
    message = response.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("Four.", THOUGHT, THOUGHT)
    # One token a byte: everything between the marks, the line breaks at both ends too.
    assert response.usage.completion_tokens_details.reasoning_tokens == len(f"\n{THOUGHT}\n")


def test_a_stream_gives_the_reasoning_first_and_then_the_content(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    engine.outputs = [OUTPUT]
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    reasoning = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
    content = [delta.content for delta in deltas if delta.content]
    assert ("".join(reasoning), "".join(content)) == (THOUGHT, "Four.") and len(reasoning) > 2
    last = max(i for i, delta in enumerate(deltas) if getattr(delta, "reasoning", None))
    assert last < min(i for i, delta in enumerate(deltas) if delta.content)
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == len(f"\n{THOUGHT}\n")


@pytest.mark.slow
def test_reasoning_can_be_left_out_of_the_answer(server: RunningServer, engine: ScriptedEngine) -> None:
    engine.outputs = [OUTPUT, OUTPUT]
    for body in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        response = ask(server, extra_body=body)
        message = response.choices[0].message
        assert message.content == "Four." and not hasattr(message, "reasoning_content")
        assert response.usage.completion_tokens_details.reasoning_tokens == len(f"\n{THOUGHT}\n"), "it is still paid"


@pytest.mark.parametrize(
    "body",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
        {"thinking_budget": 0},
    ],
    ids=str,
)
def test_reasoning_can_be_switched_off_in_every_spelling(
    server: RunningServer, engine: ScriptedEngine, body: dict[str, Any]
) -> None:
    engine.outputs = ["Four."]
    message = ask(server, extra_body=body).choices[0].message
    assert message.content == "Four." and engine.prompts[0].endswith("<think>\n\n</think>\n\n")
    assert message.reasoning is None and not hasattr(message, "reasoning_content")


@pytest.mark.slow
def test_the_effort_reaches_a_template_that_knows_it() -> None:
    engine = ScriptedEngine(tokenizer_with("{{ reasoning_effort }}|{{ messages }}"))
    engine.outputs = ["ok", "ok"]
    with serving(engine, ServerConfig((NAME,))) as server:
        ask(server, reasoning_effort="high")
        ask(server, extra_body={"reasoning": {"effort": "low"}})
    assert [prompt.split("|")[0] for prompt in engine.prompts] == ["high", "low"]


@pytest.mark.slow
def test_earlier_reasoning_and_calls_go_back_to_the_template() -> None:
    template = "{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}{# tools </think> #}"
    engine = ScriptedEngine(tokenizer_with(template))
    engine.outputs = [f'{OUTPUT}<tool_call>{{"name": "now"}}</tool_call>', "Noon."]
    with serving(engine, ServerConfig((NAME,))) as server:
        choice = ask(server, tools=[NOW]).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.arguments == "{}"
        call_id = choice.message.tool_calls[0].id
        result = {"role": "tool", "tool_call_id": call_id, "content": "12:00"}
        assert ask(server, [*ASK, choice.message.model_dump(), result]).choices[0].message.content == "Noon."
    assert f"[{THOUGHT}]Four." in engine.prompts[1]


@pytest.mark.slow
def test_a_prompt_that_opens_the_reasoning_needs_no_opening_mark() -> None:
    engine = ScriptedEngine(tokenizer_with(OPEN_THINKING_TEMPLATE))
    engine.outputs = [f"{THOUGHT}</think>Four.", "Four.", f"{THOUGHT} and", "Four."]
    with serving(engine, ServerConfig((NAME,))) as server:
        message = ask(server).choices[0].message
        assert (message.reasoning, message.content) == (THOUGHT, "Four.")
        off = ask(server, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0].message
        assert off.content == "Four." and off.reasoning is None
        cut = ask(server).choices[0].message
        assert (cut.reasoning, cut.content) == (f"{THOUGHT} and", "")
    with serving(engine, ServerConfig((NAME,), reasoning_parser="none")) as server:
        assert ask(server).choices[0].message.content == "Four."
    with pytest.raises(OptionError, match="--reasoning-parser is auto, none or one of"):
        create_app(engine, ServerConfig((NAME,), reasoning_parser="nonsense"))


HARMONY = "<|start|>{{ messages[0].content }}<|message|><|channel|>{# reasoning_effort #}{{ tools }}"
HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")


@pytest.mark.slow
def test_channels_of_gpt_oss_are_read_though_they_are_special_tokens() -> None:
    engine = ScriptedEngine(tokenizer_with(HARMONY, special=HARMONY_TOKENS))
    thought = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
    engine.outputs = [
        f"{thought}<|channel|>final<|message|>Four.<|return|>",
        f'{thought}<|channel|>commentary to=functions.now <|constrain|>json<|message|>{{"zone": "UTC"}}<|call|>',
    ]
    with serving(engine, ServerConfig((NAME,))) as server:
        response = ask(server)
        message = response.choices[0].message
        assert (message.reasoning_content, message.content) == (THOUGHT, "Four.")
        assert response.usage.completion_tokens_details.reasoning_tokens == len(THOUGHT)
        choice = ask(server, tools=[NOW]).choices[0]
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"zone": "UTC"}
        assert (choice.message.reasoning_content, choice.finish_reason) == (THOUGHT, "tool_calls")
    assert [request.skip_special_tokens for request in engine.requests] == [False, False]


# --- a real engine: the thinking budget, and a grammar after the reasoning ---

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}},
    "required": ["size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "size", "schema": SCHEMA}}
MARKS = ("<think>", "</think>")


@pytest.fixture(scope="module", params=["one token", "bytes"])
def thinking_server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """A tiny model whose prompt opens the reasoning; its closing mark is one token, or eight."""
    tokenizer = tokenizer_with(OPEN_THINKING_TEMPLATE, tokens=MARKS if request.param == "one token" else ())
    model = tiny_llama(vocab_size=len(tokenizer))
    with serving_model(model, tokenizer, ServerConfig((NAME,)), draft_options={"shortest": 1}) as running:
        yield running


def limited(server: RunningServer, k: int, **params: Any) -> Any:
    body = {"speculative": {"method": "ngram" if k else "none", "num_draft_tokens": k}, "x_paceline": True}
    body |= params.pop("body", {})
    end = server.engine.tokenizer.hf_tokenizer("</think>", add_special_tokens=False).input_ids
    # Left to itself this model closes its reasoning after four tokens; closing it by force obeys no bias.
    bias = {str(end[0]): -100} if len(end) == 1 else {}
    params = {"max_tokens": 64, "temperature": 0, "logit_bias": bias, **params}
    return ask(server, extra_body=body, **params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spelling", ["thinking_budget", "thinking_token_budget", "thinking_budget_tokens", "thinking"]
)
def test_after_so_many_tokens_the_reasoning_is_closed(thinking_server: RunningServer, spelling: str) -> None:
    for count in (0, 1, 12):
        value = {"type": "enabled", "budget_tokens": count} if spelling == "thinking" else count
        body = {spelling: value, "chat_template_kwargs": {"enable_thinking": True}}
        outputs = [limited(thinking_server, k, body=body, max_tokens=48) for k in (0, 4)]
        for output in outputs:
            assert output.usage.completion_tokens_details.reasoning_tokens == count
            assert output.choices[0].message.content
        messages = [output.choices[0].message for output in outputs]
        assert messages[0].content == messages[1].content, "greedy decoding gives the same with drafts"


@pytest.mark.slow
def test_drafts_are_accepted_inside_limited_reasoning(thinking_server: RunningServer) -> None:
    output = limited(thinking_server, 4, body={"thinking_budget": 40}, max_tokens=80)
    assert output.choices[0].x_paceline["accepted"] > 0
    assert output.usage.completion_tokens_details.reasoning_tokens == 40


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_matches_its_schema_after_the_reasoning(thinking_server: RunningServer, temperature: float) -> None:
    for k in (0, 4):
        output = limited(
            thinking_server, k, body={"thinking_budget": 10}, response_format=FORMAT, temperature=temperature, n=4,
            max_tokens=120,
        )  # fmt: skip
        for choice in output.choices:
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
            assert choice.message.reasoning or temperature
        assert output.usage.completion_tokens_details.reasoning_tokens <= 40


@pytest.mark.slow
def test_a_forced_call_comes_after_the_reasoning(thinking_server: RunningServer) -> None:
    tools = [{"type": "function", "function": {"name": "set", "parameters": SCHEMA}}]
    output = limited(
        thinking_server, 4, body={"thinking_budget": 6}, tools=tools, tool_choice="required", max_tokens=160,
        parallel_tool_calls=False,
    )  # fmt: skip
    [call] = output.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert output.choices[0].message.reasoning and output.usage.completion_tokens_details.reasoning_tokens == 6
