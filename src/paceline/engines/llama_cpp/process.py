"""Starts and ends llama.cpp's process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from paceline.errors import EngineFailed, ModelError

WORKER = Path(__file__).with_name("worker.py")
END_SECONDS = 10.0
MAX_REASON = 300


class LlamaCppProcess:
    """One running process. url: the address of its server; device: what it computes on."""

    def __init__(self, settings: dict[str, Any], model: str, *, show_log: bool = False) -> None:
        """Returns when the model is loaded. Raises ModelError."""
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if show_log else self._log,
            text=True,
        )
        try:
            answer = self._answer(settings)
        except BaseException:  # an interrupt while the model is loaded
            self.close()
            raise
        if "url" not in answer:
            self.close()
            raise ModelError(f"llama.cpp cannot load {model}: {answer['error']}")
        self.url, self.device = str(answer["url"]), ",".join(answer["devices"]) or "cpu"

    @property
    def pid(self) -> int:
        return self._process.pid

    def _answer(self, settings: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(settings) + "\n")
            self._process.stdin.flush()
        except OSError:
            return {"error": self._reason()}
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line.startswith("{") else {"error": "its process has ended"}
        if "error" in answer:
            answer["error"] = f"{answer['error']}{self._reason()}"
        return answer

    def _reason(self) -> str:
        """The last line of llama.cpp's log that speaks of an error."""
        if self._log.closed:
            return ""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines()]
        errors = [line for line in lines if "error" in line.lower() or "failed" in line.lower()]
        return f" ({errors[-1][:MAX_REASON]})" if errors else ""

    def check_health(self) -> None:
        """Raise EngineFailed where the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise EngineFailed(f"llama.cpp's process has ended ({_ended(code)}){self._reason()}; open the engine again")

    def check_after_failure(self) -> None:
        """The same; a process whose connection has just broken is given the moment it needs to be gone."""
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return
        self.check_health()

    def close(self) -> None:
        """End the process. Closing twice is harmless."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
            except OSError:  # it has ended already
                pass
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


def _ended(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
