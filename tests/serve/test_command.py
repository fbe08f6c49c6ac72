"""`paceline serve` as a process: its messages, its signals, its keys."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from paceline.cli import main
from paceline.cli.serve import KEYS_VARIABLE, api_keys, configure, serve_settings
from paceline.errors import OptionError
from paceline.serve.limits import AdmissionControl
from paceline.serve.run import DrainingServer, open_socket, server_config, welcome
from paceline.serve.settings import Limits
from tests.support.tiny import write_tiny_model

LONG = {"prompt": "some text", "max_tokens": 400, "ignore_eos": True, "stream": True}


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    configure(parser)
    return parser.parse_args(words)


@dataclass
class Process:
    running: subprocess.Popen[str]
    url: str


@contextmanager
def process(folder: Path) -> Iterator[Process]:
    command = [
        sys.executable,
        "-m",
        "paceline",
        "serve",
        "--target",
        str(folder),
        "--port",
        "0",
        "--drain-seconds",
        "30",
    ]
    quiet = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **quiet}
    )
    try:
        assert running.stdout is not None
        output = running.stdout.readline()
        found = re.search(r"(http://127\.0\.0\.1:\d+)/v1", output)
        assert found, output or (running.stderr.read() if running.stderr else "")
        yield Process(running, found.group(1))
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate()


def read(url: str, lines: list[str], begun: threading.Event) -> None:
    """Read a long stream to its end, or to wherever it breaks."""
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()
    except httpx.HTTPError as error:
        lines.append(f"broken: {error!r}")
        begun.set()


def reader(url: str) -> tuple[threading.Thread, list[str]]:
    """A client in the middle of a long stream."""
    lines: list[str] = []
    begun = threading.Event()
    thread = threading.Thread(target=read, args=(url, lines, begun), daemon=True)
    thread.start()
    assert begun.wait(60)
    assert lines[0].startswith("data: "), lines
    return thread, lines


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes a long text in seconds, so that signals come in the middle of it on any machine."""
    return write_tiny_model(tmp_path_factory.mktemp("deep") / "model", num_hidden_layers=20)


def test_the_first_signal_lets_requests_finish(deep_folder: Path) -> None:
    with process(deep_folder) as served:
        thread, lines = reader(served.url)
        served.running.send_signal(signal.SIGTERM)
        thread.join(60)
        assert "data: [DONE]" in lines
        log = served.running.communicate(timeout=30)[1]
        assert served.running.returncode in (0, -signal.SIGTERM)
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert any(event["event"] == "closing" and event["in_flight"] == 1 for event in events)
    assert any(event.get("new_tokens") == 400 for event in events)


def test_the_second_signal_ends_them(deep_folder: Path) -> None:
    with process(deep_folder) as served:
        thread, lines = reader(served.url)
        served.running.send_signal(signal.SIGTERM)
        assert served.running.stderr is not None
        next(line for line in served.running.stderr if "closing" in line)  # two signals at once would count as one
        served.running.send_signal(signal.SIGTERM)
        served.running.communicate(timeout=20)
        thread.join(20)
        assert "data: [DONE]" not in lines


def test_a_second_signal_counts_even_on_top_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()
    app.state.gate = AdmissionControl(Limits(), batch=1)
    server = DrainingServer(server_config(app, drain_seconds=1, stall_seconds=1.0))

    def interrupted(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        server.handle_exit(signal.SIGTERM, None)

    monkeypatch.setattr("paceline.serve.run.LOG.info", interrupted)
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and server.force_exit


def test_a_port_in_use_is_said_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--target", "no-such-model", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_nobody_is_let_in_before_the_address_is_said() -> None:
    with open_socket("127.0.0.1", 0) as listening:
        address = listening.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        assert welcome(listening) == f"http://127.0.0.1:{address[1]}"
        socket.create_connection(address, timeout=5).close()


def test_a_port_taken_while_the_model_loaded_is_said() -> None:
    with open_socket("127.0.0.1", 0) as first, open_socket("127.0.0.1", first.getsockname()[1]) as second:
        welcome(first)
        with pytest.raises(OptionError, match="cannot listen"):
            welcome(second)


def test_beyond_this_machine_a_key_is_a_must(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert "--api-key" in capsys.readouterr().err
    assert serve_settings(arguments("--host", "0.0.0.0", "--no-key")).hosts == ()
    assert "127.0.0.1" in serve_settings(arguments()).hosts


def test_keys_come_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("from-a-file-1\nfrom-a-file-2\n")
    monkeypatch.setenv(KEYS_VARIABLE, "from-outside-1,from-outside-2")
    found = api_keys(arguments("--api-key", "from-a-flag", "--api-key-file", str(file)))
    assert found == ("from-a-flag", "from-outside-1", "from-outside-2", "from-a-file-1", "from-a-file-2")
    with pytest.raises(OptionError, match="cannot be read"):
        api_keys(arguments("--api-key-file", str(tmp_path / "none")))


@pytest.mark.parametrize(("words", "message"), [(["-k", "999"], "0 to 128"), (["--max-queue", "-1"], "queue")])
def test_impossible_arguments_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        serve_settings(arguments(*words))


def test_what_the_arguments_say_is_what_is_served() -> None:
    settings: Any = serve_settings(arguments("-k", "3", "--served-name", "a", "--served-name", "b", "--max-body", "99"))
    assert settings.num_draft_tokens == 3 and settings.names == ("a", "b") and settings.limits.body_bytes == 99
    assert serve_settings(arguments()).num_draft_tokens is None
