"""Keys, queues, time-outs, headers, logs, metrics."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from paceline.errors import OptionError
from paceline.serve.access_log import JsonLines
from paceline.serve.auth import Keys
from paceline.serve.limits import AdmissionControl, strict_json
from paceline.serve.settings import Limits, ServerConfig
from tests.serve.running import NAME, Running, running, slowed

PLAIN = "/v1/completions"
SECRET, OTHER = "correct horse battery", "another key entirely"
LONG = {"prompt": "some text", "max_tokens": 450, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def guarded(tiny_folder: Path) -> Iterator[Running]:
    limits = Limits(queue=2, per_key=2, seconds=1.5, choices=4, prompt_tokens=64, new_tokens=460)
    friend = ("http://friend.example",)
    settings = ServerConfig((NAME,), 1, keys=(SECRET, OTHER), origins=friend, log_prompts=True, limits=limits)
    with running(str(tiny_folder), settings, kv_cache_tokens=1024, residents=0) as served:
        yield served


def bearer(key: str = SECRET) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json"])
def test_without_a_key_there_is_only_the_page_and_health(guarded: Running, path: str) -> None:
    for headers in ({}, bearer("wrong"), {"Authorization": SECRET}, {"Authorization": f"Basic {SECRET}"}):
        answer = guarded.http(**headers).get(path)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert guarded.http(**bearer()).get(path).status_code == 200
    assert guarded.http().get("/health").status_code == 200 and guarded.http().get("/").status_code == 200


def test_a_body_is_not_read_from_who_may_not_come_in(guarded: Running) -> None:
    answer = guarded.http().post(PLAIN, content=b"{" * 100, headers={"Content-Type": "application/json"})
    assert answer.status_code == 401


def test_the_client_knows_a_wrong_key(guarded: Running) -> None:
    with pytest.raises(openai.AuthenticationError):
        guarded.client("wrong").models.list()
    assert guarded.client(OTHER).models.list().data


def test_keys_look_at_every_key_and_keep_none_in_the_clear() -> None:
    keys = Keys((SECRET, OTHER))
    assert keys.owner(f"Bearer {OTHER}") and keys.owner(f"bearer {SECRET}") != keys.owner(f"bearer {OTHER}")
    assert keys.owner("Bearer \udcff") is None and keys.owner("") is None
    assert SECRET not in repr(vars(keys))
    with pytest.raises(OptionError, match="8 characters"):
        ServerConfig((NAME,), keys=("short",))


# --- how much at a time -----------------------------------------------------------------------------------------------


def test_more_than_the_queue_holds_is_told_to_come_back(guarded: Running) -> None:
    def one(number: int) -> Any:
        key = SECRET if number % 2 else OTHER
        return guarded.http(**bearer(key)).post(PLAIN, json={**LONG, "max_tokens": 60})

    with slowed(guarded, 0.01), ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(one, range(10)))
    found = {answer.status_code for answer in answers}
    assert found <= {200, 408, 429} and 429 in found
    turned_away = [answer for answer in answers if answer.status_code == 429]
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in turned_away)
    assert {answer.json()["error"]["code"] for answer in turned_away} <= {"queue_full", "key_busy"}
    guarded.quiet()


def test_the_gate_counts_texts_and_keys() -> None:
    gate = AdmissionControl(Limits(queue=1, per_key=2), batch=2)
    with gate.admit("a", 2), pytest.raises(Exception, match="waiting"), gate.admit("b", 2):
        pass
    with gate.admit("a", 1), gate.admit("a", 1), pytest.raises(Exception, match="in progress"), gate.admit("a", 1):
        pass
    assert gate.in_flight == 0
    gate.closing = True
    with pytest.raises(Exception, match="shutting down"), gate.admit("a", 1):
        pass


def test_a_request_that_takes_too_long_is_ended(guarded: Running) -> None:
    guarded.quiet()
    with slowed(guarded, 0.05):
        answer = guarded.http(**bearer()).post(PLAIN, json=LONG)
        assert answer.status_code == 408 and answer.json()["error"]["code"] == "timeout"
        events = guarded.http(**bearer()).post(PLAIN, json={**LONG, "stream": True}).text.split("\n\n")
        assert "timeout" in [event for event in events if event][-1]
    guarded.quiet()


@pytest.mark.parametrize("wrong", [{"prompt": "x" * 80}, {"max_tokens": 461}, {"n": 5}, {"prompt": ["a"] * 5}])
def test_one_request_has_its_limits(guarded: Running, wrong: dict[str, Any]) -> None:
    answer = guarded.http(**bearer()).post(PLAIN, json={"prompt": "a", "max_tokens": 1, **wrong})
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("wrong", [{"body_bytes": 0}, {"seconds": float("nan")}, {"queue": -1}])
def test_impossible_limits_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Limits(**wrong)


def test_numbers_that_are_none_are_no_json() -> None:
    for body in (b"NaN", b'{"a": Infinity}', b"\xff", b"[" * 70 + b"]" * 70):
        with pytest.raises(Exception, match="body"):
            strict_json(body)
    assert strict_json(b'{"a": [1, 2.5, null, "x"]}') == {"a": [1, 2.5, None, "x"]}


# --- headers, logs, numbers -------------------------------------------------------------------------------------------


def test_other_origins_may_not_call_unless_asked(guarded: Running, tiny: Running) -> None:
    foreign = {"Origin": "http://foe.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in tiny.http(**foreign).options("/v1/models").headers
    assert "access-control-allow-origin" not in guarded.http(**foreign).get("/health").headers
    friend = guarded.http(Origin="http://friend.example").get("/health")
    assert friend.headers["access-control-allow-origin"] == "http://friend.example"


def test_answers_carry_an_id_and_protective_headers(tiny: Running) -> None:
    headers = tiny.http().get("/").headers
    assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
    assert "default-src 'self'" in headers["content-security-policy"] and "server" not in headers
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"


class Kept(logging.Handler):
    """Keeps what a logger is told, on the logger itself: a configured server has cut its way up."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(JsonLines())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture()
def logged() -> Iterator[list[str]]:
    log, kept = logging.getLogger("paceline.serve"), Kept()
    before = log.level
    log.addHandler(kept)
    log.setLevel(logging.INFO)
    yield kept.lines
    log.removeHandler(kept)
    log.setLevel(before)


def request_line(lines: list[str]) -> dict[str, Any]:
    """The line of the request just made; it is written after the answer has left."""
    until = time.monotonic() + 10
    while not lines and time.monotonic() < until:
        time.sleep(0.01)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def test_the_log_is_json_without_prompts(tiny: Running, logged: list[str]) -> None:
    tiny.http().post(PLAIN, json={"prompt": "a very secret prompt", "max_tokens": 3, "ignore_eos": True})
    last = request_line(logged)
    assert "secret" not in "".join(logged)
    assert last["route"] == PLAIN and last["status"] == 200 and last["new_tokens"] == 3 and last["prompt_tokens"] == 20


def test_prompts_are_logged_only_if_asked(guarded: Running, logged: list[str]) -> None:
    guarded.http(**bearer()).post(PLAIN, json={"prompt": "not so secret", "max_tokens": 3})
    assert request_line(logged)["prompts"] == ["not so secret"] and SECRET not in "".join(logged)


def number(text: str, name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}[{{ ]", line))


def test_metrics_count_what_happened(tiny: Running) -> None:
    tiny.quiet()
    before = tiny.http().get("/metrics").text
    asked = {"prompt": "again and again and again and", "max_tokens": 20, "temperature": 0}
    tiny.http().post(PLAIN, json={**asked, "speculative": {"method": "lookahead", "num_draft_tokens": 3}})
    tiny.quiet()
    after = tiny.http().get("/metrics").text

    def risen(name: str) -> float:
        return number(after, name) - number(before, name)

    assert risen("paceline_generated_tokens_total") == 20
    assert risen("paceline_drafted_tokens_total") > 0
    assert risen("paceline_time_to_first_token_seconds_count") == 1
    assert risen("paceline_draft_tokens_count") == risen("paceline_steps_total") > 0
    assert risen("paceline_offered_at_position_total") == risen("paceline_drafted_tokens_total")
    assert risen("paceline_prompt_tokens_total") == 29
    assert 'paceline_requests_total{route="/v1/completions",status="200"}' in after
    assert number(after, "paceline_cache_pages") == 512 and number(after, "paceline_running") == 0


def test_unknown_paths_do_not_become_labels(tiny: Running) -> None:
    tiny.http().get("/some/path/nobody/knows")
    assert "nobody" not in tiny.http().get("/metrics").text
