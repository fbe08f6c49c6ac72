"""What a capture must not be disturbed by. The captures themselves need a GPU, and are tested where they are used."""

from __future__ import annotations

import gc
import weakref

import pytest

from paceline.core.graphs import nothing_collected


class Knot:
    """Holds itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.mine = self


def test_nothing_is_collected_during_a_capture_and_all_of_it_before() -> None:
    before = weakref.ref(Knot())
    with nothing_collected():
        assert before() is None
        during = weakref.ref(Knot())
        for _ in range(5000):  # enough for the collector to start by itself
            Knot()
        assert during() is not None
    assert gc.isenabled()
    gc.collect()
    assert during() is None


def test_a_collector_that_was_off_stays_off_and_errors_pass() -> None:
    gc.disable()
    try:
        with pytest.raises(ValueError), nothing_collected():
            raise ValueError
        assert not gc.isenabled()
    finally:
        gc.enable()
