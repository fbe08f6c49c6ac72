"""paceline itself: help, errors, exit status."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from typing import Any

import pytest

from paceline import __version__, cli
from paceline.errors import ModelNotFound


def run_raising(monkeypatch: pytest.MonkeyPatch, raised: BaseException) -> int:
    """Run a command whose main raises."""

    def main(args: Any) -> int:
        raise raised

    command = types.SimpleNamespace(__doc__="a command", configure=lambda parser: None, main=main)
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: command)
    return cli.main(["demo"])


def test_help_lists_the_commands_that_are_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"\n  {name} " in output for name in cli.commands())
    assert {"demo", "generate", "chat", "check", "fetch"} <= set(cli.commands())


def test_a_command_without_a_module_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "dance", "not yet")
    assert "dance" not in cli.commands()
    assert cli.main(["dance"]) == 2


@pytest.mark.parametrize("name", cli.commands())
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    output = capsys.readouterr().out
    assert f"paceline {name}" in output and len(output) > 300


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"paceline {__version__}\n"


def test_an_unknown_command_suggests_a_near_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["genrate"]) == 2
    assert capsys.readouterr().err == "paceline: error: there is no command 'genrate'; did you mean generate?\n"


@pytest.mark.parametrize(
    ("argv", "usage", "error"),
    [
        ("train eagle --out x --stepz 5", "train eagle [MODEL] --out OUT", "--stepz; did you mean --steps?"),
        ("train eagle --out x --ste 5", "train eagle [MODEL] --out OUT", "unrecognized arguments: --ste"),
        ("train eagle", "train eagle [MODEL] --out OUT", "the following arguments are required: --out"),
        ("models list --jsn", "models list", "--jsn; did you mean --json?"),
        ("models rm", "models rm MODEL", "the following arguments are required: MODEL"),
    ],
)
def test_a_part_of_a_command_answers_for_its_own_flags(
    argv: str, usage: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv.split()) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"usage: paceline {usage} [options]\n") and error in printed


def test_a_misspelt_option_suggests_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--versoin"]) == 2
    assert "did you mean --version?" in capsys.readouterr().err
    assert cli.main(["generate", "x", "--methd", "ngram"]) == 2
    assert capsys.readouterr().err.endswith("unrecognized arguments: --methd ngram; did you mean --method?\n")


def test_help_of_a_command_may_be_asked_for_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "pairs"]) == 0
    assert capsys.readouterr().out.startswith("usage: paceline pairs")
    assert cli.main(["help", "piars"]) == 2
    assert "did you mean pairs?" in capsys.readouterr().err


def test_a_users_error_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(monkeypatch, ModelNotFound("no such model")) == 2
    assert capsys.readouterr().err == "paceline: error: no such model\n"


def test_control_c_is_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(monkeypatch, KeyboardInterrupt()) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_our_own_faults_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        run_raising(monkeypatch, ZeroDivisionError())


@pytest.mark.slow
def test_importing_the_flags_loads_nothing_heavy() -> None:
    program = "import sys, paceline.cli.generate, paceline.cli.chat; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    program = "import sys; from paceline.cli import main; main(['-h']); print('torch' in sys.modules, file=sys.stderr)"
    fastest = 99.0
    for _ in range(3):  # the fastest of three: a busy machine must not fail this
        started = time.perf_counter()
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        fastest = min(fastest, time.perf_counter() - started)
    assert result.stderr.strip() == "False"
    assert fastest < 0.3 or os.getloadavg()[0] > (os.cpu_count() or 1)


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "paceline", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    output = process.stderr.read().decode()
    assert process.wait(timeout=60) == cli.BROKEN_PIPE
    assert output == ""


def test_a_reader_that_leaves_a_table_early_is_no_error_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich answers it with SystemExit(1)."""
    stop = SystemExit(1)
    stop.__context__ = BrokenPipeError()
    assert run_raising(monkeypatch, stop) == cli.BROKEN_PIPE


def test_an_error_of_the_system_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(monkeypatch, PermissionError(13, "Permission denied", "out.txt")) == 2
    assert capsys.readouterr().err == "paceline: error: [Errno 13] Permission denied: 'out.txt'\n"


def paceline(redirections: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`paceline --help` with a shell's redirections."""
    command = f"{sys.executable} -m paceline --help {redirections}"
    return subprocess.run(command, shell=True, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.slow
def test_a_full_disk_and_a_closed_stdout_leave_no_traceback() -> None:
    full = paceline("> /dev/full")
    assert full.returncode == 2 and full.stderr == "paceline: error: [Errno 28] No space left on device\n"
    closed = paceline("<&- >&-")
    assert (closed.returncode, closed.stderr) == (0, "")
