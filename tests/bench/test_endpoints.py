"""Two servers compared with each other; here two small ones that draw from a given distribution."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from paceline.bench.endpoints import Endpoint, EndpointPair, EndpointPlan, compare_endpoints
from paceline.bench.outcome import Outcome
from paceline.cli import main
from paceline.errors import EngineClosed, OptionError
from tests.support.scripted_http import ScriptedHandler

Answer = Callable[[dict[str, Any]], str]  # request -> output
DICE = [0.5, 0.3, 0.2]


def dice(probabilities: list[float], stream: int = 0) -> Answer:
    """a, b or c with these probabilities. Draws without a seed come from a stream of the server's own, so that how
    often each came after so many draws does not change from run to run."""
    unseeded = random.Random(stream)

    def answer(request: dict[str, Any]) -> str:
        rng = random.Random(request["seed"]) if "seed" in request else unseeded
        return rng.choices(["a", "b", "c"], probabilities)[0]

    return answer


@contextmanager
def server(
    answer: Answer, greedy: str = "yes and no", gap: float = 3.0, api_key: str = "", seconds: float = 0.0
) -> Iterator[str]:
    """A server that answers so, and with `greedy` at temperature 0."""

    class Handler(ScriptedHandler):
        def do_GET(self) -> None:
            self._reply({"data": [{"id": "dice"}]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(seconds)
            if request["temperature"] == 0:
                top = {"logprobs": {"top_logprobs": [{"yes": -0.1, "no": -0.1 - gap}]}} if "logprobs" in request else {}
                self._reply({"choices": [{"text": greedy, **top}]})
                return
            self._reply({"choices": [{"text": answer(request)}]})

        def _reply(self, body: dict[str, Any]) -> None:
            right = not api_key or self.headers.get("Authorization") == f"Bearer {api_key}"
            data = json.dumps(body if right else {"error": "wrong key"}).encode()
            self.send_response(200 if right else 401)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # clients and servers are threads of one process, and each request passes between them
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        sys.setswitchinterval(interval)
        running.shutdown()
        running.server_close()


def outcomes(tested: str, reference: str, draws: int = 100) -> list[Outcome]:
    """Greedy, sampled without seeds, sampled with seeds."""
    pair = EndpointPair(Endpoint.connect(tested), Endpoint.connect(reference))
    return [check.outcome for check in compare_endpoints(pair, EndpointPlan(["x"], draws=draws))]


def audit(tested: str, reference: str, *more: str) -> int:
    return main(["audit", "--endpoint", tested, "--against", reference, "--quick", *more])


@pytest.mark.slow
def test_two_servers_of_one_distribution_are_lossless(capsys: pytest.CaptureFixture[str]) -> None:
    """The probability of a false alarm is 0.001, and the draws are fixed."""
    with server(dice(DICE)) as tested, server(dice(DICE, 1)) as reference:
        assert audit(tested, reference, "--draws", "500", "--seconds", "200") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("lossless: 3 checks, false alarm probability 0.001")
    assert "of the commonest output, more or less, in any setting would have been found with 95% certainty" in last


@pytest.mark.slow
def test_another_distribution_is_detected() -> None:
    """200 draws of each; (.5, .3, .2) and (.1, .3, .6) are confused with probability far below 1e-6."""
    with server(dice(DICE)) as tested, server(dice([0.1, 0.3, 0.6])) as reference:
        assert outcomes(tested, reference, 200)[1:] == [Outcome.DIFFERENT] * 2


@pytest.mark.slow
def test_a_server_that_lies_where_no_seed_is_given_is_detected(capsys: pytest.CaptureFixture[str]) -> None:
    """Requests with a seed may be verified by another rule than those without."""

    def liar(request: dict[str, Any]) -> str:
        return dice(DICE)(request) if "seed" in request else "a"

    with server(liar) as tested, server(dice(DICE)) as reference:
        assert audit(tested, reference, "--draws", "200", "--json") == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["outcome"] == "different"
    assert len(document["different"]) == 1
    assert "without seeds" in document["different"][0]


@pytest.mark.slow
def test_servers_with_no_output_in_common_are_different() -> None:
    """One output 100 times of 100 against outputs that come once each, and outputs that come twice on one side only."""
    ids = iter(range(10**6))
    with server(lambda request: "out") as tested, server(lambda request: f"n{next(ids)}") as reference:
        assert outcomes(tested, reference)[1:] == [Outcome.DIFFERENT] * 2
    even = (lambda request: f"{random.randrange(50)} ok", lambda request: f"{50 + random.randrange(50)} ok")
    with server(even[0]) as tested, server(even[1]) as reference:
        assert outcomes(tested, reference)[1:] == [Outcome.DIFFERENT] * 2


@pytest.mark.slow
def test_outputs_that_never_repeat_show_nothing() -> None:
    ids = iter(range(10**6))
    with server(lambda request: f"n{next(ids)}") as tested, server(lambda request: f"n{next(ids)}") as reference:
        assert outcomes(tested, reference, 200)[1:] == [Outcome.NOT_SHOWN] * 2


@pytest.mark.slow
def test_the_time_is_kept_and_too_few_draws_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with server(dice(DICE), seconds=0.02) as tested, server(dice(DICE)) as reference:
        started = time.perf_counter()
        assert audit(tested, reference, "--seconds", "0.5") == 3
        assert time.perf_counter() - started < 60
    out = capsys.readouterr().out
    assert "at least 200 are needed" in out
    assert out.splitlines()[-1].startswith("not shown: sampled endpoint = reference T=1 without seeds; ")


@pytest.mark.slow
def test_a_server_with_a_key_is_audited_with_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with server(dice(DICE), api_key="k1") as tested, server(dice(DICE), api_key="k1") as reference:
        assert audit(tested, reference, "--seconds", "0.2") == 2
        assert "--api-key" in capsys.readouterr().err
        assert audit(tested, reference, "--seconds", "0.2", "--api-key", "k1") == 3
        monkeypatch.setenv("OPENAI_API_KEY", "k1")
        assert audit(tested, reference, "--seconds", "0.2") == 3
        assert "k1" not in capsys.readouterr().out


@pytest.mark.slow
def test_greedy_outputs_that_differ_are_a_bug_unless_the_reference_has_a_near_tie() -> None:
    same = dice([1, 0, 0])
    with server(same, "yes and no") as tested, server(same, "yes and yes") as reference:
        assert outcomes(tested, reference, 8)[0] is Outcome.DIFFERENT
    with server(same, "yes and no") as tested, server(same, "yes and yes", gap=0.01) as reference:
        assert outcomes(tested, reference, 8)[0] is Outcome.LOSSLESS


def test_a_server_that_cannot_be_reached_is_a_clear_error() -> None:
    with pytest.raises(EngineClosed, match="cannot be reached"):
        Endpoint.connect("http://127.0.0.1:9")
    with pytest.raises((OptionError, EngineClosed), match="127"):
        Endpoint("http://127.0.0.1:9/v1", "m").text("x")
