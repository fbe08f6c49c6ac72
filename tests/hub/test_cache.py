"""The folder of obtained models: complete or absent, whatever happens on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.errors import FetchError
from paceline.hub.cache import cache_folder, cached_directory

SLOW_FILL = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from pathlib import Path
from paceline.hub.cache import cached_directory

def fill(folder: Path) -> None:
    print("filling", flush=True)
    (folder / "half").write_text("first half")
    time.sleep(float(sys.argv[1]))
    (folder / "whole").write_text("done")

print(cached_directory("model", fill) / "whole", flush=True)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def filler(seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW_FILL, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy())


def test_the_cache_is_where_the_user_says(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == cache
    monkeypatch.delenv("PACELINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/paceline")


def test_a_directory_is_filled_once(cache: Path) -> None:
    calls: list[Path] = []

    def fill(folder: Path) -> None:
        calls.append(folder)
        (folder / "file").write_text("x")

    assert cached_directory("model", fill) == cached_directory("model", fill) == cache / "model"
    assert len(calls) == 1


def test_two_processes_at_once_on_an_empty_cache(cache: Path) -> None:
    both = [filler(1.0), filler(1.0)]
    output = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(text.count("filling") for text in output) == 1, "one fills, the other waits"
    assert all(text.strip().endswith("whole") for text in output)
    assert (cache / "model" / "whole").read_text() == "done"


def test_interrupted_it_leaves_nothing_that_looks_like_a_model(cache: Path) -> None:
    process = filler(60)
    assert process.stdout is not None and process.stdout.readline().strip() == "filling"
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    assert process.returncode != 0
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_what_a_killed_process_left_is_cleared_away(cache: Path) -> None:
    process = filler(60)
    assert process.stdout is not None and process.stdout.readline().strip() == "filling"
    process.kill()
    process.wait(timeout=60)
    left = [path for path in cache.iterdir() if path.is_dir()]
    assert len(left) == 1 and ".partial-" in left[0].name
    time.sleep(0.05)
    assert (cached_directory("model", lambda folder: (folder / "whole").touch()) / "whole").exists()
    assert [path.name for path in cache.iterdir() if path.is_dir()] == ["model"]


def test_a_fill_that_fails_leaves_nothing(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise FetchError("no")

    with pytest.raises(FetchError):
        cached_directory("model", fail)
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(FetchError, match="PACELINE_CACHE"):
        cached_directory("model", lambda folder: None)
