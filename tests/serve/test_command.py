"""`paceline serve` as a process: its messages, its signals, its flags."""

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
import openai
import pytest
from fastapi import FastAPI

from paceline.cli import main
from paceline.cli.serve import api_keys, configure, engine_config_from_args, server_config
from paceline.errors import OptionError
from paceline.serve.auth import ApiKeys
from paceline.serve.config import API_KEYS_VARIABLE, RequestLimits, ServerConfig
from paceline.serve.limits import AdmissionControl
from paceline.serve.run import DrainingServer, bind_socket, start_listening, uvicorn_config
from tests.support.tiny import write_tiny_model

LONG = {"prompt": "some text", "max_tokens": 400, "ignore_eos": True, "stream": True}


@pytest.fixture(autouse=True)
def no_keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEYS_VARIABLE, raising=False)


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    configure(parser)
    return parser.parse_args(flags)


def config_of(*flags: str) -> ServerConfig:
    args = parsed(*flags)
    return server_config(args, engine_config_from_args(args))


# --- signals ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A `paceline serve` process."""

    popen: subprocess.Popen[str]
    url: str


@contextmanager
def server_process(*arguments: str) -> Iterator[ServerProcess]:
    flags = ["--method", "ngram", "--port", "0", "--drain-timeout", "30"]
    command = [sys.executable, "-m", "paceline", "serve", *arguments, *flags]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert popen.stdout is not None
        line = popen.stdout.readline()
        match = re.search(r"(http://127\.0\.0\.1:\d+)/v1", line)
        assert match, line or (popen.stderr.read() if popen.stderr else "")
        yield ServerProcess(popen, match.group(1))
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.communicate()


@dataclass(frozen=True, slots=True)
class StreamClient:
    """A client in the middle of a long stream."""

    thread: threading.Thread
    lines: list[str]


def read_stream(url: str, lines: list[str], begun: threading.Event) -> None:
    """Read a long stream to its end, or until the connection breaks."""
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as response:
            for line in response.iter_lines():
                lines.append(line)
                begun.set()
    except httpx.HTTPError as error:
        lines.append(f"broken: {error!r}")
        begun.set()


def stream_client(url: str) -> StreamClient:
    lines: list[str] = []
    begun = threading.Event()
    thread = threading.Thread(target=read_stream, args=(url, lines, begun), daemon=True)
    thread.start()
    assert begun.wait(60)
    assert lines[0].startswith("data: "), lines
    return StreamClient(thread, lines)


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes seconds for a long sequence, so that signals come in the middle of it on any machine."""
    return write_tiny_model(tmp_path_factory.mktemp("deep") / "model", num_hidden_layers=20)


@pytest.mark.slow
def test_the_first_signal_lets_requests_finish(deep_folder: Path) -> None:
    with server_process(str(deep_folder)) as server:
        client = stream_client(server.url)
        server.popen.send_signal(signal.SIGTERM)
        client.thread.join(60)
        assert "data: [DONE]" in client.lines
        log = server.popen.communicate(timeout=30)[1]
        assert server.popen.returncode in (0, -signal.SIGTERM)
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert any(event["event"] == "shutting down" and event["in_flight"] == 1 for event in events)
    assert any(event.get("new_tokens") == 400 for event in events)


@pytest.mark.slow
def test_the_second_signal_aborts_requests(deep_folder: Path) -> None:
    with server_process(str(deep_folder)) as server:
        client = stream_client(server.url)
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.stderr is not None
        next(line for line in server.popen.stderr if "shutting down" in line)  # two signals at once count as one
        server.popen.send_signal(signal.SIGTERM)
        server.popen.communicate(timeout=20)
        client.thread.join(20)
        assert "data: [DONE]" not in client.lines


@pytest.mark.slow
def test_one_process_serves_the_models_of_a_file(deep_folder: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", seed=1)
    file = tmp_path / "serve.toml"
    file.write_text(
        f"[server]\nlog-level = 'error'\n"
        f"[[models]]\nmodel = '{deep_folder}'\nnames = ['deep']\nmax-model-len = 64\n"
        f"[[models]]\nmodel = '{other}'\nnames = ['flat', 'alias']\nmethod = 'none'\n"
    )
    with server_process("--config", str(file)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
        assert [model.id for model in client.models.list()] == ["deep", "flat", "alias"]
        texts = {
            name: client.completions.create(model=name, prompt="to be or", max_tokens=16, temperature=0).choices[0].text
            for name in ("deep", "flat", "alias")
        }
        assert texts["flat"] == texts["alias"] != texts["deep"]
        entries = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert entries[0]["x_paceline"]["max_model_len"] == 64 and entries[1]["x_paceline"]["methods"][0] == "none"
        server.popen.send_signal(signal.SIGTERM)
        server.popen.communicate(timeout=60)
        assert server.popen.returncode in (0, -signal.SIGTERM)


def test_a_second_signal_inside_the_handler_of_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()
    app.state.admission = AdmissionControl(RequestLimits(), max_num_seqs=1)
    server = DrainingServer(uvicorn_config(app, RequestLimits(drain_timeout=1, stall_timeout=1.0)))

    def interrupted(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        server.handle_exit(signal.SIGTERM, None)

    monkeypatch.setattr("paceline.serve.run.LOG.info", interrupted)
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and server.force_exit


# --- the port ---------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_an_error_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert main(["serve", "no-such-model", "--port", str(other.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_a_port_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no-such-model", "--port", "99999"]) == 2
    assert "--port must be 0 to 65535, not 99999" in capsys.readouterr().err


def test_connections_are_refused_until_the_server_listens() -> None:
    with bind_socket("127.0.0.1", 0) as bound_socket:
        address = bound_socket.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        assert start_listening(bound_socket) == f"http://127.0.0.1:{address[1]}"
        socket.create_connection(address, timeout=5).close()


def test_a_port_taken_while_the_model_is_loaded_is_an_error() -> None:
    with bind_socket("127.0.0.1", 0) as first, bind_socket("127.0.0.1", first.getsockname()[1]) as second:
        start_listening(first)
        with pytest.raises(OptionError, match="cannot listen"):
            start_listening(second)


# --- flags ------------------------------------------------------------------------------------------------------------


def test_listening_beyond_this_machine_needs_an_api_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert "--api-key" in capsys.readouterr().err
    assert config_of("--host", "0.0.0.0", "--no-api-key").network.accepted_hosts == ()
    assert "127.0.0.1" in config_of("--allowed-host", "a.example").network.accepted_hosts


def test_api_keys_come_from_flags_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("from-a-file-1\nfrom-a-file-2\n")
    monkeypatch.setenv(API_KEYS_VARIABLE, "from-outside-1,from-outside-2")
    keys = api_keys(parsed("--api-key", "from-a-flag", "--api-key-file", str(file)))
    assert keys == ("from-a-flag", "from-outside-1", "from-outside-2", "from-a-file-1", "from-a-file-2")
    with pytest.raises(OptionError, match="cannot be read"):
        api_keys(parsed("--api-key-file", str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-k", "999"], "0 to 128"),
        (["--port", "99999"], "--port must be 0 to 65535, not 99999"),
        (["--port", "-1"], "--port must be 0 to 65535, not -1"),
        (["--max-waiting", "-1"], "max_waiting"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--max-model-len", "1"], "max_model_len"),
        (["--api-key", ""], "an API key is empty"),
    ],
)
def test_impossible_flags_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        config_of(*flags)


def test_a_short_api_key_works_and_is_warned_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.cli.serve.open_app", lambda launches: None)
    monkeypatch.setattr("paceline.serve.run.run", lambda app, bound_socket, limits: None)
    for key, warns in (("sk-1234", True), ("sk-12345678", False)):
        assert main(["serve", "--port", "0", "--api-key", key]) == 0
        assert ("can be found by trying" in capsys.readouterr().err) == warns
    assert ApiKeys(config_of("--api-key", "sk-1234").network.api_keys).owner("Bearer sk-1234")


def test_flags_reach_the_configuration() -> None:
    flags = ["some/model", "-k", "3", "--served-model-name", "a", "--served-model-name", "b", "--max-body-bytes", "99"]
    config = config_of(*flags, "--max-model-len", "512", "--log-prompts", "--max-num-seqs", "4")
    assert config.num_draft_tokens == 3 and config.served_model_names == ("a", "b")
    assert config.limits.max_body_bytes == 99 and config.max_model_len == 512 and config.max_num_seqs == 4
    assert config.log_prompts and config.limits.request_timeout == 600


def test_the_defaults_serve_the_default_model_under_its_own_name() -> None:
    config = config_of()
    assert config.served_model_names == ("default",) and config.num_draft_tokens is None
    assert config_of("some/model").served_model_names == ("some/model",)


def test_help_groups_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == [
        "options",
        "model",
        "speculation",
        "engine",
        "distributed",
        "sampling",
        "server",
    ]
