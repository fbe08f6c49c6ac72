"""The engine http and kinds of servers that cannot be installed beside the suite.

A server on a socket answers with events of the shape that vLLM, SGLang and Ollama document: that shows how they are
read, not that today's release still sends them. Servers that are not there at all are here too.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from paceline import SpeculativeDecoder
from paceline.cli import main
from paceline.errors import EngineFailed, OptionError, StepFailed
from tests.support.scripted_http import ScriptedHandler
from tests.support.tiny import byte_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


def opened(url: str, *, tokenizer: Any = None, **options: Any) -> SpeculativeDecoder:
    own = {"url": url, **options.pop("engine_options", {})}
    return SpeculativeDecoder("default", tokenizer=tokenizer, engine="http", engine_options=own, **options)


# --- servers that are not there ---------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_server_that_is_not_running_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineFailed, match=f"the server at {url} cannot be reached"):
        opened(url)
    assert main(["generate", "hi", "--engine", "http", "--engine-option", f"url={url}"]) != 0
    errors = capsys.readouterr().err
    assert "cannot be reached" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs the address"),
        ({"url": "localhost"}, "must be the address of a server"),
        ({"url": 5}, "must be the address of a server"),
        ({"url": "http://localhost:1", "timeout": 0}, "timeout must be"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        SpeculativeDecoder("default", engine="http", engine_options=options)


# --- other kinds of servers -------------------------------------------------------------------------------------------


class Script:
    """What a scripted server answers, and what it was asked. `last`: what it does after its events."""

    def __init__(self, owner: str, events: list[Any], **more: Any) -> None:
        self.models = {"data": [{"id": "m", "owned_by": owner, **more.pop("entry", {})}]}
        self.events, self.metrics = events, more.pop("metrics", "")
        self.last: Callable[[], None] = more.pop("last", lambda: None)
        self.api_key: str | None = more.pop("api_key", None)
        self.bodies: list[Any] = []
        self.paths: list[str] = []


@contextmanager
def scripted(script: Script) -> Iterator[str]:
    """A server on a socket that plays a script."""

    class Handler(ScriptedHandler):
        def answer(self, text: str, status: int = 200) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            if script.api_key and self.headers.get("Authorization") != f"Bearer {script.api_key}":
                self.answer('{"error": {"message": "no such key"}}', 401)
            elif self.path == "/v1/models":
                self.answer(json.dumps(script.models))
            elif self.path == "/metrics" and script.metrics:
                self.answer(script.metrics(len(script.bodies)))
            else:
                self.answer("not found", 404)

        def do_POST(self) -> None:
            script.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            script.paths.append(self.path)
            self.answer("".join(f"data: {json.dumps(event)}\n\n" for event in script.events))
            self.wfile.flush()
            script.last()

    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http_server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http_server.server_address[1]}"
    finally:
        http_server.shutdown()
        http_server.server_close()


def part(text: str, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None, **fields}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 6}}
VLLM_METRICS = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {second}
"""


def test_vllm_returns_token_ids_and_speculation_metrics() -> None:
    summary = {
        "num_spec_steps": 2, "num_draft_tokens": 4, "num_accepted_draft_tokens": 3, "acceptance_histogram": [0, 1, 1],
    }  # fmt: skip
    usage = {**USAGE, "metrics": {"speculative_decoding": summary}}
    events = [part("ab", token_ids=[65, 66]), part("c", token_ids=[67], finish_reason="stop"), usage]
    script = Script("vllm", events, entry={"max_model_len": 4096})
    with scripted(script) as url, opened(url, tokenizer=byte_tokenizer()) as decoder:
        result = decoder.generate("hi", max_new_tokens=6, top_k=3, ignore_eos=True)
        assert decoder.info.max_seq_len == 4096
        with pytest.raises(OptionError, match="decides itself how it drafts"):
            decoder.generate("hi", num_draft_tokens=3)
    assert (result.text, result.token_ids, result.finish_reason) == ("abc", [65, 66, 67], "stop")
    stats = result.stats
    assert (stats.new_tokens, stats.drafted, stats.accepted, stats.steps) == (6, 4, 3, 3)
    assert (stats.offered_at, stats.accepted_at) == ([2, 2], [2, 1])
    body = script.bodies[0]
    assert body["prompt"] == byte_tokenizer()("hi").input_ids and body["return_token_ids"] is True
    assert body["top_k"] == 3 and body["ignore_eos"] is True and script.paths == ["/v1/completions"]


def test_counters_of_the_server_stand_in_for_answers_that_tell_nothing() -> None:
    def metrics(requests: int) -> str:
        counts = {"drafts": 10, "drafted": 20, "accepted": 9, "first": 6, "second": 3}
        if requests:
            counts = {"drafts": 12, "drafted": 24, "accepted": 12, "first": 8, "second": 4}
        return VLLM_METRICS.format(**counts)

    script = Script("vllm", [part("abc", finish_reason="length"), USAGE], metrics=metrics)
    with scripted(script) as url, opened(url) as decoder:
        stats = decoder.generate("hi", max_new_tokens=6).stats
    assert (stats.new_tokens, stats.drafted, stats.accepted, stats.steps) == (6, 4, 3, 3)
    assert (stats.offered_at, stats.accepted_at) == ([2, 2], [2, 1])


def test_sglang_tells_its_draft_tokens() -> None:
    details = {"spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 4, "spec_verify_ct": 3}
    events = [part("abc", finish_reason="stop"), {**USAGE, "sglext": {"spec_tokens_details": details}}]
    script = Script("sglang", events)
    with scripted(script) as url, opened(url) as decoder:
        result = decoder.generate("hi", max_new_tokens=6)
        assert decoder.stats().prompt_tokens == 7
    assert result.text == "abc" and result.token_ids == []
    assert (result.stats.new_tokens, result.stats.drafted, result.stats.accepted) == (6, 4, 3)
    assert script.bodies[0]["return_spec_tokens_details"] is True and script.bodies[0]["prompt"] == "hi"


def test_a_server_of_unknown_kind_gets_openai_fields_alone() -> None:
    delta = {"choices": [{"index": 0, "delta": {"content": "hello"}, "finish_reason": "stop"}]}
    script = Script("library", [delta, USAGE])
    with scripted(script) as url, opened(url) as decoder:
        assert decoder.generate(MESSAGES, max_new_tokens=6, temperature=0.5).text == "hello"
        with pytest.raises(OptionError, match="does not take top_k"):
            decoder.generate("hi", top_k=3)
    body = script.bodies[0]
    assert script.paths == ["/v1/chat/completions"] and body["messages"] == MESSAGES
    assert not {"top_k", "x_paceline", "return_token_ids", "speculative"} & set(body)


def test_a_key_is_sent_and_its_absence_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with scripted(Script("vllm", [part("a", finish_reason="stop")], api_key="secret")) as url:
        with pytest.raises(OptionError, match="OPENAI_API_KEY"):
            opened(url)
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        with opened(url) as decoder:
            assert decoder.generate("hi").text == "a"


@pytest.mark.parametrize("events", [[part("a")], [part("a"), {"error": {"message": "the model broke", "code": 500}}]])
def test_an_answer_that_breaks_off_is_an_error_and_not_an_end(events: list[Any]) -> None:
    with scripted(Script("vllm", events)) as url, opened(url) as decoder:
        outputs = decoder.stream("hi")
        assert next(outputs).text == "a"
        with pytest.raises((EngineFailed, StepFailed), match=r"ended too early|the model broke"):
            next(outputs)
        assert decoder.stats().failures == 1 and not decoder.stats().running


def test_a_server_that_falls_silent_is_given_up_after_the_timeout() -> None:
    done = threading.Event()
    script = Script("vllm", [part("a")], last=lambda: done.wait(60) and None)
    with scripted(script) as url, opened(url, engine_options={"timeout": 0.5}) as decoder:
        started = time.monotonic()
        with pytest.raises(EngineFailed, match="was lost"):
            decoder.generate("hi")
        assert time.monotonic() - started < 30
        done.set()
