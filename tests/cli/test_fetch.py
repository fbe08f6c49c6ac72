"""paceline fetch, with a model that is on disk already."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_fetch_prints_a_directory_that_transformers_loads(run_command: Any, tiny_folder: Path) -> None:
    result = run_command("fetch", "TINY")
    assert (result.status, result.out.strip()) == (0, str(tiny_folder.resolve()))
    assert run_command("fetch", "TINY", "--json").json()["folder"] == str(tiny_folder.resolve())


def test_a_model_that_does_not_exist_is_an_error(run_command: Any) -> None:
    result = run_command("fetch", "nonsense")
    assert result.status == 2 and "no model is called" in result.err
