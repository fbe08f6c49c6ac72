"""A server with OpenAI's API whose answers are a function of the request: other servers than ours, and their faults."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

from tests.support.scripted_http import ScriptedHandler

Json = dict[str, Any]
Reply = Callable[[Json], Json | None]  # request body -> choice; None: the request is refused


@contextmanager
def scripted_server(reply: Reply, owner: str = "someone") -> Iterator[str]:
    """Chat completions only, whole and streamed."""

    class Handler(ScriptedHandler):
        protocol_version = "HTTP/1.1"
        num_requests = 0  # on this connection

        def do_GET(self) -> None:
            entry = {"id": "scripted", "owned_by": owner, "max_model_len": 4096}
            self._send(200, {"data": [entry]} if self.path == "/v1/models" else {})

        def do_POST(self) -> None:
            self.num_requests += 1
            if self.num_requests > 1:  # as one that has timed out: closed without an answer
                self.close_connection = True
                return
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            choice = reply(body) if self.path == "/v1/chat/completions" else None
            if choice is None:
                self._send(400, {"error": {"message": "not here"}})
            elif body.get("stream"):
                self._stream(choice)
            else:
                self._send(200, {"choices": [choice], "usage": {"prompt_tokens": 80, "completion_tokens": 4}})

        def _send(self, status: int, document: Json) -> None:
            self._write(status, "application/json", json.dumps(document).encode())

        def _stream(self, choice: Json) -> None:
            message = dict(choice["message"])
            message["tool_calls"] = [{"index": 0, **call} for call in message.get("tool_calls") or []]
            chunks = [{**choice, "delta": message, "message": None}]
            text = "".join(f"data: {json.dumps({'choices': [chunk]})}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
            self._write(200, "text/event-stream", text.encode())

        def _write(self, status: int, kind: str, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()


def text_choice(text: str, finish_reason: str = "stop") -> Json:
    return {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}


def call_choice(arguments: str) -> Json:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"message": message, "finish_reason": "tool_calls"}


def with_gap(choice: Json, body: Json, others: list[str], gap: float) -> Json:
    """The choice with log-probabilities where they are asked for: one token a word, `gap` to each alternative."""
    if not body.get("logprobs"):
        return choice
    content = []
    for number, word in enumerate(choice["message"]["content"].split()):
        space = " " if number else ""
        values = {space + word: -0.5, **{space + other: -0.5 - gap for other in others if other != word}}
        top = [{"token": token, "logprob": value, "bytes": list(token.encode())} for token, value in values.items()]
        content.append({**top[0], "top_logprobs": top})
    return {**choice, "logprobs": {"content": content}}
