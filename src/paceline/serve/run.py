"""Run an application until a signal: the first lets requests finish, the second ends them."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.errors import OptionError

LOG = logging.getLogger("paceline.serve")
BACKLOG = 2048  # uvicorn's own


class PatientProtocol(H11Protocol):
    """HTTP, for a limited time: a connection that never completes its first request is closed."""

    opening_seconds = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(self.opening_seconds, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


class DrainingServer(uvicorn.Server):
    """The first SIGTERM or SIGINT lets requests in progress finish; a second one ends them."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again = self.should_exit
        super().handle_exit(sig, frame)  # before anything slow: the next signal may come at any moment
        if again:
            self._end_requests()
        gate: Any = self.config.app.state.gate  # type: ignore[union-attr]
        gate.closing = True
        LOG.info("closing", extra={"fields": {"signal": signal.Signals(sig).name, "in_flight": gate.in_flight}})

    def _end_requests(self) -> None:
        """Cut the lines: from Python 3.12 on, closing a server waits for its connections, forced or not."""
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.loop.call_soon_threadsafe(connection.transport.abort)


def open_socket(host: str, port: int) -> socket.socket:
    """Take the port now, so that one in use is said in one line before a model is loaded.

    Nobody is let in yet: until `welcome` a client is refused at once instead of waiting for a model to load.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    return listening


def _cannot_listen(host: str, port: int, error: OSError) -> OptionError:
    return OptionError(f"cannot listen on {host} port {port}: {error.strerror or error}")


def welcome(listening: socket.socket) -> str:
    """Let clients in, and say where: those who come before the server's loop runs wait in the socket's queue."""
    host, port = listening.getsockname()[:2]
    try:
        listening.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_config(app: FastAPI, drain_seconds: int, stall_seconds: float) -> uvicorn.Config:
    """How the application is served."""
    return uvicorn.Config(
        app,
        http=type("Protocol", (PatientProtocol,), {"opening_seconds": stall_seconds}),
        ws="none",
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=drain_seconds,
    )


def run(app: FastAPI, listening: socket.socket, drain_seconds: int, stall_seconds: float) -> None:
    """Serve until a signal."""
    DrainingServer(server_config(app, drain_seconds, stall_seconds)).run(sockets=[listening])
