"""All that may be chosen about a server, validated once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.errors import OptionError

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request, one key and the server as a whole may ask for. Numbers are the most that is allowed.

    queue         texts that wait beyond those being written; more are turned away with 429
    per_key       requests of one key at a time; 0: no limit
    seconds       of one request from first byte to last
    stall         seconds a client may take to send its body or to take a piece of its answer
    """

    body_bytes: int = 4 << 20
    prompt_tokens: int = 1 << 20
    new_tokens: int = 1 << 20
    default_new_tokens: int = 1024
    choices: int = 32
    queue: int = 256
    per_key: int = 0
    seconds: float = 600.0
    stall: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            least = 0 if name in ("queue", "per_key") else 1e-3
            if not math.isfinite(value) or value < least:
                raise OptionError(f"the limit {name} must be {'0 or more' if not least else 'above 0'}, not {value}")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server presents itself and whom it lets in.

    names            what clients call the model; the first is shown
    keys             API keys; none: everyone who can reach the port
    hosts            names a request may be addressed to; empty: any. Guards a local server against web pages that
                     point a name of theirs at this machine
    origins          web origins that may call from a browser (CORS); none by default
    num_draft_tokens     k of requests that do not choose; None: as many as pay
    """

    names: tuple[str, ...]
    batch: int = 16
    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = LOOPBACK
    origins: tuple[str, ...] = ()
    num_draft_tokens: int | None = None
    log_prompts: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise OptionError("a server needs a name for its model")
        if any(len(key) < 8 for key in self.keys):
            raise OptionError("an API key has at least 8 characters; `openssl rand -hex 24` makes a good one")
