"""The real `openai` client against the default model, streaming and not."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.serve.running import NAME, RunningServer

pytestmark = pytest.mark.slow  # every test runs the default model

FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
LIST = "Repeat this list twice: apples, pears, plums, grapes, apples, pears, plums, grapes, apples, pears,"
PROMPTS = [f"Here are {number} facts about the number {number}:" for number in range(2, 18)]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "maximum": 99999999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


def chat(server: RunningServer, **changes: Any) -> Any:
    params = {"model": NAME, "messages": FRANCE, "max_tokens": 16, "temperature": 0, **changes}
    return server.client().chat.completions.create(**params)


def complete(server: RunningServer, **changes: Any) -> Any:
    params = {"model": NAME, "prompt": LIST, "max_tokens": 16, "temperature": 0, **changes}
    return server.client().completions.create(**params)


@pytest.fixture
def server(default_server: RunningServer) -> RunningServer:
    return default_server


def speculative(method: str | None = "ngram", k: int | str = 4) -> dict[str, Any]:
    return {"x_paceline": True, "speculative": {"method": method, "num_draft_tokens": k}}


def test_a_chat_response_and_its_usage(server: RunningServer) -> None:
    response = chat(server)
    assert "Paris" in response.choices[0].message.content
    assert response.choices[0].finish_reason in ("stop", "length")
    assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens
    assert 0 < response.usage.completion_tokens <= 16


def test_a_stream_adds_up_to_the_whole_response(server: RunningServer) -> None:
    whole = chat(server)
    chunks = list(chat(server, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("num_clients", [1, 16])
def test_output_equals_the_decoder_token_for_token(
    server: RunningServer, default_decoder: Any, num_clients: int
) -> None:
    count = 16 if num_clients > 1 else 3
    decoder = default_decoder(method="ngram", num_draft_tokens=4)
    expected = [result.text for result in decoder.generate(PROMPTS[:count], max_new_tokens=8)]

    def completion(prompt: str) -> str:
        response = complete(server, prompt=prompt, max_tokens=8, extra_body=speculative())
        return str(response.choices[0].text)

    with ThreadPoolExecutor(num_clients) as pool:
        assert list(pool.map(completion, PROMPTS[:count])) == expected


def test_draft_tokens_are_reported_and_do_not_change_the_output(server: RunningServer) -> None:
    plain = complete(server, extra_body=speculative("none", 0))
    drafted = complete(server, extra_body=speculative("ngram", 4))
    assert drafted.choices[0].text == plain.choices[0].text
    stats = drafted.choices[0].x_paceline
    assert stats["accepted"] > 0 and stats["drafted"] >= stats["accepted"]
    assert sum(stats["from_draft_mask"]) == stats["accepted"] and stats["tokens_per_step"] > 1
    assert plain.choices[0].x_paceline["drafted"] == 0


def test_logprobs_are_right_under_speculation(server: RunningServer) -> None:
    plain = complete(server, logprobs=3, extra_body=speculative("none", 0)).choices[0]
    drafted = complete(server, logprobs=3, extra_body=speculative("ngram", 4)).choices[0]
    assert drafted.x_paceline["accepted"] > 0
    assert plain.logprobs.tokens == drafted.logprobs.tokens
    assert "".join(drafted.logprobs.tokens) == drafted.text
    assert drafted.logprobs.text_offset[0] == 0
    assert plain.logprobs.token_logprobs == pytest.approx(drafted.logprobs.token_logprobs, abs=2e-3)
    for top, token in zip(drafted.logprobs.top_logprobs, drafted.logprobs.tokens):
        assert len(top) == 3 and max(top, key=top.__getitem__) == token  # greedy: the argmax is the token


def test_chat_logprobs_have_bytes_and_alternatives(server: RunningServer) -> None:
    choice = chat(server, logprobs=True, top_logprobs=2).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
    assert all(len(entry.top_logprobs) == 2 and math.exp(entry.logprob) <= 1 for entry in entries)


def test_the_same_seed_gives_the_same_output(server: RunningServer) -> None:
    params = {
        "temperature": 1.0,
        "seed": 7,
        "max_tokens": 10,
        "messages": [{"role": "user", "content": "Tell a story."}],
    }
    first = chat(server, **params).choices[0].message.content
    with ThreadPoolExecutor(4) as pool:
        requests = [pool.submit(chat, server, **{**params, "seed": seed}) for seed in (1, 2, 3)]
        again = chat(server, **params, extra_body=speculative("suffix", 3)).choices[0].message.content
        others = [request.result().choices[0].message.content for request in requests]
    assert again == first and any(other != first for other in others)


def test_each_of_several_choices_has_its_own_seed(server: RunningServer) -> None:
    params = {"n": 3, "temperature": 1.2, "seed": 5, "max_tokens": 5}
    outputs = [choice.message.content for choice in chat(server, **params).choices]
    assert len(outputs) == 3 and len(set(outputs)) > 1
    streamed = ["", "", ""]
    for chunk in chat(server, stream=True, **params):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == outputs


def test_a_stop_string_ends_the_output_before_it(server: RunningServer) -> None:
    whole = complete(server, max_tokens=12).choices[0].text
    stop = whole[8:11]
    cut = complete(server, max_tokens=12, stop=[stop], extra_body=speculative()).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"


def test_json_schema_with_speculation(server: RunningServer) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    params = {"response_format": response_format, "max_tokens": 40}
    response = chat(server, **params, extra_body=speculative("ngram", 3)).choices[0]
    document = json.loads(response.message.content)
    assert set(document) == {"city", "people"} and isinstance(document["people"], int)
    assert response.finish_reason == "stop"
    plain = chat(server, **params, extra_body=speculative("none", 0)).choices[0]
    assert plain.message.content == response.message.content


def test_json_object(server: RunningServer) -> None:
    response = chat(server, response_format={"type": "json_object"}, max_tokens=24, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in response if chunk.choices)
    assert text.startswith("{")


def test_a_prediction_is_drafted_from_and_reported(server: RunningServer) -> None:
    code = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n"
    messages = [{"role": "user", "content": f"Repeat this code exactly, nothing else:\n{code}"}]
    plain = chat(server, messages=messages, max_tokens=40)
    expected = plain.choices[0].message.content
    prediction = {"type": "content", "content": expected}
    extra = {"x_paceline": True, "speculative": {"num_draft_tokens": 8}}
    response = chat(server, messages=messages, max_tokens=40, prediction=prediction, extra_body=extra)
    assert response.choices[0].message.content == expected
    details = response.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 20
    assert details.accepted_prediction_tokens == response.choices[0].x_paceline["accepted"]
    wrong_prediction = {"type": "content", "content": "nothing of this will ever be said " * 3}
    response = chat(server, messages=messages, max_tokens=4, prediction=wrong_prediction, extra_body=extra)
    assert response.usage.completion_tokens_details.rejected_prediction_tokens > 0


def test_penalties_and_biases_reach_the_model(server: RunningServer) -> None:
    plain = complete(server, max_tokens=8)
    tokens = server.http().post("/tokenize", json={"prompt": plain.choices[0].text}).json()["tokens"]
    banned = complete(server, max_tokens=8, logit_bias={str(token): -100 for token in tokens})
    assert banned.choices[0].text != plain.choices[0].text
    penalised = complete(server, max_tokens=16, presence_penalty=2, frequency_penalty=2, extra_body=speculative())
    assert penalised.choices[0].text != complete(server).choices[0].text


def test_sampling_params_reach_the_model(server: RunningServer) -> None:
    extra = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0, **speculative()}
    assert complete(server, temperature=1.5, top_p=0.9, extra_body=extra).choices[0].text == (
        complete(server).choices[0].text
    )  # top_k=1 is greedy


def test_prompts_are_strings_tokens_or_lists_and_can_be_echoed(server: RunningServer) -> None:
    tokens = server.http().post("/tokenize", json={"prompt": LIST}).json()["tokens"]
    by_text, by_tokens = complete(server, max_tokens=6), complete(server, max_tokens=6, prompt=tokens)
    assert by_text.choices[0].text == by_tokens.choices[0].text
    assert by_text.usage.prompt_tokens == len(tokens)
    echoed = complete(server, max_tokens=6, prompt=[LIST, "One, two,"], echo=True)
    assert echoed.choices[0].text == LIST + by_text.choices[0].text
    assert echoed.choices[1].text.startswith("One, two,") and echoed.choices[1].index == 1


def test_the_client_reads_models_and_errors(server: RunningServer) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        chat(server, model="gpt-none")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(server, temperature=3)
    with pytest.raises(openai.BadRequestError, match="name"):
        chat(server, tools=[{"type": "function", "function": {}}])
    with pytest.raises(openai.BadRequestError, match="at most") as caught:
        complete(server, prompt="word " * 9000)
    assert caught.value.code == "context_length_exceeded"
