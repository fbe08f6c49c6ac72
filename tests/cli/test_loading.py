"""Commands that load a model are never silent for more than two seconds."""

from __future__ import annotations

import gc
import re
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import loading, main
from paceline.hub import progress


@pytest.fixture
def slow_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a model takes fifty times as long as a command may be silent."""
    from paceline import build

    open_runner = build.open_runner

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(1.0)
        return open_runner(*arguments, **options)

    monkeypatch.setattr(build, "open_runner", slow)
    monkeypatch.setattr(progress, "SECONDS_BEFORE_NOTICE", 0.02)


COMMANDS = {
    "generate": ("generate", "-m", "TINY", "abc", "--max-new-tokens", "2"),
    "bench": ("bench", "TINY", "--methods", "ngram", "-k", "2", "--limit", "1", "--repeats", "1", "--report", "none"),
    "tune": ("tune", "TINY", "--methods", "ngram", "--limit", "1", "--repeats", "1", "--out", "none"),
    "serve": ("serve", "TINY", "--port", "0", "--method", "ngram"),
    "audit": ("audit", "TINY", "--methods", "ngram", "--quick", "--draws", "200"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("slow_loading")
@pytest.mark.parametrize("command", COMMANDS)
def test_slow_loading_is_announced_on_stderr(
    run_command: Any, command: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.serve.run.run", lambda *_: None)  # ends at once instead of serving
    result = run_command(*COMMANDS[command])
    assert f"paceline: loading {tiny_folder} …" in result.err
    assert "loading" not in result.out


@pytest.mark.parametrize(
    ("arguments", "notices"),
    [
        (("generate", "x"), ["loading default"]),
        (("generate", "x", "-m", "big"), ["loading big"]),
        (("generate", "x", "--engine", "http"), []),
        (("serve", "--config", "models.toml"), ["loading the models of models.toml"]),
    ],
)
def test_the_notice_names_what_is_loaded(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], notices: list[str]
) -> None:
    announced: list[str] = []
    monkeypatch.setattr(loading, "LoadNotice", lambda text: announced.append(text) or Silent())
    monkeypatch.setattr(f"paceline.cli.{arguments[0]}.main", lambda args: 0)
    assert main(list(arguments)) == 0
    assert announced == notices


class Silent:
    def start(self) -> None: ...

    def stop(self) -> None: ...


@pytest.mark.slow
def test_tune_shows_its_steps_and_the_time_left(run_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    result = run_command(*COMMANDS["tune"])
    for line in ("step 1 of 3: measuring passes", "step 2 of 3: trying", "step 3 of 3: confirming"):
        assert f"paceline: {line}" in result.err
    assert re.search(r"1 of 3, \d+:\d\d", result.err) and " left" in result.err


def test_garbage_is_looked_for_again_once_a_model_is_loaded() -> None:
    loading.begin("tiny")
    loading.begin("tiny")
    try:
        assert not gc.isenabled()
    finally:
        loading.done()
    assert gc.isenabled()


def test_a_command_that_fails_leaves_garbage_collection_on(run_command: Any, tmp_path: Path) -> None:
    assert run_command("generate", "-m", str(tmp_path), "abc").status == 2
    assert gc.isenabled()


@pytest.mark.slow
@pytest.mark.usefixtures("collector_as_before")
def test_what_was_imported_is_set_aside_once_so_that_a_closed_model_is_collected() -> None:
    class Model:
        def __init__(self) -> None:
            self.engine = self

    gc.unfreeze()
    try:
        loading.imported()
        model = weakref.ref(Model())
        loading.imported()
        gc.collect()
        assert gc.get_freeze_count() and model() is None
    finally:
        loading.ended()


@pytest.mark.slow
@pytest.mark.usefixtures("collector_as_before")
def test_a_command_inside_another_program_sets_nothing_aside_for_good(
    run_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.unfreeze()  # what the program itself has frozen, here the tests', would stay
    frozen: list[int] = []
    done = loading.done
    monkeypatch.setattr(loading, "done", lambda: (frozen.append(gc.get_freeze_count()), done()))
    assert run_command("generate", "-m", "TINY", "abc", "--max-new-tokens", "2").status == 0
    assert frozen[0] and not gc.get_freeze_count()
