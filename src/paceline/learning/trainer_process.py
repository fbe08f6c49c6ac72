"""The trainer as the server sees it: a process that is started, stopped while requests run, and continued."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import paceline

LOG = logging.getLogger("paceline.serve")
LOG_FILE = "trainer.log"
MAX_STARTS = 5  # after which a trainer that keeps ending is left alone


class TrainerProcess:
    """Starts the trainer of a learning folder again where it ends. Learning is optional: nothing here raises."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        self._paused = False

    def keep_alive(self) -> None:
        """Start it where it does not run. From the server's main thread: the kernel ends it with that thread."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            LOG.warning("the trainer has ended", extra={"fields": {"status": self._process.returncode}})
            self._process = None
        if self._num_starts < MAX_STARTS:
            self._num_starts += 1
            self._start()

    def _start(self) -> None:
        source = str(Path(paceline.__file__).parent.parent)
        paths = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths}
        with (self._folder / LOG_FILE).open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.learning.trainer", str(self._folder), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                process_group=0,  # Ctrl-C is for the server, which then ends the trainer
            )
        if self._paused:
            self._send(signal.SIGSTOP)

    def pause(self) -> None:
        """Stop it at once, in the middle of whatever it does."""
        self._paused = True
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        self._paused = False
        self._send(signal.SIGCONT)

    def stop(self) -> None:
        """End it. Its files are whole whenever it ends."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
