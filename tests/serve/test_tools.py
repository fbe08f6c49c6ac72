"""Tool calls through the API, with the real `openai` client."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import scipy
from torch import Tensor

from paceline.cli import main
from paceline.core.draft_tree import DraftTree
from paceline.core.sampling import draw
from paceline.core.types import StructuredOutput, VerifyResult
from paceline.core.verify import RULES
from paceline.engines.local.structured_output import GrammarCompiler
from paceline.errors import OptionError
from paceline.serve.app import create_app
from paceline.serve.config import RequestLimits, ServerConfig
from tests.serve.running import CHAT, NAME, RunningServer, serving, serving_model
from tests.serve.scripted import TOOL_TEMPLATE, ScriptedEngine, tokenizer_with
from tests.support.tiny import tiny_llama
from tests.support.wrong_rules import wrong_rule

FALSE_ALARM = 1e-6  # the probability that correct code fails the comparison of distributions
FOUND = 1e-3  # of the wrong rule, whose p-value is mostly far below
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "unit": "C"}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ASK: list[Any] = [{"role": "user", "content": "Is it warm in Rome?"}]


@pytest.fixture(scope="module")
def shared_engine() -> ScriptedEngine:
    return ScriptedEngine(tokenizer_with(TOOL_TEMPLATE))


@pytest.fixture
def engine(shared_engine: ScriptedEngine) -> ScriptedEngine:
    shared_engine.requests, shared_engine.outputs = [], []
    return shared_engine


@pytest.fixture(scope="module")
def server(shared_engine: ScriptedEngine) -> Iterator[RunningServer]:
    with serving(shared_engine, ServerConfig((NAME,))) as running:
        yield running


def chat(server: RunningServer, messages: list[Any], stream: bool = False, **params: Any) -> Any:
    """The choice of a chat completion. A stream is put together by the client's own accumulator."""
    client = server.client()
    params = {"model": NAME, "messages": messages, **params}
    if not stream:
        return client.chat.completions.create(**params).choices[0]
    with client.chat.completions.stream(**params) as events:
        return events.get_final_completion().choices[0]


# --- conversations ---


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_of_five_turns_with_tools(server: RunningServer, engine: ScriptedEngine, stream: bool) -> None:
    """Every answer goes back as `model_dump()`, with its nulls; the prompt holds each call and each result."""
    engine.outputs = [f"I look.\n{CALL}\n{NOW_CALL}", "20 degrees.", CALL, NOW_CALL, "Still 20 degrees."]
    messages, finished = list(ASK), []
    for question in ("And tomorrow?", "Look again.", "What time is it?", None, None):
        choice = chat(server, messages, stream, tools=TOOLS)
        finished.append(choice.finish_reason)
        messages.append(choice.message.model_dump())
        calls = choice.message.tool_calls or []
        messages += [{"role": "tool", "tool_call_id": call.id, "content": f"result {len(messages)}"} for call in calls]
        if question and not calls:
            messages.append({"role": "user", "content": question})
    assert finished == ["tool_calls", "stop", "tool_calls", "tool_calls", "stop"]
    first = messages[1]
    assert first["content"] == "I look."
    functions = [call["function"] for call in first["tool_calls"]]
    assert [function["name"] for function in functions] == ["get_weather", "now"]
    assert json.loads(functions[0]["arguments"]) == {"city": "Rome", "unit": "C"}
    assert json.loads(functions[1]["arguments"]) == {}
    assert len({call["id"] for message in messages for call in message.get("tool_calls") or []}) == 4
    last = engine.prompts[-1]
    assert last.count('"name": "get_weather", "arguments": {"city": "Rome", "unit": "C"}') == 2
    assert "tool: result 2" in last and "The weather of a city" in last and last.endswith("assistant: ")


def test_a_stream_gives_index_id_and_name_once_and_then_arguments(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    engine.outputs = [f"{CALL}{NOW_CALL}"]
    chunks = list(
        server.client().chat.completions.create(model=NAME, messages=ASK, tools=TOOLS, stream=True)
    )
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    for index, name in enumerate(("get_weather", "now")):
        own = [delta for delta in deltas if delta.index == index]
        assert own[0].id and own[0].function.name == name and own[0].type == "function"
        assert all(delta.id is None and delta.function.name is None for delta in own[1:])
    arguments = "".join(delta.function.arguments for delta in deltas if delta.index == 0)
    assert json.loads(arguments) == {"city": "Rome", "unit": "C"}
    assert len([delta for delta in deltas if delta.index == 0]) > 2, "arguments arrive while they are written"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_for_one_call_gets_the_first(server: RunningServer, engine: ScriptedEngine, stream: bool) -> None:
    engine.outputs = [f"{CALL}\n{NOW_CALL}"]
    choice = chat(server, ASK, stream, tools=TOOLS, parallel_tool_calls=False)
    [call] = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome", "unit": "C"} and choice.finish_reason == "tool_calls"


@pytest.mark.slow
def test_without_tools_a_call_is_text(server: RunningServer, engine: ScriptedEngine) -> None:
    engine.outputs = [CALL] * 3
    for params in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        choice = chat(server, ASK, **params)
        assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == (CALL, "stop", None)
    assert not any("The weather of a city" in prompt for prompt in engine.prompts), "none: the model is not told"


@pytest.mark.slow
def test_the_parser_can_be_chosen_and_switched_off(engine: ScriptedEngine) -> None:
    engine.outputs = ['{"name": "now", "parameters": {}}', CALL]
    with serving(engine, ServerConfig((NAME,), tool_parser="llama3_json")) as server:
        assert chat(server, ASK, tools=TOOLS).message.tool_calls[0].function.name == "now"
    with serving(engine, ServerConfig((NAME,), tool_parser="none")) as server:
        assert chat(server, ASK, tools=TOOLS).message.content == CALL
        with pytest.raises(openai.BadRequestError, match="--tool-parser none"):
            chat(server, ASK, tools=TOOLS, tool_choice="required")
    with pytest.raises(OptionError, match="--tool-parser is auto, none or one of"):
        create_app(engine, ServerConfig((NAME,), tool_parser="nonsense"))


def test_a_wrong_parser_or_template_is_an_error_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = {"--tool-parser": "nonsense", "--reasoning-parser": "nonsense", "--chat-template": str(tmp_path / "none")}
    for flag, value in flags.items():
        assert main(["serve", "no-such-model", "--port", "0", flag, value]) != 0
        error = capsys.readouterr().err
        assert value in error and "no-such-model" not in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "names 'other'"),
        ({"tools": TOOLS, "tool_choice": {}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": [{"type": "retrieval"}]}, "type"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs cannot set 'tokenize'"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_said_in_one_line(server: RunningServer, params: dict[str, Any], words: str) -> None:
    error = server.http().post(CHAT, json={"messages": ASK, **params})
    assert error.status_code == 400 and words in error.json()["error"]["message"]


# --- templates ---


def history(arguments: str = '{"city": "Rome"}') -> list[Any]:
    call = {"id": "call_abcdefghijkl", "type": "function", "function": {"name": "now", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [*ASK, answer, {"role": "tool", "tool_call_id": call["id"], "content": "noon"}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # Qwen, Llama: arguments are an object. Mistral: ids of nine characters. DeepSeek: text, and content none.
        ("<tool_call>{{ messages[1].tool_calls[0].function.arguments.city }}{{ tools }}", "<tool_call>Rome"),
        ("[TOOL_CALLS]{{ messages[1].tool_calls[0].id }} {{ messages[2].tool_call_id }}{{ tools }}",
         "[TOOL_CALLS]defghijkl defghijkl"),
        ("<｜tool▁calls▁begin｜>{{ '' + messages[1].tool_calls[0].function.arguments }}"
         "{{ messages[1].content is none }}{{ tools }}", '<｜tool▁calls▁begin｜>{"city": "Rome"}True'),
        ("{{ messages[2].name }}{{ messages[2].role }}{{ tools }}", "nowtool"),
    ],
    ids=["object", "mistral", "deepseek", "name"],
)  # fmt: skip
def test_earlier_calls_reach_a_template_as_its_family_takes_them(template: str, expected: str) -> None:
    engine = ScriptedEngine(tokenizer_with(template))
    engine.outputs = ["ok"]
    with serving(engine, ServerConfig((NAME,))) as server:
        chat(server, history())
    assert engine.prompts[0].startswith(expected)


@pytest.mark.slow
def test_a_template_without_tools_gets_them_as_text(engine: ScriptedEngine) -> None:
    engine = ScriptedEngine(tokenizer_with("{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"))
    engine.outputs = [CALL, "ok"]
    with serving(engine, ServerConfig((NAME,))) as server:
        choice = chat(server, [{"role": "system", "content": "Be brief."}, *history()], tools=TOOLS)
        assert choice.message.tool_calls[0].function.name == "get_weather"
        chat(server, ASK)
    prompt = engine.prompts[0]
    assert prompt.startswith("<s>system: Be brief.\n\nYou can call these functions")
    assert '"name": "get_weather"' in prompt
    assert '<s>assistant: <tool_call>\n{"name": "now", "arguments": {"city": "Rome"}}\n</tool_call></s>' in prompt
    assert "<s>user: <tool_response>\nnoon\n</tool_response></s>" in prompt
    assert engine.prompts[1] == "<s>user: Is it warm in Rome?</s>"


@pytest.mark.slow
def test_arguments_that_a_model_wrote_wrongly_do_not_end_the_conversation(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    engine.outputs = ["ok", "ok"]
    assert chat(server, history('{"city": ')).message.content == "ok"
    assert chat(server, history("")).message.content == "ok"


@pytest.mark.slow
def test_documents_template_variables_and_a_message_to_continue(engine: ScriptedEngine, tmp_path: Any) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ flavour }}|" + TOOL_TEMPLATE)
    engine.outputs = ["ok"] * 4
    begun = [*ASK, {"role": "assistant", "content": "It is wa"}]
    with serving(engine, ServerConfig((NAME,), chat_template=str(path))) as server:
        body = {"chat_template_kwargs": {"flavour": "mild"}, "documents": [{"title": "Rome", "text": "warm"}]}
        chat(server, ASK, extra_body=body)
        chat(server, begun, extra_body={"continue_final_message": True})
        chat(server, ASK, extra_body={"add_generation_prompt": False})
    assert engine.prompts[0].startswith('mild|<s>documents: [{"title": "Rome"')
    assert engine.prompts[1].endswith("assistant: It is wa")
    assert engine.prompts[2].endswith("</s>")
    with pytest.raises(OptionError, match=r"chat template .* cannot be read"):
        create_app(engine, ServerConfig((NAME,), chat_template=str(tmp_path / "none.jinja")))


# --- calls beside an answer in JSON ---

ANSWER = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "several"), [(True, True), (False, False)])
def test_an_output_that_must_be_json_may_be_calls_instead(
    server: RunningServer, engine: ScriptedEngine, parallel: bool, several: bool
) -> None:
    engine.outputs = [CALL]
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "warm", "schema": ANSWER}}
    params = {"tools": TOOLS, "parallel_tool_calls": parallel, "response_format": response_format}
    assert chat(server, ASK, **params).message.tool_calls
    tokenizer, info = engine.tokenizer.hf_tokenizer, engine.info
    output = engine.requests[-1].structured_output
    assert output is not None
    compiler = GrammarCompiler(tokenizer, info)

    def matches(text: str) -> bool:
        tokens = [*tokenizer(text).input_ids, *info.eos_token_ids]
        constraint = compiler.compile(output)
        return all(bool(constraint.allowed(tokens[:place])[token]) for place, token in enumerate(tokens))

    assert all(map(matches, ['{"warm": true}', CALL, NOW_CALL]))
    wrong = ["It is.", '{"cold": true}', CALL.replace("Rome", "a city far away"), f"It is. {CALL}"]
    assert not any(map(matches, wrong))
    assert matches(f"{CALL}\n{NOW_CALL}") is several


@pytest.mark.slow
def test_what_is_no_json_leaves_no_room_for_calls(server: RunningServer, engine: ScriptedEngine) -> None:
    engine.outputs = ["a", "a"]
    chat(server, ASK, tools=TOOLS, extra_body={"guided_choice": ["a", "b"]})
    assert engine.requests[-1].structured_output == StructuredOutput("choice", '["a", "b"]')
    chat(server, ASK, tools=TOOLS, tool_choice="none", response_format={"type": "json_object"})
    assert engine.requests[-1].structured_output == StructuredOutput("json_object", "")


# --- forced calls: the grammar, a real engine ---

UNIT: dict[str, Any] = {
    "type": "object",
    "properties": {"u": {"enum": ["a", "b", "c", "d"]}, "n": {"type": "integer", "minimum": 0, "maximum": 12}},
    "required": ["u", "n"],
}
SET: dict[str, Any] = {"type": "function", "function": {"name": "set", "parameters": UNIT}}
GET: dict[str, Any] = {"type": "function", "function": {"name": "get", "parameters": UNIT}}
# Long tokens that a bias prefers make a call six tokens instead of fifty. The prompt repeats a likely call, so that
# drafts propose its arguments wherever the sequence writes them.
LONG = ('{"name": "set", "parameters": {"u": "', '", "n": ', "}}")
FORCED = f"{LONG[0]}d{LONG[1]}7{LONG[2]}" * 3
NUM_CALLS, BATCH = 500, 50
SHORT_TEMPLATE = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}{# tools are not shown #}"
NAMED = {"type": "function", "function": {"name": "set"}}


@pytest.fixture(scope="module")
def forced_server() -> Iterator[RunningServer]:
    limits = RequestLimits(max_choices=BATCH, request_timeout=600)
    tokenizer = tokenizer_with(SHORT_TEMPLATE, tokens=LONG)
    config = ServerConfig((NAME,), limits=limits, max_num_seqs=BATCH, tool_parser="llama3_json")
    model, drafts = tiny_llama(vocab_size=len(tokenizer)), {"shortest": 1}
    with serving_model(model, tokenizer, config, draft_options=drafts) as running:
        yield running


def forced(server: RunningServer, n: int, k: int, **params: Any) -> list[Any]:
    """Choices of one request at temperature 1 with k draft tokens a step."""
    body = {"speculative": {"method": "ngram" if k else "none", "num_draft_tokens": k}, "x_paceline": True}
    messages = [{"role": "user", "content": FORCED}]
    long_tokens = server.engine.tokenizer.hf_tokenizer.convert_tokens_to_ids(list(LONG))
    bias = {str(token): 20 for token in long_tokens if token}
    params = {"tools": [SET], "tool_choice": NAMED, "max_tokens": 120, "temperature": 1, "logit_bias": bias, **params}
    return server.client().chat.completions.create(
        model=NAME, messages=messages, n=n, extra_body=body, **params
    ).choices


def arguments_of(choices: list[Any]) -> list[Any]:
    calls = [call for choice in choices for call in choice.message.tool_calls]
    return [json.loads(call.function.arguments) for call in calls]


def many(server: RunningServer, count: int, k: int) -> list[Any]:
    choices = [choice for _ in range(count // BATCH) for choice in forced(server, BATCH, k)]
    assert k == 0 or sum(choice.x_paceline["accepted"] for choice in choices) > count, "drafts must be accepted"
    documents = arguments_of(choices)
    for document in documents:
        jsonschema.validate(document, UNIT)
    assert len(documents) == count and {choice.finish_reason for choice in choices} == {"tool_calls"}
    return documents


def p_value(first: list[Any], second: list[Any]) -> float:
    """Of the hypothesis that both samples have the same distribution. Rare values are counted together."""
    counts = [Counter((document["u"], document["n"]) for document in sample) for sample in (first, second)]
    total = counts[0] + counts[1]
    common = [value for value, count in total.items() if count >= 20]
    table = [[count[value] for value in common] for count in counts]
    for row, count in zip(table, counts):
        row.append(count.total() - sum(row))
    columns = [column for column in zip(*table) if sum(column) >= 10]
    assert len(columns) > 2, "the model must leave a choice, or this shows nothing"
    return float(scipy.stats.chi2_contingency(list(zip(*columns))).pvalue)


def resample_a_chosen_draft(tree: DraftTree, target: Tensor, uniforms: Tensor) -> VerifyResult:
    """Wrong: after the rejection of a draft token that was chosen, not drawn, the draw includes that token again."""
    tokens = tree.tokens.tolist()
    for node, token in enumerate(tokens):
        if float(uniforms[node]) >= float(target[node, token]):
            return VerifyResult(list(range(node)), int(draw(target[node], uniforms[-1])), tokens[:node])
    return VerifyResult(list(range(len(tree))), int(draw(target[len(tree)], uniforms[-1])), tokens)


@pytest.mark.slow
def test_forced_arguments_validate_500_times_and_keep_their_distribution(
    forced_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 of 500 calls match their schema with speculation on; their distribution is that without.

    Correct code fails this with probability 1e-6; a wrong acceptance rule, which also validates, does fail it.
    """
    drafted, plain = many(forced_server, NUM_CALLS, 3), many(forced_server, NUM_CALLS, 0)
    assert p_value(drafted, plain) > FALSE_ALARM
    monkeypatch.setitem(RULES, "token", wrong_rule(resample_a_chosen_draft))
    assert p_value(many(forced_server, NUM_CALLS, 3), plain) < FOUND


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_one_of_the_functions_or_several(forced_server: RunningServer, stream: bool) -> None:
    messages = [{"role": "user", "content": FORCED}]
    params: dict[str, Any] = {"tools": [SET, GET], "tool_choice": "required", "max_tokens": 400, "temperature": 0}
    choice = chat(forced_server, messages, stream, **params, parallel_tool_calls=False)
    assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name in ("set", "get") and not choice.message.content
    jsonschema.validate(arguments_of([choice])[0], UNIT)
    several = chat(forced_server, messages, stream, **params)
    assert len(several.message.tool_calls) >= 1
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "get"}}]}}  # fmt: skip
    only = chat(forced_server, messages, stream, **{**params, "tool_choice": allowed}, parallel_tool_calls=False)
    assert only.message.tool_calls[0].function.name == "get"


@pytest.mark.slow
def test_a_forced_call_that_the_length_cuts_off_is_neither_call_nor_content(forced_server: RunningServer) -> None:
    [choice] = forced(forced_server, 1, 0, max_tokens=3, tools=[GET], tool_choice="required")  # no long token fits it
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("length", "", None)


@pytest.mark.slow
def test_a_schema_that_no_grammar_can_express_is_refused(forced_server: RunningServer) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "teapot"}}}
    tools = [{"type": "function", "function": {"name": "set", "parameters": parameters}}]
    with pytest.raises(openai.BadRequestError, match="not supported"):
        forced(forced_server, 1, 0, tools=tools)


FAMILY_TOKENS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    "mistral": (),
    "llama3_json": (),
    "glm": (),
    "qwen3_coder": (),
    "pythonic": (),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILY_TOKENS))
def test_a_forced_call_is_written_and_read_in_the_way_of_the_family(name: str) -> None:
    tokenizer = tokenizer_with(TOOL_TEMPLATE, tokens=FAMILY_TOKENS[name])
    model = tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=1024)
    with serving_model(model, tokenizer, ServerConfig((NAME,), tool_parser=name)) as running:
        for choice in (NAMED, "required"):
            choices = forced(running, 2, 3, tools=[SET, GET], tool_choice=choice, parallel_tool_calls=False)
            for document in arguments_of(choices):
                jsonschema.validate(document, UNIT)
            assert [len(choice.message.tool_calls) for choice in choices] == [1, 1]


# --- the default model ---


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_a_real_model_converses_over_five_turns_with_tools(default_server: RunningServer, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
    weather = {"type": "function", "function": {"name": "get_weather"}}
    choices: tuple[Any, ...] = ("required", "none", weather, "auto", "none")
    for turn, choice in enumerate(choices):
        answer = chat(
            default_server, messages, stream, tools=[WEATHER], tool_choice=choice, max_tokens=40, temperature=0,
            parallel_tool_calls=False,
        )  # fmt: skip
        messages.append(answer.message.model_dump())
        calls = answer.message.tool_calls or []
        if choice in ("required", weather):
            jsonschema.validate(json.loads(calls[0].function.arguments), WEATHER["function"]["parameters"])
            assert answer.finish_reason == "tool_calls"
        messages += [{"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 20}'} for call in calls]
        if not calls:
            assert answer.message.content
            messages.append({"role": "user", "content": f"And in city number {turn}?"})
    assert len(messages) >= 10
