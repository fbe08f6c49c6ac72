"""run_command: a command in this process, with what it prints. generate_json: `paceline generate --json`, parsed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from tests.support.tiny import write_tiny_model


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command leaves behind."""

    status: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """The JSON document on the last line of stdout."""
        document: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return document


@pytest.fixture
def run_command(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., CommandResult]:
    """run_command("generate", "-m", "TINY", …): TINY is replaced by the directory of the tiny model."""
    monkeypatch.delenv("PACELINE_PROFILE", raising=False)

    def run(*arguments: str, stdin: str = "") -> CommandResult:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        status = cli.main([argument.replace("TINY", str(tiny_folder)) for argument in arguments])
        printed = capsys.readouterr()
        return CommandResult(status, printed.out, printed.err)

    return run


@pytest.fixture
def generate_json(run_command: Callable[..., CommandResult]) -> Callable[..., dict[str, Any]]:
    """generate_json("prompt", "-k", "3"): the document of 24 tokens of the tiny model."""

    def generate(*arguments: str, stdin: str = "") -> dict[str, Any]:
        result = run_command("generate", "-m", "TINY", "--json", "--max-new-tokens", "24", *arguments, stdin=stdin)
        assert result.status == 0, result.err
        return result.json()

    return generate


@pytest.fixture(scope="session")
def other_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose first six tokens are in another order."""
    return str(write_tiny_model(tmp_path_factory.mktemp("other") / "model", swapped=6))
