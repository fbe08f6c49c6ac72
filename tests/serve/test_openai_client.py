"""The real `openai` client against the default model, streaming and not."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.serve.running import NAME, Running

FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
LIST = "Repeat this list twice: apples, pears, plums, grapes, apples, pears, plums, grapes, apples, pears,"
PROMPTS = [f"Here are {number} facts about the number {number}:" for number in range(2, 18)]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "maximum": 99999999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


def chat(served: Running, **changes: Any) -> Any:
    asked = {"model": NAME, "messages": FRANCE, "max_tokens": 16, "temperature": 0, **changes}
    return served.client().chat.completions.create(**asked)


def complete(served: Running, **changes: Any) -> Any:
    asked = {"model": NAME, "prompt": LIST, "max_tokens": 16, "temperature": 0, **changes}
    return served.client().completions.create(**asked)


def speculative(method: str | None = "ngram", k: int | str = 4) -> dict[str, Any]:
    return {"x_paceline": True, "speculative": {"method": method, "num_draft_tokens": k}}


def test_an_answer_and_its_usage(default: Running) -> None:
    reply = chat(default)
    assert "Paris" in reply.choices[0].message.content
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert 0 < reply.usage.completion_tokens <= 16


def test_a_stream_is_the_same_text_in_pieces(default: Running) -> None:
    whole = chat(default)
    chunks = list(chat(default, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("at_once", [1, 16])
def test_token_for_token_what_the_decoder_writes(default: Running, default_decoder: Any, at_once: int) -> None:
    count = 16 if at_once > 1 else 3
    decoder = default_decoder(draft="ngram", num_draft_tokens=4)
    expected = [result.text for result in decoder.generate(PROMPTS[:count], max_new_tokens=8)]

    def one(prompt: str) -> str:
        reply = complete(default, prompt=prompt, max_tokens=8, extra_body=speculative())
        return str(reply.choices[0].text)

    with ThreadPoolExecutor(at_once) as pool:
        assert list(pool.map(one, PROMPTS[:count])) == expected


def test_guesses_are_shown_and_change_nothing(default: Running) -> None:
    plain = complete(default, extra_body=speculative("none", 0))
    guessed = complete(default, extra_body=speculative("ngram", 4))
    assert guessed.choices[0].text == plain.choices[0].text
    figures = guessed.choices[0].x_paceline
    assert figures["accepted"] > 0 and figures["drafted"] >= figures["accepted"]
    assert sum(figures["from_draft_tokens"]) == figures["accepted"] and figures["tokens_per_step"] > 1
    assert plain.choices[0].x_paceline["drafted"] == 0


def test_logprobs_are_right_under_speculation(default: Running) -> None:
    plain = complete(default, logprobs=3, extra_body=speculative("none", 0)).choices[0]
    guessed = complete(default, logprobs=3, extra_body=speculative("ngram", 4)).choices[0]
    assert guessed.x_paceline["accepted"] > 0
    assert plain.logprobs.tokens == guessed.logprobs.tokens
    assert "".join(guessed.logprobs.tokens) == guessed.text
    assert guessed.logprobs.text_offset[0] == 0
    for one, other in zip(plain.logprobs.token_logprobs, guessed.logprobs.token_logprobs):
        assert one == pytest.approx(other, abs=2e-3)
    for top, token in zip(guessed.logprobs.top_logprobs, guessed.logprobs.tokens):
        assert len(top) == 3 and max(top, key=top.__getitem__) == token  # greedy: the best is the one chosen


def test_chat_logprobs_have_bytes_and_alternatives(default: Running) -> None:
    choice = chat(default, logprobs=True, top_logprobs=2).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
    assert all(len(entry.top_logprobs) == 2 and math.exp(entry.logprob) <= 1 for entry in entries)


def test_the_same_seed_gives_the_same_text(default: Running) -> None:
    asked = {
        "temperature": 1.0,
        "seed": 7,
        "max_tokens": 10,
        "messages": [{"role": "user", "content": "Tell a story."}],
    }
    first = chat(default, **asked).choices[0].message.content
    with ThreadPoolExecutor(4) as pool:
        crowd = [pool.submit(chat, default, **{**asked, "seed": seed}) for seed in (1, 2, 3)]
        again = chat(default, **asked, extra_body=speculative("suffix", 3)).choices[0].message.content
        others = [one.result().choices[0].message.content for one in crowd]
    assert again == first and any(other != first for other in others)


def test_several_choices_are_several_texts_and_each_has_its_seed(default: Running) -> None:
    asked = {"n": 3, "temperature": 1.2, "seed": 5, "max_tokens": 5}
    texts = [choice.message.content for choice in chat(default, **asked).choices]
    assert len(texts) == 3 and len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in chat(default, stream=True, **asked):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_a_stop_string_ends_the_text_before_it(default: Running) -> None:
    whole = complete(default, max_tokens=12).choices[0].text
    stop = whole[8:11]
    cut = complete(default, max_tokens=12, stop=[stop], extra_body=speculative()).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"


def test_json_by_schema_with_speculation_on(default: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    reply = chat(default, response_format=form, max_tokens=40, extra_body=speculative("ngram", 3)).choices[0]
    document = json.loads(reply.message.content)
    assert set(document) == {"city", "people"} and isinstance(document["people"], int)
    assert reply.finish_reason == "stop"
    plain = chat(default, response_format=form, max_tokens=40, extra_body=speculative("none", 0)).choices[0]
    assert plain.message.content == reply.message.content


def test_any_json_object(default: Running) -> None:
    reply = chat(default, response_format={"type": "json_object"}, max_tokens=24, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in reply if chunk.choices)
    assert text.startswith("{")


def test_a_prediction_is_used_and_reported(default: Running) -> None:
    code = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n"
    asked = [{"role": "user", "content": f"Repeat this code exactly, nothing else:\n{code}"}]
    plain = chat(default, messages=asked, max_tokens=40)
    expected = plain.choices[0].message.content
    prediction = {"type": "content", "content": expected}
    extra = {"x_paceline": True, "speculative": {"num_draft_tokens": 8}}
    reply = chat(default, messages=asked, max_tokens=40, prediction=prediction, extra_body=extra)
    assert reply.choices[0].message.content == expected
    details = reply.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 20
    assert details.accepted_prediction_tokens == reply.choices[0].x_paceline["accepted"]
    wrong = {"type": "content", "content": "nothing of this will ever be said " * 3}
    reply = chat(default, messages=asked, max_tokens=4, prediction=wrong, extra_body=extra)
    assert reply.usage.completion_tokens_details.rejected_prediction_tokens > 0


def test_penalties_and_biases_reach_the_model(default: Running) -> None:
    plain = complete(default, max_tokens=8)
    tokens = default.http().post("/tokenize", json={"prompt": plain.choices[0].text}).json()["tokens"]
    banned = complete(default, max_tokens=8, logit_bias={str(token): -100 for token in tokens})
    assert banned.choices[0].text != plain.choices[0].text
    penalised = complete(default, max_tokens=16, presence_penalty=2, frequency_penalty=2, extra_body=speculative())
    assert penalised.choices[0].text != complete(default).choices[0].text


def test_sampling_settings_are_taken(default: Running) -> None:
    extra = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0, **speculative()}
    assert complete(default, temperature=1.5, top_p=0.9, extra_body=extra).choices[0].text == (
        complete(default).choices[0].text
    )  # the best token alone is left: greedy


def test_prompts_as_tokens_as_lists_and_echoed(default: Running) -> None:
    tokens = default.http().post("/tokenize", json={"prompt": LIST}).json()["tokens"]
    by_text, by_tokens = complete(default, max_tokens=6), complete(default, max_tokens=6, prompt=tokens)
    assert by_text.choices[0].text == by_tokens.choices[0].text
    assert by_text.usage.prompt_tokens == len(tokens)
    both = complete(default, max_tokens=6, prompt=[LIST, "One, two,"], echo=True)
    assert both.choices[0].text == LIST + by_text.choices[0].text
    assert both.choices[1].text.startswith("One, two,") and both.choices[1].index == 1


def test_models_and_errors_as_the_client_knows_them(default: Running) -> None:
    client = default.client()
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        chat(default, model="gpt-none")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(default, temperature=3)
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat(default, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.BadRequestError, match="at most"):
        complete(default, prompt="word " * 9000)
