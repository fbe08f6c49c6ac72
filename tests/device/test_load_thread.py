"""Work in a short-lived thread."""

from __future__ import annotations

import threading

import pytest

from paceline.device.load_thread import run_beside, run_in_load_thread


def test_work_runs_in_another_thread_which_has_ended() -> None:
    before = set(threading.enumerate())
    where = run_in_load_thread(threading.current_thread)
    assert where not in before and not where.is_alive()
    assert set(threading.enumerate()) <= before


def test_errors_are_raised_in_the_calling_thread() -> None:
    def fail() -> None:
        raise KeyError("reason")

    with pytest.raises(KeyError, match="reason"):
        run_in_load_thread(fail)


def test_an_interrupt_does_not_wait_for_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import Future

    def interrupted(self: Future[None]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
    never = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        run_in_load_thread(never.wait)
    never.set()


def test_what_runs_beside_is_not_waited_for() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(10)
        ended.set()

    run_beside(work)
    assert begun.wait(10) and not ended.is_set()
    may_end.set()
    assert ended.wait(10)
