"""Scenarios on servers that are not ours: what is refused is not shown, near-ties are told from faults."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from tests.doctor.scripted_server import Json, call_choice, scripted_server, text_choice, with_gap

pytestmark = pytest.mark.slow
GOOD_JSON = json.dumps({"place": "sea", "open": True, "grade": "low", "tags": ["wet"]})
GOOD_ARGUMENTS = json.dumps({"city": "Oslo", "days": 3})


def doctor(url: str, folder: Path, *options: str) -> Any:
    path = folder / "report.json"
    status = main(["doctor", url, "--quick", "--seed", "1", "--json", str(path), *options])
    return {**json.loads(path.read_text()), "exit_status": status}


def statuses(report: Any) -> list[str]:
    return [check["status"] for scenario in report["scenarios"] for check in scenario["checks"]]


def plain(body: Json) -> Json | None:
    """The same text for the same prompt; no tools, no log-probabilities, no response formats."""
    if set(body) & {"tools", "logprobs", "response_format"}:
        return None
    return text_choice(f"{sum(map(ord, str(body['messages'])))} is all there is to say here.")


def test_what_a_server_refuses_is_not_shown_and_never_ok(tmp_path: Path) -> None:
    with scripted_server(plain) as url:
        report = doctor(url, tmp_path, "--scenarios", "tools,json-schema,logprobs,acceptance,speculation")
    assert report["exit_status"] == 3 and report["status"] == "not shown"
    assert set(statuses(report)) == {"not shown"}


def test_a_server_that_answers_nothing_is_told_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(lambda body: None) as url:
        assert main(["doctor", url, "--quick"]) == 2
    printed = capsys.readouterr().err
    assert "takes neither chat completions nor completions (it answered 400: " in printed and "not here" in printed


def test_differences_where_a_server_gives_no_alternatives_are_not_shown(tmp_path: Path) -> None:
    """A near-tie under speculation cannot be told from a fault there: 1 answer of 5 differs."""
    asked = itertools.count()

    def reply(body: Json) -> Json | None:
        if set(body) & {"tools", "response_format"}:
            return None
        differs = body.get("stream") and not body.get("logprobs") and next(asked) == 1
        choice = text_choice("It rains here and there" if differs else "It rains here and now")
        with_logprobs = with_gap(choice, body, [], 0.0)
        for entry in (with_logprobs.get("logprobs") or {}).get("content", ()):
            entry |= {"logprob": 0.0, "top_logprobs": []}
        return with_logprobs

    with scripted_server(reply) as url:
        report = doctor(url, tmp_path, "--scenarios", "streaming")
    assert report["exit_status"] == 3 and "fault" not in statuses(report)


def test_a_server_with_the_bare_api_is_examined_as_far_as_it_goes(tmp_path: Path) -> None:
    with scripted_server(plain) as url:
        report = doctor(url, tmp_path, "--scenarios", "prefix-cache,streaming,concurrency")
    assert report["exit_status"] == 0 and "ok" in statuses(report)
    details = [check["detail"] for scenario in report["scenarios"] for check in scenario["checks"]]
    assert any("not shown: the server has no completions" in detail for detail in details)


@pytest.mark.parametrize(
    ("text", "status"), [(GOOD_JSON, "ok"), (GOOD_JSON[:-1], "fault"), ('{"place": "moon"}', "fault")]
)
def test_structured_output_must_match_its_schema(text: str, status: str, tmp_path: Path) -> None:
    with scripted_server(lambda body: text_choice(text)) as url:
        report = doctor(url, tmp_path, "--scenarios", "json-schema")
    assert statuses(report)[0] == status
    assert report["exit_status"] == (1 if status == "fault" else 0)


def test_the_schema_holds_for_what_comes_after_the_reasoning(tmp_path: Path) -> None:
    def leaks(body: Json) -> Json:
        if "chat_template_kwargs" not in body:
            return text_choice(GOOD_JSON)
        choice = text_choice(f"</think>{GOOD_JSON}")
        choice["message"]["reasoning_content"] = "let me see"
        return choice

    with scripted_server(leaks) as url:
        report = doctor(url, tmp_path, "--scenarios", "json-schema")
    assert statuses(report)[:2] == ["ok", "fault"]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(GOOD_ARGUMENTS, "ok"), (GOOD_ARGUMENTS[:-2], "fault"), ('{"city": "Bonn", "days": 1}', "fault")],
)
def test_a_forced_tool_call_must_have_valid_arguments(arguments: str, status: str, tmp_path: Path) -> None:
    with scripted_server(lambda body: call_choice(arguments)) as url:
        report = doctor(url, tmp_path, "--scenarios", "tools")
    assert statuses(report)[0] == status


def test_a_server_that_constrains_strict_functions_alone_is_no_fault(tmp_path: Path) -> None:
    """As vLLM does, and as OpenAI's API promises no more."""

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        are_strict = all(tool["function"].get("strict") for tool in body.get("tools", ()))
        return call_choice(GOOD_ARGUMENTS if are_strict else '"anything"')

    with scripted_server(reply) as url:
        report = doctor(url, tmp_path, "--scenarios", "tools")
    assert statuses(report)[0] == "ok"


def test_a_tool_call_that_differs_when_streamed_is_found(tmp_path: Path) -> None:
    def differs(body: Json) -> Json:
        return call_choice(GOOD_ARGUMENTS.replace("3", "4") if body.get("stream") else GOOD_ARGUMENTS)

    with scripted_server(differs) as url:
        report = doctor(url, tmp_path, "--scenarios", "tools")
    assert report["exit_status"] == 1 and statuses(report)[2] == "fault"


# --- near-ties --------------------------------------------------------------------------------------------------------


def flipping(gap: float, every: int) -> Any:
    """Every so many answers to one prompt end in another last word, whose log-probability is `gap` lower."""
    asked: Counter[str] = Counter()

    def reply(body: Json) -> Json:
        key = str(body["messages"])
        asked[key] += 1
        last = "dusk" if asked[key] % every == 0 else "dawn"
        return with_gap(text_choice(f"it ends at {last}"), body, ["dusk", "dawn"], gap)

    return reply


def test_answers_that_part_at_a_near_tie_are_counted_and_no_fault(tmp_path: Path) -> None:
    prompts = itertools.count()

    def reply(body: Json) -> Json:
        """Of all requests one in nine flips."""
        last = "dusk" if next(prompts) % 9 == 8 else "dawn"
        return with_gap(text_choice(f"it ends at {last}"), body, ["dusk", "dawn"], 0.1)

    with scripted_server(reply) as url:
        report = doctor(url, tmp_path, "--scenarios", "prefix-cache")
    assert report["exit_status"] == 0
    details = [check["detail"] for scenario in report["scenarios"] for check in scenario["checks"]]
    assert any("differ at a near-tie" in detail for detail in details)


def test_the_same_difference_between_tokens_far_apart_is_a_fault(tmp_path: Path) -> None:
    with scripted_server(flipping(gap=2.0, every=2)) as url:
        report = doctor(url, tmp_path, "--scenarios", "prefix-cache")
    assert report["exit_status"] == 1
    first = report["scenarios"][0]["checks"][0]["faults"][0]
    assert first["expected"] == "it ends at dawn" and first["got"] == "it ends at dusk"
    assert len(first["curl"]) == 3  # A, B, A again


def test_near_tie_decides_by_the_option(tmp_path: Path) -> None:
    with scripted_server(flipping(gap=2.0, every=2)) as url:
        report = doctor(url, tmp_path, "--scenarios", "prefix-cache", "--near-tie", "3")
    assert report["near_tie_logprob"] == 3 and report["exit_status"] == 0


def test_an_engine_is_told_by_its_owner_and_kept_off_its_prefix_cache(tmp_path: Path) -> None:
    salts: list[str] = []

    def reply(body: Json) -> Json:
        salts.extend([body["cache_salt"]] if "cache_salt" in body else [])
        return with_gap(text_choice(f"{len(str(body['messages']))} words"), body, ["none"], 3.0)

    with scripted_server(reply, owner="vllm") as url:
        report = doctor(url, tmp_path, "--scenarios", "prefix-cache")
    assert report["exit_status"] == 0 and len(salts) == len(set(salts)) == 4
    salts.clear()
    with scripted_server(reply) as url:
        doctor(url, tmp_path, "--scenarios", "prefix-cache", "--engine", "vllm")
    assert len(salts) == 4


def test_a_server_that_breaks_is_a_fault_with_its_request(tmp_path: Path) -> None:
    def reply(body: Json) -> Json:
        if body.get("tools"):
            raise ConnectionError("the worker died")
        return text_choice("fine")

    with scripted_server(reply) as url:
        report = doctor(url, tmp_path, "--scenarios", "tools")
    assert report["exit_status"] == 1
    fault = report["scenarios"][0]["checks"][0]["faults"][0]
    assert "the connection broke" in fault["message"] and "get_weather" in fault["curl"][0]
