"""Two servers held against each other; here two small ones that only know how to throw dice."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from paceline.bench.audit import Outcome
from paceline.bench.endpoints import Endpoint, EndpointPlan, compare_endpoints
from paceline.errors import EngineClosed, OptionError


@contextmanager
def server(words: list[float], greedy: str = "yes and no", gap: float = 3.0) -> Iterator[str]:
    """A server that says one of three words with these probabilities, or `greedy` at temperature 0."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._say({"data": [{"id": "dice"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if asked["temperature"] == 0:
                top = {"logprobs": {"top_logprobs": [{"yes": -0.1, "no": -0.1 - gap}]}} if "logprobs" in asked else {}
                self._say({"choices": [{"text": greedy, **top}]})
                return
            output = random.Random(asked["seed"]).choices(["a", "b", "c"], words)[0]
            self._say({"choices": [{"text": output}]})

        def _say(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()


def outcomes(one: str, other: str, **changes: Any) -> list[Outcome]:
    plan = EndpointPlan(["x"], draws=150, **changes)
    return [check.outcome for check in compare_endpoints(Endpoint.reach(one), Endpoint.reach(other), plan)]


def test_two_servers_that_say_the_same_pass() -> None:
    with server([0.5, 0.3, 0.2]) as one, server([0.5, 0.3, 0.2]) as other:
        assert outcomes(one, other) == [Outcome.PASSED, Outcome.PASSED]


def test_another_distribution_is_found() -> None:
    """150 draws of each; (.5, .3, .2) and (.1, .3, .6) are confused with probability far below 1e-6."""
    with server([0.5, 0.3, 0.2]) as one, server([0.1, 0.3, 0.6]) as other:
        assert outcomes(one, other)[1] is Outcome.FAILED


def test_greedy_texts_that_part_are_a_bug_unless_the_reference_calls_it_a_tie() -> None:
    with server([1, 0, 0], "yes and no") as one, server([1, 0, 0], "yes and yes") as other:
        assert outcomes(one, other)[0] is Outcome.FAILED
    with server([1, 0, 0], "yes and no") as one, server([1, 0, 0], "yes and yes", gap=0.01) as other:
        assert outcomes(one, other)[0] is Outcome.PASSED


def test_a_server_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(EngineClosed, match="cannot be reached"):
        Endpoint.reach("http://127.0.0.1:9")
    with pytest.raises((OptionError, EngineClosed), match="127"):
        Endpoint("http://127.0.0.1:9/v1", "m").text("x")
