"""Progress where there is no terminal: lines, with the time left."""

from __future__ import annotations

import time

import pytest

from paceline.hub import progress


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)


def test_items_pass_through_and_the_time_left_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(0, 1000, 60))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))
    assert list(progress.track("abc", "trying", 4)) == ["a", "b", "c"]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "paceline: trying",
        "paceline: trying: 1 of 4, 3:00 left",
        "paceline: trying: 2 of 4, 2:00 left",
        "paceline: trying: 3 of 4, 1:00 left",
    ]


def test_quick_work_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.track(range(3), "trying", 3)) == [0, 1, 2]
    assert capsys.readouterr().err == "paceline: trying\n"


@pytest.mark.parametrize(("seconds", "text"), [(-7195.0, "0:00"), (7.9, "0:07"), (3723.0, "1:02:03")])
def test_a_clock_never_runs_backwards(seconds: float, text: str) -> None:
    assert progress.clock(seconds) == text


def test_loading_is_announced_once_it_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = progress.LoadNotice("loading quick")
    quick.start()
    quick.stop()
    quick.stop()
    monkeypatch.setattr(progress, "SECONDS_BEFORE_NOTICE", 0.01)
    slow = progress.LoadNotice("loading slow")
    slow.start()
    time.sleep(1.0)  # the notice comes from a thread of its own
    slow.stop()
    assert capsys.readouterr().err == "paceline: loading slow …\n"
