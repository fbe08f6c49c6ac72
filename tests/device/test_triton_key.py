"""Triton's key is computed once, beside other work, and whoever needs it meanwhile waits for it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from types import ModuleType

import pytest

from paceline.device import triton_key
from paceline.device.triton_key import FUNCTION, compute_triton_key_beside


class Home(ModuleType):
    """A module with the function, as Triton has it: cached, and slow the first time."""

    def __init__(self) -> None:
        super().__init__("home")
        self.calls = 0
        self.may_go_on = threading.Event()
        self.own: Callable[[], str] = functools.lru_cache(self._compute)
        setattr(self, FUNCTION, self.own)

    def _compute(self) -> str:
        self.calls += 1
        self.may_go_on.wait(5)
        return "key"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Home:
    made = Home()
    monkeypatch.setattr(triton_key, "_home", lambda: made)
    return made


def test_a_launch_that_needs_the_key_waits_and_does_not_compute_it_again(home: Home) -> None:
    compute_triton_key_beside()
    compute_triton_key_beside()  # of a draft model, while it is under way
    keys: list[str] = []
    launch = threading.Thread(target=lambda: keys.append(getattr(home, FUNCTION)()))
    launch.start()
    time.sleep(0.05)
    assert not keys
    home.may_go_on.set()
    launch.join(5)
    assert keys == ["key"] and home.calls == 1


def test_triton_has_its_own_function_back_afterwards(home: Home) -> None:
    home.may_go_on.set()
    compute_triton_key_beside()
    for _ in range(500):
        if getattr(home, FUNCTION) is home.own:
            break
        time.sleep(0.01)
    assert getattr(home, FUNCTION) is home.own
    compute_triton_key_beside()
    assert getattr(home, FUNCTION) is home.own and home.calls == 1, "it is known"


def test_a_function_that_fails_is_left_to_the_first_launch(home: Home) -> None:
    def broken() -> str:
        raise OSError("no library")

    home.own = functools.lru_cache(broken)
    setattr(home, FUNCTION, home.own)
    compute_triton_key_beside()
    with pytest.raises(OSError, match="no library"):
        getattr(home, FUNCTION)()


def test_the_installed_triton_has_the_function_where_launches_look_for_it() -> None:
    pytest.importorskip("triton")
    home = triton_key._home()
    assert home is not None and FUNCTION in home.get_cache_key.__code__.co_names  # type: ignore[attr-defined]


def test_a_triton_without_the_function_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_key, "_home", lambda: None)
    compute_triton_key_beside()
