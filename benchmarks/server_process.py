"""A `paceline serve` process and clients that read its streams: what soak.py, serving.py and learning.py share."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[str]

    def megabytes(self) -> float:
        """Resident memory of the process."""
        with open(f"/proc/{self.process.pid}/status", encoding="utf-8") as status:
            match = re.search(r"VmRSS:\s+(\d+) kB", status.read())
        return int(match.group(1)) / 1024 if match else 0.0

    def metrics(self) -> dict[str, float]:
        """Every value of /metrics by its name and labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


def started(arguments: list[str]) -> Server:
    """Start `paceline serve` with these arguments on a free port; it is ready when this returns."""
    command = [sys.executable, "-m", "paceline", "serve", *arguments, "--port", "0", "--log-level", "error"]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.search(r"(http://\S+)/v1", line)
    if match is None:
        stop(process)
        raise SystemExit(f"the server did not start: {line}")
    return Server(match.group(1), process)


def stop(process: subprocess.Popen[str]) -> None:
    """End a server as its operator would, and by force where it does not end."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()


@contextmanager
def server(arguments: list[str]) -> Iterator[Server]:
    """Start `paceline serve` with these arguments on a free port, and stop it at the end."""
    running = started(arguments)
    try:
        yield running
    finally:
        stop(running.process)


async def stream_chunks(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The chunks of one stream. Raises for an error status or an error event."""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk: dict[str, Any] = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            yield chunk
