"""A Hugging Face Hub on this machine: the routes that huggingface_hub uses to list and to download files.

HF_ENDPOINT names it. It can break connections, wait in the middle of a file, damage one, and ask for a token.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.scripted_http import ScriptedHandler

COMMIT = "c0ffee" + "0" * 34
LARGE = (".safetensors", ".gguf", ".bin")  # what the Hub keeps in large-file storage
PIECE = 1 << 16


@dataclass(frozen=True)
class Call:
    """One request: LIST for the files of a repository, HEAD or GET of one. start: the first byte asked for."""

    method: str
    file: str
    start: int


@dataclass
class FakeHub:
    """Repositories by name, each a table of files.

    break_at   the connection of this file breaks after so many bytes, once
    answers    statuses that downloads of this file get instead of it, one each
    wait_at    the file stops after so many bytes, until `go_on` is set
    damaged    files whose bytes are not those of their hash
    token      what must be sent; None: nothing
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    break_at: dict[str, int] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    wait_at: dict[str, int] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    token: str | None = None
    calls: list[Call] = field(default_factory=list)
    waiting: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    endpoint: str = ""

    def add(self, repository: str, folder: Path) -> None:
        """A repository of the files of a folder."""
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        self.repositories[repository] = {name: path.read_bytes() for name, path in files.items()}

    def starts(self, file: str) -> list[int]:
        """Where each download of a file began."""
        return [call.start for call in self.calls if call.method == "GET" and call.file == file]


def digest(name: str, data: bytes) -> str:
    if name.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": "0" * 40}
    if name.endswith(LARGE):
        return entry | {"lfs": {"size": len(data), "sha256": digest(name, data), "pointerSize": 130}}
    return entry | {"blobId": digest(name, data)}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(ScriptedHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            listed = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
            repository = hub.repositories.get((listed or file or [None, ""])[1])
            if repository is None or (hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}"):
                self._refuse("RepoNotFound", 401)
            elif listed is not None:
                self._list(listed[1], repository)
            elif file is not None and file[2] in repository:
                self._send(file[2], repository[file[2]])
            else:
                self._refuse("EntryNotFound", 404)

        def _refuse(self, code: str, status: int) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _list(self, name: str, repository: dict[str, bytes]) -> None:
            hub.calls.append(Call("LIST", name, 0))
            siblings = [_entry(file, data) for file, data in repository.items()]
            body = json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _send(self, name: str, data: bytes) -> None:
            match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            start = int(match[1]) if match else 0
            hub.calls.append(Call(self.command, name, start))
            if self.command == "GET" and hub.answers.get(name):
                self._refuse("", hub.answers[name].pop(0))
                return
            self.send_response(206 if match else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{digest(name, data)}"')
            self.send_header("Content-Length", str(len(data) - start))
            if match:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if self.command == "GET":
                self._body(name, data[:-1] + b"?" if name in hub.damaged else data, start)

        def _body(self, name: str, data: bytes, start: int) -> None:
            for place in range(start, len(data), PIECE):
                if name in hub.wait_at and place >= hub.wait_at[name]:
                    hub.waiting.set()
                    hub.go_on.wait(120)
                if name in hub.break_at and place >= hub.break_at[name]:
                    hub.break_at.pop(name)
                    self.close_connection = True
                    return
                try:
                    self.wfile.write(data[place : place + PIECE])
                except OSError:  # the client is gone
                    self.close_connection = True
                    return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        server.server_close()


def use_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: Path, *, offline: bool = False) -> None:
    """Let huggingface_hub, in this process and in new ones, speak to a hub and keep its files in a folder."""
    from huggingface_hub import constants

    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_HOME", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if offline else "0")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("PACELINE_CACHE", str(cache / "paceline"))
