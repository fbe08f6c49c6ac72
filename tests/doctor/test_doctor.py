"""`paceline doctor` finds every fault that is put into our own server, and none in a healthy one."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.doctor.scenario import all_scenarios
from tests.doctor.faulty_server import FAULTS, wrong_logprobs
from tests.serve.running import RunningServer

FIVE_MINUTES = 300.0


def doctor(server: RunningServer, folder: Path, seed: int, *options: str) -> Any:
    """The exit status and the JSON report of the command. The seed fixes all prompts: tests differ in their draws."""
    path = folder / "report.json"
    status = main(["doctor", server.url, "--quick", "--seed", str(seed), "--json", str(path), *options])
    report = json.loads(path.read_text())
    report["exit_status"] = status
    return report


def checks_of(report: Any) -> list[Any]:
    return [check for scenario in report["scenarios"] for check in scenario["checks"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_by_its_scenario(name: str, doctor_server: RunningServer, tmp_path: Path) -> None:
    """Greedy faults are found in every run: the prompts are fixed. Each sampled one is missed with probability below
    1e-6. Wrong q: the chi² of 400 first tokens is non-central by 152 on 11 degrees of freedom, and 33 is enough
    (8.5e-13). Lost temperature: outputs repeat themselves 9.0 standard deviations less than by chance, give or take
    0.85, and 3.9 are enough (2e-9; 4,000 simulated runs lie between 5.9 and 11.6).
    Seeds that are ignored: eight answers of 24 tokens would have to come twice.

    Server and doctor share this process, so its CPU time bounds what a quiet machine takes."""
    planted, started = FAULTS[name], time.process_time()
    with planted.fault():
        report = doctor(doctor_server, tmp_path, planted.seed, "--scenarios", planted.scenario)
    assert time.process_time() - started < FIVE_MINUTES
    assert report["exit_status"] == 1 and report["status"] == "fault"
    faults = [fault for check in checks_of(report) for fault in check["faults"]]
    assert faults and all(line.startswith("curl -sS ") for fault in faults for line in fault["curl"])
    doctor_server.wait_until_idle(120)


@pytest.mark.slow
def test_a_healthy_server_raises_no_alarm(doctor_server: RunningServer, tmp_path: Path) -> None:
    """All scenarios once. Of the 0.001 that a run may spend on false alarms, one scenario in thirteen draws: 8e-5."""
    report = doctor(doctor_server, tmp_path, 20)
    assert report["exit_status"] == 0, [check for check in checks_of(report) if check["faults"]]
    assert report["false_alarm_probability"] == 0.001
    shown = {scenario["scenario"] for scenario in report["scenarios"] if scenario["status"] == "ok"}
    others = {"copying", "json-schema", "long-context", "tools"}
    assert shown >= {planted.scenario for planted in FAULTS.values()} | others


@pytest.mark.slow
def test_the_curl_line_of_a_fault_shows_it_again(doctor_server: RunningServer, tmp_path: Path) -> None:
    """The line goes through a shell as it is printed, and the answer has what the fault says."""
    with wrong_logprobs():
        report = doctor(doctor_server, tmp_path, 21, "--scenarios", "logprobs")
        fault = next(fault for check in checks_of(report) for fault in check["faults"])
        command = fault["curl"][0]
        result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    token = int(re.search(r"token (\d+)", fault["message"])[1])  # type: ignore[index]
    assert json.loads(result.stdout)["choices"][0]["logprobs"]["token_logprobs"][token - 1] == 0.0
    assert shlex.split(command)[0] == "curl"


@pytest.mark.slow
def test_reports_of_a_fault_for_people_and_for_ci(
    doctor_server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junit, page = tmp_path / "junit.xml", tmp_path / "report.html"
    options = ["--scenarios", "logprobs,seeds", "--junit", str(junit), "--html", str(page)]
    with wrong_logprobs():
        report = doctor(doctor_server, tmp_path, 5, *options)
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("fault: logprobs (") and "seed 5" in out.splitlines()[-1]
    assert "\n        curl -sS http" in out
    suites = ElementTree.parse(junit).getroot()
    assert int(suites.attrib["failures"]) >= 1 and int(suites.attrib["tests"]) == len(checks_of(report))
    assert suites.find(".//failure").text.count("curl -sS")  # type: ignore[union-attr]
    text = page.read_text(encoding="utf-8")
    assert "fault: logprobs" in text and "curl -sS" in text
    assert "<script" not in text and "src=" not in text and "<link" not in text  # one page, nothing beside it


@pytest.mark.slow
def test_the_same_seed_asks_the_same_questions(doctor_server: RunningServer, tmp_path: Path) -> None:
    with wrong_logprobs():
        reports = [doctor(doctor_server, tmp_path, 7, "--scenarios", "logprobs") for _ in range(2)]
    curls = [[fault["curl"] for check in checks_of(report) for fault in check["faults"]] for report in reports]
    assert curls[0] == curls[1] and reports[0]["seed"] == 7


@pytest.mark.slow
def test_a_second_server_is_taken_to_be_right(doctor_server: RunningServer, tmp_path: Path) -> None:
    """Against itself a server is right: both ways to compare are used."""
    report = doctor(doctor_server, tmp_path, 22, "--scenarios", "copying", "--against", doctor_server.url)
    assert report["exit_status"] == 0 and report["against"] == f"{doctor_server.url}/v1"
    by_name = {check["name"]: check for check in checks_of(report)}
    assert by_name["values copied with and without speculation"]["compared"] >= 6  # two ways for each prompt


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_scenarios_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == list(all_scenarios()) and len(names) == 13


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a server"),
        (["localhost:8000"], "is not the address of a server"),
        (["http://127.0.0.1:9", "--scenarios", "cache"], "the scenarios are prefix-cache"),
        (["http://127.0.0.1:9"], "cannot be reached"),
        (["http://127.0.0.1:9", "--html", "/no/such/place/report.html"], "there is no directory /no/such/place"),
        (["http://127.0.0.1:9", "--near-tie", "-1"], "--near-tie"),
    ],
)
def test_wrong_use_is_told_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed and len(printed.splitlines()) == 1


def test_without_httpx_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    assert main(["doctor", "http://127.0.0.1:9"]) == 2
    assert "pip install '.[doctor]'" in capsys.readouterr().err


@pytest.mark.slow
def test_it_does_not_wait_for_torch() -> None:
    """Its scenarios are statistics and HTTP: a machine that only runs the doctor need not load torch."""
    code = "import sys; from paceline.cli import main; main(['doctor', '--list']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False).returncode == 0
