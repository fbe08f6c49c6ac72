"""The collector belongs to the program: what is switched off or frozen while a model loads is given back as it was."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from paceline.device.garbage import CollectionPauses, FrozenObjects, ModelLoads, garbage_collection_paused


class Node:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.own = self


pytestmark = pytest.mark.usefixtures("collector_as_before")


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_the_program_had_it_after_pauses_in_pauses(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with garbage_collection_paused():
        with garbage_collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer pause goes on"
    assert gc.isenabled() == enabled


def test_a_pause_of_another_thread_is_not_ended() -> None:
    pauses, has_begun, may_end = CollectionPauses(), threading.Event(), threading.Event()
    gc.enable()

    def other() -> None:
        pauses.begin()
        has_begun.set()
        may_end.wait()
        pauses.end()

    thread = threading.Thread(target=other)
    thread.start()
    has_begun.wait()
    pauses.begin()
    pauses.end()
    assert not gc.isenabled()
    may_end.set()
    thread.join()
    assert gc.isenabled()


def test_what_the_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    FrozenObjects().release()
    assert gc.get_freeze_count() > before // 2, "not none; other threads may drop some of them meanwhile"


def test_frozen_objects_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 80 ms where many are."""
    gc.unfreeze()
    counted: list[int] = []
    get_freeze_count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(get_freeze_count()) or counted[-1])
    ours = FrozenObjects()
    FrozenObjects().release()
    ours.release()
    assert counted == [0] and not get_freeze_count(), "none while ours are frozen"
    gc.freeze()
    for _ in range(3):
        FrozenObjects().release()
    assert len(counted) == 2 and get_freeze_count(), "those of the program are seen once"


def test_what_was_frozen_can_become_garbage_again() -> None:
    gc.unfreeze()
    node = Node()
    seen, frozen = weakref.ref(node), FrozenObjects()
    del node
    gc.collect()
    assert seen() is not None
    frozen.release()
    gc.collect()
    assert seen() is None


def test_a_second_load_collects_the_first_model_before_it_begins() -> None:
    gc.unfreeze()
    loads = ModelLoads()
    with loads.under_way():
        node = Node()
    seen = weakref.ref(node)
    del node
    gc.disable()
    with loads.under_way():
        assert seen() is None, "or two models would have to fit"


def test_a_first_load_collects_only_where_the_program_may_hold_memory() -> None:
    gc.disable()
    for may_hold_memory in (False, True):
        node = Node()
        seen = weakref.ref(node)
        del node
        with ModelLoads().under_way(may_hold_memory=may_hold_memory):
            assert (seen() is None) == may_hold_memory
        gc.collect()
