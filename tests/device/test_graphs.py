"""What a capture must not be disturbed by. The captures themselves need a GPU, and are tested where they are used."""

from __future__ import annotations

import gc
import weakref

import pytest

from paceline.device import graphs
from paceline.device.graphs import Capture, keep_newest, nothing_collected, rounded_up


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


def test_sizes_are_rounded_up_and_only_the_newest_are_kept() -> None:
    assert [rounded_up(value, (1, 4, 8)) for value in (1, 2, 8, 9)] == [1, 4, 8, None]
    kept: dict[str, int] = {}
    for seq_id, key in enumerate("abca"):
        keep_newest(kept, key, seq_id, 2)
    assert kept == {"c": 2, "a": 3}


class Recorded:
    """What Capture sees of a captured piece of work."""

    def __init__(self, work: object, label: str, pool: int) -> None:
        self.worked, self.pool = label != "hopeless", pool


@pytest.mark.parametrize(("label", "pools"), [("fine", [0, 0, 0]), ("hopeless", [0, 1, 2])])
def test_a_pool_lives_as_long_as_it_is_used(monkeypatch: pytest.MonkeyPatch, label: str, pools: list[int]) -> None:
    """Its last graph stays even if whoever asked for it lets go; one that failed may have left it unusable."""
    numbers = iter(range(9))
    monkeypatch.setattr(graphs, "Captured", Recorded)
    monkeypatch.setattr(graphs, "new_pool", lambda: next(numbers))
    capture, taken = Capture(label), []
    for _ in range(3):
        made = weakref.ref(capture(lambda: None))
        assert made() is not None
        taken.append(made().pool)
    assert taken == pools
