"""Fields that shape an output or show more of it, through the `openai` client against a tiny model."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import openai
import pytest

from paceline.kv.block_manager import BLOCK_SIZE
from tests.serve.running import CHAT, COMPLETIONS, NAME, RunningServer
from tests.support.tiny import byte_tokenizer, tiny_llama

PROMPT = "abcabcabcabc"
LETTERS = byte_tokenizer()("abcd").input_ids
EOS = 257
DRAFTING = [{"method": "none", "num_draft_tokens": 0}, {"method": "ngram", "num_draft_tokens": 4}]


def complete(server: RunningServer, extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    params: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **changes}
    return server.client().completions.create(**params, extra_body=extra)


def chat(server: RunningServer, extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    messages = [{"role": "user", "content": "abcabc"}]
    params: dict[str, Any] = {"model": NAME, "messages": messages, "max_tokens": 12, "temperature": 0, **changes}
    return server.client().chat.completions.create(**params, extra_body=extra)


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_sampled_token_is_always_among_the_alternatives(tiny_server: RunningServer, count: int) -> None:
    params: dict[str, Any] = {"temperature": 1.8, "max_tokens": 40, "seed": 3}
    logprobs = complete(tiny_server, {"ignore_eos": True}, logprobs=count, **params).choices[0].logprobs
    assert len(logprobs.tokens) == 40
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
        assert top[token] == logprob and max(1, count) <= len(top) <= count + 1
        assert next(iter(top)) == token, "it is the first"
    if count:
        options = {"logprobs": True, "top_logprobs": count, **params}
        for entry in chat(tiny_server, {"ignore_eos": True}, **options).choices[0].logprobs.content:
            assert entry.logprob in [other.logprob for other in entry.top_logprobs]
            assert len(entry.top_logprobs) == count, "no more than asked for: the sampled token takes the last place"


@pytest.mark.slow
def test_a_chat_that_ends_with_two_answers_is_refused(tiny_server: RunningServer) -> None:
    question, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "to be"}
    with pytest.raises(openai.BadRequestError, match="both from the assistant"):
        chat(tiny_server, {}, messages=[question, answer, answer])
    assert chat(tiny_server, {}, messages=[question, answer, answer, question]).choices


def test_parts_of_characters_are_told_apart_by_their_bytes(tiny_server: RunningServer) -> None:
    tops = complete(tiny_server, logprobs=20, max_tokens=4).choices[0].logprobs.top_logprobs
    assert all(len(top) in (20, 21) for top in tops), "none is lost because it is spelled like another"
    assert any(token.startswith(r"bytes:\x") for top in tops for token in top)


@pytest.mark.slow
def test_tokens_are_returned_as_ids_where_asked(tiny_server: RunningServer) -> None:
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = complete(tiny_server, extra, logprobs=2).choices[0]
    assert choice.prompt_token_ids == byte_tokenizer()(PROMPT).input_ids
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    assert all(re.fullmatch(r"token_id:\d+", token) for top in choice.logprobs.top_logprobs for token in top)
    answer = chat(tiny_server, extra, logprobs=True)
    assert [entry.token for entry in answer.choices[0].logprobs.content] == [
        f"token_id:{token}" for token in answer.choices[0].token_ids
    ]
    assert answer.prompt_token_ids[0] == 256
    chunks = list(complete(tiny_server, extra, stream=True))
    assert chunks[0].choices[0].prompt_token_ids == choice.prompt_token_ids
    streamed = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", [])]
    assert streamed == choice.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_stream_and_a_whole_response_agree_whatever_stops_it(tiny_server: RunningServer, seed: int) -> None:
    random, letters = Random(seed), {"allowed_token_ids": LETTERS, "speculative": DRAFTING[1], "return_token_ids": True}
    params: dict[str, Any] = {"temperature": 1.3, "seed": seed, "max_tokens": 30, "logprobs": random.randrange(6)}
    text = complete(tiny_server, letters, **params).choices[0].text
    starts = [random.randrange(len(text)) for _ in range(2)]
    params["stop"] = [text[start : start + random.randint(1, 5)] for start in starts]
    choice = complete(tiny_server, letters, **params).choices[0]
    assert choice.text == text[: min(text.index(stop) for stop in params["stop"])]
    assert "".join(choice.logprobs.tokens) == choice.text and choice.stop_reason in params["stop"]
    assert choice.logprobs.text_offset == list(range(len(choice.text)))
    chunks = [chunk.choices[0] for chunk in complete(tiny_server, letters, stream=True, **params)]
    assert "".join(chunk.text for chunk in chunks) == choice.text
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts for value in getattr(part, name)] == getattr(choice.logprobs, name)
    assert [token for chunk in chunks for token in getattr(chunk, "token_ids", [])] == choice.token_ids


# --- prompts ----------------------------------------------------------------------------------------------------------


def expected_logprobs(ids: list[int]) -> list[float]:
    import torch

    with torch.inference_mode():
        scores = torch.log_softmax(tiny_llama()(torch.tensor([ids])).logits[0].float(), dim=-1)
    return [float(scores[place, token]) for place, token in enumerate(ids[1:])]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_echo_has_the_logprobs_of_the_prompt(tiny_server: RunningServer, max_tokens: int) -> None:
    choice = complete(tiny_server, echo=True, logprobs=1, max_tokens=max_tokens).choices[0]
    logprobs, ids = choice.logprobs, byte_tokenizer()(PROMPT).input_ids
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(ids) + max_tokens
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[1 : len(ids)] == pytest.approx(expected_logprobs(ids), abs=1e-4)
    assert logprobs.tokens[: len(ids)] == list(PROMPT) and logprobs.text_offset[: len(ids)] == [*range(len(ids))]
    assert choice.text.startswith(PROMPT)
    for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:]):
        assert token in top and 1 <= len(top) <= 2
    if not max_tokens:
        assert choice.text == PROMPT and choice.finish_reason == "length"


def test_an_echo_of_token_ids_shows_special_tokens(tiny_server: RunningServer) -> None:
    choice = complete(tiny_server, prompt=[256, 256, LETTERS[0]], echo=True, logprobs=1, max_tokens=0).choices[0]
    assert choice.text == "<s><s>a" and choice.logprobs.tokens == ["<s>", "<s>", "a"]
    assert choice.logprobs.text_offset == [0, 3, 6]


@pytest.mark.slow
def test_an_echo_with_logprobs_is_streamed_too(tiny_server: RunningServer) -> None:
    params: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 5, "n": 2, "prompt": [PROMPT, "xyz"]}
    expected = complete(tiny_server, **params).choices
    for index, choice in enumerate(expected):
        chunks = [c.choices[0] for c in complete(tiny_server, stream=True, **params) if c.choices[0].index == index]
        assert "".join(chunk.text for chunk in chunks) == choice.text
        parts = [chunk.logprobs for chunk in chunks if chunk.logprobs]
        assert [token for part in parts for token in part.tokens] == choice.logprobs.tokens
        assert [offset for part in parts for offset in part.text_offset] == choice.logprobs.text_offset


@pytest.mark.slow
def test_prompt_logprobs_are_dictionaries_by_token_id(tiny_server: RunningServer) -> None:
    ids = byte_tokenizer()(PROMPT).input_ids
    entries = complete(tiny_server, {"prompt_logprobs": 2}).choices[0].prompt_logprobs
    assert entries[0] is None and len(entries) == len(ids)
    logprobs = [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:])]
    assert logprobs == pytest.approx(expected_logprobs(ids), abs=1e-4)
    for token, entry in zip(ids[1:], entries[1:]):
        assert {1, 2} <= {other["rank"] for other in entry.values()} and len(entry) in (2, 3)
        assert entry[str(token)]["decoded_token"] == byte_tokenizer().decode([token])
    answer = chat(tiny_server, {"prompt_logprobs": 0, "return_token_ids": True})
    assert [list(entry) for entry in answer.prompt_logprobs[1:]] == [[str(t)] for t in answer.prompt_token_ids[1:]]
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        list(complete(tiny_server, {"prompt_logprobs": 2}, stream=True))


@pytest.mark.slow
def test_special_tokens_of_a_prompt_are_optional(tiny_server: RunningServer) -> None:
    usages = [complete(tiny_server, {"add_special_tokens": flag}).usage for flag in (True, False)]
    assert usages[0].prompt_tokens >= usages[1].prompt_tokens == len(PROMPT)


# --- what may be generated, and where it ends -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("speculative", DRAFTING, ids=["plain", "ngram"])
def test_words_lengths_and_tokens_are_obeyed(tiny_server: RunningServer, speculative: dict[str, Any]) -> None:
    extra: dict[str, Any] = {"speculative": speculative, "allowed_token_ids": [*LETTERS, EOS]}
    text = complete(tiny_server, {**extra, "bad_words": ["ab", "d"], "min_tokens": 12}, temperature=1.5).choices[0].text
    assert len(text) == 12 and set(text) <= set("abc") and "ab" not in text
    biased = {"logit_bias": {str(EOS): 60}}
    assert len(complete(tiny_server, {**extra, **biased, "min_tokens": 7}).choices[0].text) == 7
    assert complete(tiny_server, {**extra, **biased}).choices[0].text == ""


@pytest.mark.slow
def test_a_stop_is_named_and_kept_where_asked(tiny_server: RunningServer) -> None:
    letters = {"allowed_token_ids": LETTERS}
    whole = complete(tiny_server, letters, temperature=1.2, seed=1).choices[0].text
    stop = whole[5:7]
    params: dict[str, Any] = {"temperature": 1.2, "seed": 1}
    cut = complete(tiny_server, letters, stop=[stop], **params).choices[0]
    assert cut.text == whole[: whole.index(stop)] and (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    kept = complete(tiny_server, {**letters, "include_stop_str_in_output": True}, stop=[stop], **params).choices[0]
    assert kept.text == cut.text + stop
    token = byte_tokenizer()(whole[4]).input_ids[0]
    by_token = complete(tiny_server, {**letters, "stop_token_ids": [token], "ignore_eos": True}, **params).choices[0]
    assert by_token.text == whole[: whole.index(whole[4])] and by_token.stop_reason == token


@pytest.mark.slow
def test_special_tokens_are_shown_where_asked(tiny_server: RunningServer) -> None:
    extra = {"allowed_token_ids": [256], "spaces_between_special_tokens": False}
    assert complete(tiny_server, extra, max_tokens=3).choices[0].text == ""
    assert complete(tiny_server, {**extra, "skip_special_tokens": False}, max_tokens=3).choices[0].text == "<s>" * 3


@pytest.mark.parametrize(
    "extra",
    [
        {"allowed_token_ids": []},
        {"allowed_token_ids": [9999]},
        {"stop_token_ids": [9999]},
        {"bad_words": [""]},
        {"min_tokens": -1},
        {"prompt_logprobs": -1},
        {"guided_regex": {"not": "text"}},
        {"guided_choice": []},
        {"guided_json": {"type": "teapot"}},
        {"guided_grammar": "no grammar at all"},
        {"guided_grammar": "root ::= root"},
        {"guided_json": {}, "guided_regex": "a"},
        {"structured_outputs": {"json": {}, "regex": "a"}},
    ],
    ids=str,
)
def test_a_wrong_value_is_a_bad_request(tiny_server: RunningServer, extra: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(tiny_server, extra)


# --- the best of several ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_best_of_returns_the_likeliest(tiny_server: RunningServer) -> None:
    params: dict[str, Any] = {"temperature": 1.5, "seed": 11, "max_tokens": 6}
    extra = {"ignore_eos": True, "return_token_ids": True}
    every = complete(tiny_server, extra, n=5, logprobs=0, **params).choices
    ranked = sorted(every, key=lambda choice: -sum(choice.logprobs.token_logprobs))
    best = complete(tiny_server, extra, n=2, best_of=5, **params)
    assert [choice.token_ids for choice in best.choices] == [choice.token_ids for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1] and best.choices[0].logprobs is None
    assert best.usage.completion_tokens == 30, "all of them were generated"
    with pytest.raises(openai.BadRequestError, match="best_of"):
        complete(tiny_server, n=3, best_of=2)
    with pytest.raises(openai.BadRequestError, match="streamed"):
        list(complete(tiny_server, n=1, best_of=2, stream=True))


# --- what a response says of itself -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_response_names_the_model_as_asked_and_its_fingerprint(tiny_server: RunningServer) -> None:
    first, alias = complete(tiny_server), complete(tiny_server, model="alias")
    assert (first.model, alias.model) == (NAME, "alias")
    assert first.system_fingerprint == alias.system_fingerprint == chat(tiny_server).system_fingerprint
    assert re.fullmatch(r"fp_[0-9a-f]{12}", first.system_fingerprint)
    chunk = next(iter(complete(tiny_server, model="alias", stream=True)))
    assert chunk.model == "alias" and chunk.system_fingerprint == first.system_fingerprint
    assert tiny_server.client().models.retrieve(NAME).max_model_len == 512


@pytest.mark.slow
def test_usage_counts_cached_tokens(tiny_server: RunningServer) -> None:
    prompt = "a prompt that is read once and then found in the prefix cache, " * 3
    details = [complete(tiny_server, prompt=prompt, n=2).usage.prompt_tokens_details for _ in range(2)]
    assert details[0].cached_tokens == 0 and 0 < details[1].cached_tokens < len(prompt)


def test_usage_counts_the_tokens_that_a_prompt_adds_to_the_cache(tiny_server: RunningServer) -> None:
    """Whole blocks: of 64 tokens here. A prompt that goes on from a cached one adds what it has more."""
    short, long = ("written to the cache, and counted: " * count for count in (4, 8))
    first, second = (complete(tiny_server, prompt=prompt).usage for prompt in (short, long))
    assert first.prompt_tokens_details.cache_write_tokens == first.prompt_tokens // BLOCK_SIZE * BLOCK_SIZE > 0
    whole, cached = second.prompt_tokens // BLOCK_SIZE * BLOCK_SIZE, second.prompt_tokens_details.cached_tokens
    assert cached > 0 and second.prompt_tokens_details.cache_write_tokens == whole - cached > 0
    assert complete(tiny_server, prompt="short").usage.prompt_tokens_details.cache_write_tokens == 0


@pytest.mark.slow
def test_usage_grows_with_every_chunk(tiny_server: RunningServer) -> None:
    """Clients that bill by chunk subtract one count from the next."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    for ask in (complete, chat):
        *chunks, last = ask(tiny_server, {"ignore_eos": True}, stream=True, stream_options=options)
        counts = [chunk.usage.completion_tokens for chunk in chunks[ask is chat :]]
        assert counts == sorted(set(counts)) and counts[0] > 0 and counts[-1] == 12 == last.usage.completion_tokens


@pytest.mark.slow
def test_usage_may_come_with_every_chunk(tiny_server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(tiny_server, {"ignore_eos": True}, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 12
    assert all(chunk.usage.prompt_tokens == len(PROMPT) for chunk in chunks)


@pytest.mark.slow
def test_speculation_is_reported_as_vllm_does(tiny_server: RunningServer) -> None:
    extra = {"x_paceline": True, "speculative": DRAFTING[1], "allowed_token_ids": LETTERS}
    response = complete(tiny_server, extra, max_tokens=60)
    figures, own = response.metrics["speculative_decoding"], response.choices[0].x_paceline
    assert figures["num_draft_tokens"] == own["drafted"] > 0
    assert figures["num_accepted_draft_tokens"] == own["accepted"]
    histogram = figures["acceptance_histogram"]
    assert sum(histogram) == figures["num_spec_steps"] and figures["num_spec_tokens"] <= 4
    assert sum(count * steps for count, steps in enumerate(histogram)) == own["accepted"]
    assert figures["mean_acceptance_length"] == pytest.approx(1 + own["accepted"] / figures["num_spec_steps"])
    last = list(complete(tiny_server, extra, max_tokens=60, stream=True, stream_options={"include_usage": True}))[-1]
    assert last.metrics["speculative_decoding"] == figures


# --- structured output ------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"],
          "additionalProperties": False}  # fmt: skip
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
FORMAT = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
IS_JSON, IS_CHOICE, IS_AB = r'\{"n": -?\d+\}', r"red|green", r"(ab)+c"
STRUCTURED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, IS_JSON),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, IS_JSON),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, IS_JSON),
    ({"response_format": {"type": "regex", "pattern": "(ab)+c"}}, IS_AB),
    ({"response_format": {"type": "grammar", "grammar": 'root ::= "ab"+ "c"'}}, IS_AB),
    ({"response_format": {"type": "structural_tag", "format": FORMAT}}, rf"<f>{IS_JSON}</f>"),
    ({"structured_outputs": {"json": SCHEMA}}, IS_JSON),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, IS_JSON),
    ({"structured_outputs": {"regex": "(ab)+c"}}, IS_AB),
    ({"structured_outputs": {"choice": ["red", "green"]}}, IS_CHOICE),
    ({"structured_outputs": {"grammar": 'start: ("ab")+ "c"'}}, IS_AB),
    ({"structured_outputs": {"structural_tag": json.dumps({"format": FORMAT})}}, rf"<f>{IS_JSON}</f>"),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "auto"}, IS_JSON),
    ({"guided_regex": "(ab)+c"}, IS_AB),
    ({"guided_choice": ["red", "green"]}, IS_CHOICE),
    ({"guided_grammar": 'root ::= "ab"+ "c"'}, IS_AB),
    ({"grammar": 'root ::= ("a" "b")+ "c"'}, IS_AB),
    ({"json_schema": SCHEMA}, IS_JSON),
    ({"regex": "(ab)+c"}, IS_AB),
    ({"ebnf": 'root ::= "ab"+ "c"'}, IS_AB),
]


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "pattern"), STRUCTURED, ids=lambda value: str(value)[:60])
def test_an_output_matches_what_the_request_says(tiny_server: RunningServer, extra: Any, pattern: str) -> None:
    """Plain and drafted: the same text, and it matches."""
    bias = {str(token): 4 for token in byte_tokenizer()('abc"}><f').input_ids}  # a random model would not end
    texts = []
    for speculative in DRAFTING:
        body = {**extra, "speculative": speculative, "logit_bias": bias}
        texts.append(complete(tiny_server, body, max_tokens=60).choices[0].text)
    assert texts[0] == texts[1] and re.fullmatch(pattern, texts[0]), texts


@pytest.mark.slow
def test_a_chat_takes_the_same_spellings(tiny_server: RunningServer) -> None:
    for extra in ({"guided_choice": ["red", "green"]}, {"structured_outputs": {"choice": ["red", "green"]}}):
        assert re.fullmatch(IS_CHOICE, chat(tiny_server, extra).choices[0].message.content)


@pytest.mark.slow
def test_tags_leave_other_text_free(tiny_server: RunningServer) -> None:
    letters = {"allowed_token_ids": LETTERS}
    tagged = complete(tiny_server, {"response_format": {"type": "structural_tag", **TAGS}, **letters}).choices[0]
    assert tagged.text == complete(tiny_server, letters).choices[0].text, "no tag was begun"


@pytest.mark.slow
def test_several_restrictions_of_one_output_are_refused_by_name(tiny_server: RunningServer) -> None:
    body = {"model": NAME, "prompt": "a", "guided_regex": "a", "response_format": {"type": "json_object"}}
    error = tiny_server.http().post(COMPLETIONS, json=body).json()["error"]
    assert "response_format and guided_regex" in error["message"] and error["param"] == "guided_regex"
    messages = [{"role": "user", "content": "a"}]
    assert tiny_server.http().post(CHAT, json={"messages": messages, "grammar": ""}).status_code == 200
