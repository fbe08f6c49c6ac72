"""Run an application until a signal: the first lets running requests finish, the second aborts them."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.errors import OptionError
from paceline.serve.config import RequestLimits
from paceline.serve.limits import AdmissionControl

LOG = logging.getLogger("paceline.serve")
BACKLOG = 2048  # uvicorn's default
KEEP_ALIVE_SECONDS = 30


class TimeoutProtocol(H11Protocol):
    """HTTP that closes a connection whose first request does not arrive in time."""

    first_request_timeout = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(self.first_request_timeout, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


class DrainingServer(uvicorn.Server):
    """The first SIGTERM or SIGINT lets running requests finish; a second one aborts them."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        repeated = self.should_exit
        super().handle_exit(sig, frame)  # before anything slow: the next signal can come at any moment
        if repeated:
            self._abort_requests()
        admission: AdmissionControl = self.config.app.state.admission  # type: ignore[union-attr]
        admission.shutting_down = True
        fields = {"signal": signal.Signals(sig).name, "in_flight": admission.in_flight}
        LOG.info("shutting down", extra={"fields": fields})

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop: also where something that the server cannot do without is lost."""
        fatal = self.config.app.state.fatal_error is not None  # type: ignore[union-attr]
        return await super().on_tick(counter) or fatal

    def _abort_requests(self) -> None:
        """Abort the connections: from Python 3.12 on, closing a server waits for them, forced or not."""
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.loop.call_soon_threadsafe(connection.transport.abort)


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind the port, so that a port in use is an error before the model is loaded.

    The socket does not listen yet: until `start_listening` a client is refused at once instead of waiting for a model.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = addresses[0]
        bound_socket = socket.socket(family, kind)
        bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound_socket.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    return bound_socket


def _cannot_listen(host: str, port: int, error: OSError) -> OptionError:
    return OptionError(f"cannot listen on {host} port {port}: {error.strerror or error}")


def start_listening(bound_socket: socket.socket) -> str:
    """Accept connections and return the URL. Those made before the server's loop runs wait in the socket's queue."""
    host, port = bound_socket.getsockname()[:2]
    try:
        bound_socket.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def uvicorn_config(app: FastAPI, limits: RequestLimits) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app,
        http=type("ServerProtocol", (TimeoutProtocol,), {"first_request_timeout": limits.stall_timeout}),
        ws="none",
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=limits.drain_timeout,
    )


def run(app: FastAPI, bound_socket: socket.socket, limits: RequestLimits) -> None:
    """Serve until a signal. Raises EngineFailed where an engine has failed for good."""
    DrainingServer(uvicorn_config(app, limits)).run(sockets=[bound_socket])
    if app.state.fatal_error is not None:
        raise app.state.fatal_error
