"""Fields about prompts and about which tokens are shown, through the `openai` client against a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import openai
import pytest

from paceline.serve.config import RequestLimits, ServerConfig
from tests.serve.running import CHAT, COMPLETIONS, NAME, RunningServer, serving_model
from tests.support.tiny import byte_tokenizer, tiny_llama

IDS = byte_tokenizer()("abcdefgh").input_ids


def complete(server: RunningServer, extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    params: dict[str, Any] = {"model": NAME, "prompt": IDS, "max_tokens": 3, "temperature": 0, **changes}
    return server.client().completions.create(**params, extra_body=extra)


def chat(server: RunningServer, extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "once upon"}]
    params: dict[str, Any] = {"model": NAME, "messages": messages, "max_tokens": 3, "temperature": 0, **changes}
    return server.client().chat.completions.create(**params, extra_body=extra)


@pytest.fixture(scope="module")
def open_server() -> Iterator[RunningServer]:
    """A server with every flag that concerns what responses show."""
    config = ServerConfig(
        (NAME,),
        seed=5,
        return_tokens_as_token_ids=True,
        enable_force_include_usage=True,
        limits=RequestLimits(max_logprobs=-1),
    )
    with serving_model(tiny_llama(), byte_tokenizer(), config) as server:
        yield server


@pytest.mark.parametrize(("side", "kept"), [("left", IDS[-4:]), ("right", IDS[:4]), (None, IDS[-4:])])
def test_a_prompt_is_cut_on_the_side_that_the_request_names(
    tiny_server: RunningServer, side: str | None, kept: list[int]
) -> None:
    extra = {"return_token_ids": True, "truncate_prompt_tokens": 4, "truncation_side": side}
    assert complete(tiny_server, extra).choices[0].prompt_token_ids == kept


@pytest.mark.slow
def test_a_chat_can_begin_with_the_message_that_it_continues(tiny_server: RunningServer) -> None:
    continues = {"continue_final_message": True, "add_generation_prompt": False}
    plain = chat(tiny_server, continues).choices[0].message.content
    echoed = chat(tiny_server, {**continues, "echo": True}).choices[0].message.content
    assert echoed == "once upon" + plain and plain
    chunks = chat(tiny_server, {**continues, "echo": True}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == echoed
    assert chat(tiny_server, {"echo": True}).choices[0].message.content == chat(tiny_server).choices[0].message.content


@pytest.mark.slow
def test_token_ids_that_another_server_has_read_take_the_place_of_the_messages(tiny_server: RunningServer) -> None:
    extra = {"kv_transfer_params": {"prompt_token_ids": IDS}, "return_token_ids": True}
    answer = chat(tiny_server, extra)
    assert answer.prompt_token_ids == IDS and answer.choices[0].message.content
    assert answer.choices[0].token_ids == complete(tiny_server, {"return_token_ids": True}).choices[0].token_ids


def test_token_ids_take_the_place_of_messages(tiny_server: RunningServer) -> None:
    with tiny_server.http() as http:
        messages = [{"role": "user", "content": "abc"}]
        tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        greedy = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        by_ids = http.post(CHAT, json={"messages": [], "prompt_token_ids": tokens, **greedy}).json()
        by_messages = http.post(CHAT, json={"messages": messages, **greedy}).json()
        assert by_ids["prompt_token_ids"] == tokens
        assert by_ids["choices"][0]["message"] == by_messages["choices"][0]["message"]
        refused = http.post(CHAT, json={"messages": [], "prompt_token_ids": tokens, "add_generation_prompt": True})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "add_generation_prompt"
        for path in (CHAT, "/chat/completions"):
            empty = http.post(path, json={"messages": []})
            assert empty.status_code == 400 and empty.json()["error"]["param"] == "messages"


@pytest.mark.slow
def test_a_role_of_its_own_goes_to_the_template(tiny_server: RunningServer) -> None:
    texts = []
    for content in ("abc", [{"type": "text", "text": "abc"}]):
        messages: Any = [{"role": "narrator", "content": content}]
        texts.append(chat(tiny_server, {"return_token_ids": True}, messages=messages).prompt_token_ids)
    assert texts[0] == texts[1] and "narrator" in byte_tokenizer().decode(texts[0])


# --- which tokens are shown -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [IDS[0], IDS[2]])
@pytest.mark.parametrize("stream", [False, True])
def test_the_logprobs_of_chosen_tokens_are_shown(tiny_server: RunningServer, sampled: int, stream: bool) -> None:
    chosen = [IDS[2], IDS[3], IDS[5]]
    extra = {
        "logprob_token_ids": chosen,
        "allowed_token_ids": [sampled],
        "return_tokens_as_token_ids": True,
    }
    expected = {f"token_id:{token}" for token in {*chosen, sampled}}
    response = chat(tiny_server, extra, logprobs=True, max_tokens=1, stream=stream)
    parts = list(response) if stream else [response]
    entries = [entry for part in parts if part.choices[0].logprobs for entry in part.choices[0].logprobs.content]
    assert [entry.token for entry in entries] == [f"token_id:{sampled}"]
    assert {other.token for other in entries[0].top_logprobs} == expected
    response = complete(tiny_server, extra, logprobs=5, max_tokens=1, stream=stream)
    part = next(iter(response)) if stream else response
    assert set(part.choices[0].logprobs.top_logprobs[0]) == expected


@pytest.mark.slow
def test_chosen_tokens_have_the_logprobs_of_the_distribution(tiny_server: RunningServer) -> None:
    everything = complete(tiny_server, {"return_tokens_as_token_ids": True}, logprobs=20).choices[0].logprobs
    known = {int(token.removeprefix("token_id:")): value for token, value in everything.top_logprobs[1].items()}
    extra = {"logprob_token_ids": list(known), "return_tokens_as_token_ids": True}
    shown = complete(tiny_server, extra, logprobs=0).choices[0].logprobs.top_logprobs[1]
    assert shown == pytest.approx({f"token_id:{token}": value for token, value in known.items()}, abs=1e-5)


@pytest.mark.parametrize(
    ("extra", "logprobs", "message"),
    [
        ({"logprob_token_ids": [3]}, None, "needs logprobs"),
        ({"logprob_token_ids": [999]}, 1, "token ids are from 0"),
        ({"prompt_logprobs": -1}, None, "--max-logprobs"),
        ({}, 21, "logprobs may be 20 at most"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    tiny_server: RunningServer, extra: dict[str, Any], logprobs: int | None, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        complete(tiny_server, extra, logprobs=logprobs)


@pytest.mark.slow
def test_the_whole_vocabulary_is_shown_where_the_server_allows_it(open_server: RunningServer) -> None:
    answer = chat(open_server, {"top_logprobs": -1, "logprobs": True, "prompt_logprobs": -1}, max_tokens=1)
    vocab_size = open_server.engine.info.vocab_size
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == vocab_size
    assert len(answer.prompt_logprobs[1]) == vocab_size


# --- flags of the server ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_servers_seed_repeats_outputs(open_server: RunningServer, tiny_server: RunningServer) -> None:
    params: dict[str, Any] = {"temperature": 2.0, "max_tokens": 24}
    texts = [complete(open_server, **params).choices[0].text for _ in range(3)]
    assert len(set(texts)) == 1 and texts[0] == complete(tiny_server, seed=5, **params).choices[0].text
    assert texts[0] != complete(open_server, seed=6, **params).choices[0].text


@pytest.mark.slow
def test_a_server_can_spell_every_token_as_its_id(open_server: RunningServer) -> None:
    choice = complete(open_server, {"return_token_ids": True}, logprobs=1).choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]


def test_a_server_can_count_tokens_in_every_chunk(open_server: RunningServer) -> None:
    chunks = list(chat(open_server, {"ignore_eos": True}, stream=True))
    assert all(chunk.usage.prompt_tokens > 0 for chunk in chunks) and chunks[-1].usage.completion_tokens == 3


# --- words that help --------------------------------------------------------------------------------------------------


def test_an_error_names_what_is_wrong(tiny_server: RunningServer) -> None:
    with tiny_server.http() as http:
        biases = {"bad1": 1, "bad2": 2, "999999": 3}
        error = http.post(COMPLETIONS, json={"prompt": "a", "logit_bias": biases}).json()["error"]["message"]
        assert all(key in error for key in biases) and str(tiny_server.engine.info.vocab_size) in error
        error = http.post(COMPLETIONS, json={"prompt": [5, 999999]}).json()["error"]["message"]
        assert "999999" in error and "out of vocabulary" in error
        messages = [{"role": "user", "content": "a"}]
        for seed, code in ((1 << 63, "less_than_equal"), (-(1 << 63) - 1, "greater_than_equal")):
            body = http.post(CHAT, json={"messages": messages, "seed": seed}).json()["error"]
            assert body["code"] == code and body["param"] == "seed"


def test_models_name_what_they_are_made_from(tiny_server: RunningServer) -> None:
    models = {model.id: model for model in tiny_server.client().models.list().data}
    assert models["alias"].root == NAME == models[NAME].root and models[NAME].parent is None


def test_models_have_the_fields_of_anthropics_clients(tiny_server: RunningServer) -> None:
    with tiny_server.http() as http:
        page = http.get("/v1/models").json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == (NAME, "alias", False)
    assert [(model["type"], model["display_name"]) for model in page["data"]] == [("model", NAME), ("model", "alias")]
    created = datetime.fromisoformat(page["data"][0]["created_at"])
    assert created.timestamp() == page["data"][0]["created"]
