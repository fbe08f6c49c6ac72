"""Ctrl-C: exit status 130 at every moment of loading, without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ENDS = (130, "\n")
# Python has started and the command owns its process: an interrupt before that is Python's own to answer.
WATCHED = """
import sys
from paceline import cli

def announced():
    watch()
    print("watching", flush=True)

watch, cli.interrupt.watch = cli.interrupt.watch, announced
sys.exit(cli.main())
"""
# The interrupt comes when this C++ function calls back into Python. torch aborts where an exception comes out of that.
CALLED_BACK = """
import os, signal, sys
from paceline import cli

def on_event(frame, event, argument):
    if event == "c_call" and argument.__name__ == "%s":
        inside.append(frame)
    elif event == "call" and inside and frame.f_back is inside[0]:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)
        [None for _ in range(10**6)]

inside = []
sys.setprofile(on_event)
sys.exit(cli.main())
"""
# The interrupt comes while something is imported or loaded that swallows it.
SWALLOWED = """
import os, signal, sys
from paceline import build, cli

def swallow(config):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        [None for _ in range(10**6)]
    except KeyboardInterrupt:
        pass
    return open_engine(config)

open_engine, build.open_engine = build.open_engine, swallow
sys.exit(cli.main())
"""
# Python is not done with this thread when the process ends.
BUSY = """
import sys
from paceline import build, cli

def endless(config):
    print("loading", flush=True)
    while True:
        sys.getrefcount(config)

build.build_engine = endless
sys.exit(cli.main())
"""


def serving(folder: Path, script: str | None = None) -> subprocess.Popen[str]:
    """`paceline serve` as a terminal starts it: SIGINT is not ignored, whatever started the tests."""
    program = ["-m", "paceline"] if script is None else ["-c", script]
    return subprocess.Popen(
        [sys.executable, *program, "serve", str(folder), "--port", "0", "--method", "ngram"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def last_line(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Status, and stderr without the notice that loading takes long."""
    _, err = process.communicate(timeout=120)
    return process.returncode, "".join(line for line in err.splitlines(keepends=True) if "loading" not in line)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.7, 1.5, 3.0])
def test_serve_can_be_interrupted_while_it_loads(tiny_folder: Path, seconds: float) -> None:
    process = serving(tiny_folder, WATCHED)
    assert process.stdout is not None and process.stdout.readline() == "watching\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    status, err = last_line(process)
    assert status == 130 and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("function", ["_initExtension", "_autograd_init", "_multiprocessing_init"])
def test_an_interrupt_inside_the_import_of_torch_does_not_abort(tiny_folder: Path, function: str) -> None:
    assert last_line(serving(tiny_folder, CALLED_BACK % function)) == ENDS


@pytest.mark.slow
def test_an_interrupt_that_a_library_swallows_still_ends_serve(tiny_folder: Path) -> None:
    assert last_line(serving(tiny_folder, SWALLOWED)) == ENDS


@pytest.mark.slow
def test_a_thread_that_never_ends_does_not_hold_the_process_up(tiny_folder: Path) -> None:
    process = serving(tiny_folder, BUSY)
    assert process.stdout is not None and process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    assert last_line(process) == ENDS
