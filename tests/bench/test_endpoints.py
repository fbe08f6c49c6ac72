"""Two servers compared with each other; here two small ones that draw from a given distribution."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from paceline.bench.audit import CheckStatus
from paceline.bench.endpoints import Endpoint, EndpointPair, EndpointPlan, compare_endpoints
from paceline.errors import EngineClosed, OptionError


@contextmanager
def server(probabilities: list[float], greedy: str = "yes and no", gap: float = 3.0) -> Iterator[str]:
    """A server that returns a, b or c with these probabilities, and `greedy` at temperature 0."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._reply({"data": [{"id": "dice"}]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if request["temperature"] == 0:
                top = {"logprobs": {"top_logprobs": [{"yes": -0.1, "no": -0.1 - gap}]}} if "logprobs" in request else {}
                self._reply({"choices": [{"text": greedy, **top}]})
                return
            output = random.Random(request["seed"]).choices(["a", "b", "c"], probabilities)[0]
            self._reply({"choices": [{"text": output}]})

        def _reply(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()


def statuses(tested: str, reference: str) -> list[CheckStatus]:
    pair = EndpointPair(Endpoint.connect(tested), Endpoint.connect(reference))
    return [check.status for check in compare_endpoints(pair, EndpointPlan(["x"], draws=150))]


@pytest.mark.slow
def test_two_servers_of_one_distribution_pass() -> None:
    with server([0.5, 0.3, 0.2]) as tested, server([0.5, 0.3, 0.2]) as reference:
        assert statuses(tested, reference) == [CheckStatus.PASSED, CheckStatus.PASSED]


@pytest.mark.slow
def test_another_distribution_is_detected() -> None:
    """150 draws of each; (.5, .3, .2) and (.1, .3, .6) are confused with probability far below 1e-6."""
    with server([0.5, 0.3, 0.2]) as tested, server([0.1, 0.3, 0.6]) as reference:
        assert statuses(tested, reference)[1] is CheckStatus.FAILED


@pytest.mark.slow
def test_greedy_outputs_that_differ_are_a_bug_unless_the_reference_has_a_near_tie() -> None:
    with server([1, 0, 0], "yes and no") as tested, server([1, 0, 0], "yes and yes") as reference:
        assert statuses(tested, reference)[0] is CheckStatus.FAILED
    with server([1, 0, 0], "yes and no") as tested, server([1, 0, 0], "yes and yes", gap=0.01) as reference:
        assert statuses(tested, reference)[0] is CheckStatus.PASSED


def test_a_server_that_cannot_be_reached_is_a_clear_error() -> None:
    with pytest.raises(EngineClosed, match="cannot be reached"):
        Endpoint.connect("http://127.0.0.1:9")
    with pytest.raises((OptionError, EngineClosed), match="127"):
        Endpoint("http://127.0.0.1:9/v1", "m").text("x")
