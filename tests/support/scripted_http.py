"""The handler under every scripted server: says nothing on stderr, and answers at once."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from typing import Any


class ScriptedHandler(BaseHTTPRequestHandler):
    """Subclasses answer."""

    disable_nagle_algorithm = True  # or every answer, sent in two pieces, waits for the first one's receipt

    def log_message(self, *args: Any) -> None:
        pass
