"""llama.cpp's routes, and text between a prefix and a suffix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from paceline.errors import PromptError
from paceline.hub.tokenizer import Tokenizer
from paceline.serve.config import ServerConfig
from paceline.serve.fill_in_middle import FillInMiddle, OtherFile
from paceline.serve.vocabulary import vocabulary
from tests.serve.running import CHAT, COMPLETIONS, NAME, RunningServer, serving_model
from tests.support.tiny import byte_tokenizer, tiny_llama

MIDDLE = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>"]
GREEDY = {"temperature": 0, "ignore_eos": True}


def coder_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MIDDLE})
    return tokenizer


@pytest.fixture(scope="module")
def coder(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with serving_model(tiny_llama(vocab_size=264), coder_tokenizer(), ServerConfig((NAME,))) as server:
        yield server


def post(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    with server.http() as client:
        return client.post(path, json=fields)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line]


# --- /completion ------------------------------------------------------------------------------------------------------


def test_a_completion_has_content_counts_and_timings(tiny_server: RunningServer) -> None:
    document = post(tiny_server, "/completion", prompt="abc", n_predict=8, **GREEDY).json()
    expected = post(tiny_server, COMPLETIONS, prompt="abc", max_tokens=8, **GREEDY).json()["choices"][0]["text"]
    assert document["content"] == expected and document["stop_type"] == "limit" and document["stop"]
    assert (document["tokens_predicted"], document["tokens_evaluated"]) == (8, 3)
    assert document["timings"]["prompt_n"] == 3 and document["timings"]["predicted_n"] == 8
    assert document["generation_settings"]["n_predict"] == 8 and document["truncated"] is False


@pytest.mark.slow
def test_the_settings_shown_are_those_in_force() -> None:
    """The server's defaults where the request is silent, and the request's own fields where it is not."""
    config = ServerConfig((NAME,), seed=42, sampling_defaults={"temperature": 0.5, "top_k": 20})
    with serving_model(tiny_llama(), byte_tokenizer(), config) as server:
        shown = post(server, "/completion", prompt="abc", n_predict=2, top_k=3).json()["generation_settings"]
        params = server.http().get("/props").json()["default_generation_settings"]["params"]
    assert (shown["seed"], shown["temperature"], shown["top_k"]) == (42, 0.5, 3)
    assert (params["seed"], params["temperature"], params["top_k"]) == (42, 0.5, 20)


@pytest.mark.slow
def test_a_stream_adds_up_to_the_whole(tiny_server: RunningServer) -> None:
    whole = post(tiny_server, "/completion", prompt="abc", n_predict=8, **GREEDY).json()
    *parts, last = events(post(tiny_server, "/completion", prompt="abc", n_predict=8, stream=True, **GREEDY))
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert sum(len(part["tokens"]) for part in parts) == 8
    assert not any(part["stop"] for part in parts) and last["stop"] and last["timings"]["predicted_n"] == 8


@pytest.mark.slow
def test_a_stop_string_is_named(tiny_server: RunningServer) -> None:
    text = post(tiny_server, "/completion", prompt="abc", n_predict=20, **GREEDY).json()["content"]
    stop = next(character for character in text[3:] if character.isascii())
    document = post(tiny_server, "/completion", prompt="abc", n_predict=20, stop=[stop], **GREEDY).json()
    assert (document["stop_type"], document["stopping_word"]) == ("word", stop)


@pytest.mark.slow
def test_prompts_mix_tokens_and_strings(tiny_server: RunningServer) -> None:
    tokens = byte_tokenizer()("abc").input_ids
    whole = post(tiny_server, "/completion", prompt="abc", n_predict=4, **GREEDY).json()["content"]
    several = post(tiny_server, "/completion", prompt=["abc", tokens], n_predict=4, **GREEDY).json()
    assert [document["content"] for document in several] == [whole, whole]
    mixed = post(tiny_server, "/completion", prompt=[tokens[0], "bc"], n_predict=4, **GREEDY).json()
    assert mixed["content"] == whole and mixed["tokens_evaluated"] == 3


@pytest.mark.slow
def test_each_of_several_answers_has_its_own_counts(tiny_server: RunningServer) -> None:
    """Its tokens too, where they are asked for."""
    body = {"prompt": ["abc", "abcdefg"], "n": 2, "n_predict": 4, **GREEDY}
    documents = post(tiny_server, "/completion", **body).json()
    assert [document["tokens_evaluated"] for document in documents] == [3, 3, 7, 7]
    assert {document["tokens_predicted"] for document in documents} == {4}
    assert [document["tokens_cached"] for document in documents] == [7, 7, 11, 11]
    assert {document["timings"]["predicted_n"] for document in documents} == {4}
    assert not any(document["tokens"] for document in documents)
    several = post(tiny_server, "/completion", **body, return_tokens=True).json()
    assert [len(document["tokens"]) for document in several] == [4] * 4


def test_response_fields_select(tiny_server: RunningServer) -> None:
    fields = ["content", "generation_settings/n_predict"]
    document = post(tiny_server, "/completion", prompt="a", n_predict=3, response_fields=fields).json()
    assert set(document) == set(fields) and document["generation_settings/n_predict"] == 3


@pytest.mark.slow
def test_probabilities_name_their_tokens(tiny_server: RunningServer) -> None:
    fields = {"prompt": "abc", "n_predict": 6, "n_probs": 4, **GREEDY}
    document = post(tiny_server, "/completion", **fields).json()
    entries = document["completion_probabilities"]
    tokens = post(tiny_server, "/completion", **fields, return_tokens=True).json()["tokens"]
    assert [entry["id"] for entry in entries] == tokens and document["tokens"] == []
    for entry in entries:
        assert len(entry["top_logprobs"]) == 4 and entry["top_logprobs"][0]["id"] == entry["id"]
        assert bytes(entry["bytes"]) and entry["logprob"] <= 0
    *parts, _ = events(post(tiny_server, "/completion", stream=True, speculative={"num_draft_tokens": 4}, **fields))
    streamed = [entry for part in parts for entry in part["completion_probabilities"]]
    assert [entry["id"] for entry in streamed] == tokens
    assert [entry["logprob"] for entry in streamed] == pytest.approx([entry["logprob"] for entry in entries], abs=1e-4)
    assert all(len(part["completion_probabilities"]) == len(part["tokens"]) == 1 for part in parts)
    assert "".join(part["content"] for part in parts) == document["content"]


@pytest.mark.slow
def test_alternatives_of_a_sampled_token_are_the_likeliest_in_order(tiny_server: RunningServer) -> None:
    fields = {"prompt": "abc", "n_predict": 24, "n_probs": 4, "temperature": 1.8, "seed": 3, "ignore_eos": True}
    entries = post(tiny_server, "/completion", **fields).json()["completion_probabilities"]
    for entry in entries:
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(values) == 4 and values == sorted(values, reverse=True)
    assert any(entry["logprob"] < entry["top_logprobs"][-1]["logprob"] for entry in entries), "one is further down"


def test_probabilities_after_sampling_are_those_that_were_drawn_from(tiny_server: RunningServer) -> None:
    fields: dict[str, Any] = {"prompt": "abc", "n_predict": 3, "n_probs": 260, "seed": 1, "post_sampling_probs": True}
    refused = post(tiny_server, "/completion", **{**fields, "n_probs": 5}, temperature=0.7)
    assert refused.status_code == 400 and "temperature 1" in refused.json()["error"]["message"]
    document = post(tiny_server, "/completion", **{**fields, "n_probs": 20}, temperature=1).json()
    for entry in document["completion_probabilities"]:
        assert 0 < entry["prob"] <= 1 and 0.05 < sum(other["prob"] for other in entry["top_probs"]) <= 1 + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
def test_biases_are_of_tokens_or_of_strings(tiny_server: RunningServer, by_name: bool, as_text: bool) -> None:
    fields = {"prompt": "abc", "n_predict": 12, "return_tokens": True, **GREEDY}
    before = post(tiny_server, "/completion", **fields).json()["tokens"]
    texts = {token: byte_tokenizer().decode([token]) for token in before}
    token = next(token for token, text in texts.items() if text.isascii() and not text.isdigit())
    key: Any = texts[token] if as_text else token
    biases: Any = {str(key): False} if by_name else [[key, -100]]
    document = post(tiny_server, "/completion", logit_bias=biases, **fields).json()
    assert token not in document["tokens"]
    biased = [entry["token"] for entry in document["generation_settings"]["logit_bias"]]
    assert biased == [token, 257], "and ignore_eos is shown as the bias that it is"


def test_a_body_without_a_model_is_answered_as_llama_cpp_does(tiny_server: RunningServer) -> None:
    body = {"prompt": "abc", **GREEDY}
    native = post(tiny_server, "/completions", n_predict=4, **body).json()
    named = post(tiny_server, "/completions", model=NAME, max_tokens=4, **body).json()
    assert native["content"] == named["choices"][0]["text"] and "choices" not in native


def test_a_prompt_that_is_too_long_is_counted(tiny_server: RunningServer) -> None:
    messages = [{"role": "user", "content": "abc" * 400}]
    response = post(tiny_server, "/chat/completions", messages=messages)
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] > 1200 and error["n_ctx"] == 512 and error["code"] == "context_length_exceeded"
    assert post(tiny_server, "/v1/chat/completions", messages=messages).json()["error"]["type"] == (
        "invalid_request_error"
    )


@pytest.mark.slow
def test_an_output_may_fill_the_context(tiny_server: RunningServer) -> None:
    document = post(tiny_server, "/completion", prompt="abc" * 169, n_predict=64, **GREEDY).json()
    assert document["timings"]["predicted_n"] == 5 and document["truncated"] and document["stop_type"] == "limit"
    assert document["generation_settings"]["n_predict"] == 64
    assert not post(tiny_server, "/completion", prompt="abc", n_predict=4, **GREEDY).json()["truncated"]


def test_pictures_are_refused(tiny_server: RunningServer) -> None:
    prompt = {"prompt_string": "abc"}
    assert post(tiny_server, "/completion", prompt=prompt, n_predict=2).status_code == 200
    assert post(tiny_server, "/completion", prompt={**prompt, "multimodal_data": ["x"]}).status_code == 400


@pytest.mark.parametrize("prompt", [[], [1, {}], [None], [[1, None]], {}, 7, "", [True]])
def test_a_malformed_prompt_is_refused(tiny_server: RunningServer, prompt: object) -> None:
    assert post(tiny_server, "/completion", prompt=prompt, n_predict=2).status_code == 400


# --- /chat/completions ------------------------------------------------------------------------------------------------

TALK = [{"role": "user", "content": "abc"}]


def deltas(server: RunningServer, path: str) -> list[tuple[dict[str, Any], str | None]]:
    response = post(server, path, messages=TALK, max_tokens=5, stream=True, **GREEDY)
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    return [(choice["delta"], choice["finish_reason"]) for choice in choices]


def test_a_stream_opens_and_closes_as_the_path_says(tiny_server: RunningServer) -> None:
    """Without /v1 as llama.cpp does: no content at first, and the end in a chunk of its own."""
    llama, plain = deltas(tiny_server, "/chat/completions"), deltas(tiny_server, CHAT)
    assert llama[0] == ({"role": "assistant", "content": None}, None) and llama[-1] == ({}, "length")
    assert plain[0] == ({"role": "assistant", "content": ""}, None) and plain[-1][1] == "length"
    texts = ["".join(delta.get("content") or "" for delta, _ in stream) for stream in (llama, plain)]
    assert texts[0] == texts[1] != "" and all(reason is None for _, reason in llama[:-1])


def test_a_last_message_of_the_assistant_is_continued(tiny_server: RunningServer) -> None:
    messages = [*TALK, {"role": "assistant", "content": "def"}]

    def prompt(path: str = "/chat/completions", **fields: Any) -> str:
        body = {"messages": messages, "max_tokens": 1, "verbose": True, **fields}
        return str(post(tiny_server, path, **body).json()["__verbose"]["prompt"])

    assert prompt().endswith("def") and prompt() == prompt(continue_final_message=True, add_generation_prompt=False)
    assert not prompt(CHAT).endswith("def") and prompt(add_generation_prompt=True) == prompt(CHAT)


def test_a_chat_that_does_not_fit_is_told_in_llama_cpps_words(tiny_server: RunningServer) -> None:
    error = post(tiny_server, "/chat/completions", messages=[{"role": "user", "content": "a" * 600}]).json()["error"]
    assert error["type"] == "exceed_context_size_error" and error["n_prompt_tokens"] > error["n_ctx"]
    assert "exceeds the available context size" in error["message"]


# --- fill in the middle -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_infill_writes_between_prefix_and_suffix(coder: RunningServer) -> None:
    spelling = "<|fim_prefix|>def f():<|fim_suffix|>\nf()<|fim_middle|>"
    prompt = coder_tokenizer()(spelling).input_ids
    expected = post(coder, COMPLETIONS, prompt=prompt, max_tokens=6, **GREEDY).json()["choices"][0]["text"]
    document = post(coder, "/infill", input_prefix="def f():", input_suffix="\nf()", n_predict=6, **GREEDY).json()
    assert document["content"] == expected and document["tokens_evaluated"] == len(prompt)
    assert document["prompt"] == spelling
    body = {"prompt": "def f():", "suffix": "\nf()", "max_tokens": 6, **GREEDY}
    assert post(coder, COMPLETIONS, **body).json()["choices"][0]["text"] == expected
    ollama = {"model": NAME, "prompt": "def f():", "suffix": "\nf()", "stream": False}
    options = {"num_predict": 6, "temperature": 0}
    response = post(coder, "/api/generate", **ollama, options=options).json()["response"]
    assert expected.startswith(response), "without ignore_eos it may end earlier"


def test_other_files_come_before_the_gap() -> None:
    tokenizer = coder_tokenizer()
    middle = FillInMiddle(vocabulary(Tokenizer(tokenizer)))
    ids = middle.prompt("a", "b", (OtherFile("x.py", "text"),))
    files = "<|repo_name|>myproject\n<|file_sep|>x.py\ntext\n<|file_sep|>filename\n"
    assert ids == tokenizer(f"{files}<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>").input_ids


def test_a_prompt_begins_the_text_in_the_middle(coder: RunningServer) -> None:
    """llama.cpp's documentation: it is added after the token that begins the middle."""
    document = post(coder, "/infill", input_prefix="def ", input_suffix="\n", prompt="f(", n_predict=1).json()
    assert document["prompt"] == "<|fim_prefix|>def <|fim_suffix|>\n<|fim_middle|>f("


@pytest.mark.parametrize("path", ["/infill", COMPLETIONS])
def test_the_middle_ends_where_another_file_begins(coder: RunningServer, path: str) -> None:
    """The bias makes the model write the separator of files at once, which is no end token of its own."""
    separator = coder_tokenizer().convert_tokens_to_ids("<|file_sep|>")
    body = {"input_prefix": "a", "input_suffix": "b"} if path == "/infill" else {"prompt": "a", "suffix": "b"}
    document = post(coder, path, **body, logit_bias={str(separator): 100}, temperature=0, max_tokens=8).json()
    answer = document if path == "/infill" else document["choices"][0]
    assert answer["stop_type" if path == "/infill" else "finish_reason"] in ("eos", "word", "stop")
    assert answer["content" if path == "/infill" else "text"] == ""


@pytest.mark.slow
def test_a_model_without_the_tokens_says_so(tiny_server: RunningServer) -> None:
    for path, fields in (
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
    ):
        response = post(tiny_server, path, **fields)
        assert response.status_code == 400 and "fill-in-the-middle" in response.json()["error"]["message"]
    with pytest.raises(PromptError, match="Coder"):
        FillInMiddle(vocabulary(Tokenizer(byte_tokenizer()))).prompt("a", "b")
    assert post(tiny_server, COMPLETIONS, prompt="a", suffix=None, max_tokens=1).status_code == 200


@pytest.mark.parametrize("extra", [{}, {"filename": "ok"}, {"filename": 123, "text": "abc"}])
def test_a_malformed_file_is_refused(coder: RunningServer, extra: dict[str, Any]) -> None:
    assert post(coder, "/infill", input_prefix="a", input_suffix="b", input_extra=[extra]).status_code == 400


def test_an_editor_may_say_more_about_a_file(coder: RunningServer) -> None:
    """llama.vim sends when it read each one."""
    file = {"text": "x = 1", "time": 1.5, "filename": "x.py"}
    response = post(coder, "/infill", input_prefix="a", input_suffix="b", input_extra=[file], n_predict=1)
    assert response.status_code == 200 and "x.py\nx = 1" in response.json()["prompt"]


# --- n_predict 0 ------------------------------------------------------------------------------------------------------


def test_no_tokens_read_the_prompt_into_the_cache(coder: RunningServer) -> None:
    """llama.vim sends its files ahead like this."""
    fields = {"input_prefix": "warm " * 40, "input_suffix": "b", "temperature": 0}
    document = post(coder, "/infill", **fields, n_predict=0).json()
    assert (document["content"], document["tokens_predicted"], document["stop_type"]) == ("", 0, "limit")
    assert post(coder, "/infill", **fields, n_predict=1).json()["timings"]["cache_n"] > 0


def test_a_stream_of_no_tokens_is_its_last_event(tiny_server: RunningServer) -> None:
    *parts, last = events(post(tiny_server, "/completion", prompt="abc", n_predict=0, n_probs=1, stream=True))
    assert not any(part["content"] or part["tokens"] for part in parts)
    assert last["stop"] and last["tokens_predicted"] == 0 and last["tokens_evaluated"] == 3


# --- /props, /slots ---------------------------------------------------------------------------------------------------


def test_the_server_is_described(tiny_server: RunningServer) -> None:
    props = tiny_server.http().get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 512 and props["total_slots"] == 16
    assert props["model_alias"] == NAME and props["eos_token"] == "</s>" and "message" in props["chat_template"]
    entries = tiny_server.http().get("/slots").json()
    assert len(entries) == 16 and not any(entry["is_processing"] for entry in entries)
