"""What is printed, and in which colour."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from paceline.cli import terminal
from paceline.core.stats import SpecStats
from paceline.core.types import RequestOutput


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_and_yields_to_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert terminal.wants_color("auto", Terminal())
    assert not terminal.wants_color("auto", io.StringIO())
    assert terminal.wants_color("always", io.StringIO()) and not terminal.wants_color("never", Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.wants_color("auto", Terminal())


def test_streams_that_are_closed_read_as_empty_and_drop_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    terminal.prepare_streams()
    print("nobody reads this")
    assert sys.stdin.read() == "" and not sys.stdin.isatty() and not terminal.wants_color("auto")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()


def test_what_stdout_cannot_encode_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    terminal.prepare_streams()
    print("τ", flush=True)
    assert written.getvalue() == b"?\n"


def test_only_accepted_draft_tokens_are_green(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [RequestOutput("own "), RequestOutput("draft", from_draft=True), RequestOutput("", from_draft=True)]
    assert terminal.show(outputs, color=True) == outputs
    assert capsys.readouterr().out == "own \x1b[32mdraft\x1b[0m\n"
    terminal.show(outputs, color=False)
    assert capsys.readouterr().out == "own draft\n"


def test_figures_name_acceptance_only_where_tokens_were_drafted() -> None:
    plain = SpecStats(new_tokens=10, steps=10, seconds=2.0)
    assert terminal.figures(plain) == "10 tokens in 2.00 s, 5.0 tokens/s"
    drafted = SpecStats(new_tokens=10, steps=5, drafted=10, accepted=5, seconds=2.0)
    assert terminal.figures(drafted).endswith("; 2.00 tokens a step, 50% of draft tokens accepted")


QUIET = """
import sys
{imports}
from paceline.cli.terminal import quiet_transformers
quiet_transformers()
imported = "transformers" in sys.modules
from transformers.utils import logging
print(imported, logging.get_verbosity() == logging.ERROR, logging.is_progress_bar_enabled())
"""


@pytest.mark.slow
@pytest.mark.parametrize("imports", ["", "import huggingface_hub.utils", "import transformers"])
def test_transformers_is_quiet_before_and_after_it_is_imported(imports: str) -> None:
    loud = {name: value for name, value in os.environ.items() if not name.startswith(("TRANSFORMERS_", "HF_HUB_"))}
    command = [sys.executable, "-c", QUIET.format(imports=imports)]
    result = subprocess.run(command, capture_output=True, text=True, env=loud, check=True)
    assert result.stdout.split() == [str("transformers" in imports), "True", "False"]
