"""Work done in a thread that ends."""

from __future__ import annotations

import threading

import pytest

from paceline.device.load_thread import run_in_load_thread


def test_work_is_done_elsewhere_and_its_thread_is_gone() -> None:
    before = set(threading.enumerate())
    where = run_in_load_thread(threading.current_thread)
    assert where not in before and not where.is_alive()
    assert set(threading.enumerate()) <= before


def test_errors_come_back_as_they_are() -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
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
