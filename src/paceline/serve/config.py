"""Everything that can be chosen about a server, validated once.

A field with a flag in its metadata is a flag of `paceline serve`. The command line and the table of docs/serving.md
follow these fields, so a setting is written here and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import OptionError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
ANY_ORIGIN, LOCAL_ORIGINS = "*", "localhost"  # of --cors-origin
API_KEYS_VARIABLE = "PACELINE_API_KEYS"
SHORT_API_KEY = 8  # characters; fewer are found by trying
MAX_PORT = 65535
ZERO_ALLOWED = ("max_waiting", "max_requests_per_key", "default_max_tokens", "ping_interval", "drain_timeout")
LOG_LEVELS = ("debug", "info", "warning", "error")
WHOLE_VOCABULARY = -1  # of max_logprobs


def option(default: Any, flag: str, metavar: str, help: str, group: str = "server", **how: Any) -> Any:
    """A field with a flag, described as in paceline.config. how: passed on to argparse."""
    if isinstance(default, bool):
        how["action"] = "store_true"
    elif isinstance(default, tuple):
        how["action"] = "append"
    elif isinstance(default, int | float):
        how["type"] = type(default)
    metadata = {"help": help, "metavar": metavar, "flags": (flag,), "argparse": how, "group": group}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Where the server listens, and which clients it serves.

    api_keys  with no keys every client that reaches the port is served, so listening beyond this machine without keys
              must be asked for with no_api_key
    """

    host: str = option("127.0.0.1", "--host", "ADDRESS", "address to listen on; default: this machine only")
    port: int = option(8000, "--port", "N", "port to listen on; 0: any free port")
    api_keys: tuple[str, ...] = option((), "--api-key", "KEY", f"API key; repeatable; also {API_KEYS_VARIABLE}")
    api_key_file: str | None = option(None, "--api-key-file", "PATH", "file of API keys, one a line")
    no_api_key: bool = option(False, "--no-api-key", "", "listen beyond this machine without an API key")
    allowed_hosts: tuple[str, ...] = option((), "--allowed-host", "NAME", "Host header to accept; repeatable")
    cors_origins: tuple[str, ...] = option(
        (), "--cors-origin", "URL", "web origin that may call; repeatable; localhost: pages of this machine; *: any"
    )
    root_path: str | None = option(None, "--root-path", "PATH", "what a proxy puts before every path; both are served")

    def __post_init__(self) -> None:
        if self.root_path is not None and not (self.root_path.startswith("/") and self.root_path.strip("/")):
            raise OptionError(f"--root-path is a path such as /llm, not {self.root_path!r}")
        if not 0 <= self.port <= MAX_PORT:
            raise OptionError(f"--port must be 0 to {MAX_PORT}, not {self.port}")
        if not all(key.strip() for key in self.api_keys):
            raise OptionError("an API key is empty; `openssl rand -hex 24` makes a good one")
        if not (self.is_loopback or self.api_keys or self.no_api_key):
            raise OptionError(
                f"anyone could use a server on {self.host}: set an API key (--api-key, --api-key-file or "
                f"{API_KEYS_VARIABLE}), or pass --no-api-key"
            )

    @property
    def has_short_key(self) -> bool:
        """Whether a key is so short that trying finds it; it works all the same, as in other servers."""
        return any(len(key) < SHORT_API_KEY for key in self.api_keys)

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK

    @property
    def accepted_hosts(self) -> tuple[str, ...]:
        """Host headers that are served; empty: any.

        A local server checks them, because a web page can point a name of its own at this machine.
        """
        return (*(LOOPBACK if self.is_loopback else ()), *self.allowed_hosts)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request, one API key and the server as a whole may ask for."""

    max_waiting: int = option(256, "--max-waiting", "N", "sequences that may wait; more are refused with 429")
    max_requests_per_key: int = option(0, "--max-requests-per-key", "N", "concurrent requests of a key; 0: no limit")
    max_body_bytes: int = option(4 << 20, "--max-body-bytes", "N", "size of a request body")
    max_prompt_tokens: int = option(1 << 20, "--max-prompt-tokens", "N", "tokens of one prompt")
    max_new_tokens: int = option(1 << 20, "--max-new-tokens", "N", "tokens one choice may generate", "sampling")
    default_max_tokens: int = option(
        0, "--default-max-tokens", "N", "max_tokens where a chat has none; 0: the rest of the context", "sampling"
    )
    max_choices: int = option(32, "--max-choices", "N", "choices of one request: n times the prompts")
    max_logprobs: int = option(20, "--max-logprobs", "N", "alternatives of one token; -1: the whole vocabulary")
    request_timeout: float = option(600.0, "--request-timeout", "S", "seconds for a whole request; then 408")
    stall_timeout: float = option(30.0, "--stall-timeout", "S", "seconds a client may take to send or to receive")
    ping_interval: float = option(
        15.0, "--ping-interval", "S", "seconds of silence after which a stream sends a comment; 0: never"
    )
    drain_timeout: int = option(60, "--drain-timeout", "S", "seconds for running requests at shutdown")

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name == "max_logprobs" and value == WHOLE_VOCABULARY:
                continue
            zero_allowed = name in ZERO_ALLOWED
            if not math.isfinite(value) or value < 0 or (value < 1e-3 and not zero_allowed):
                raise OptionError(f"{name} must be {'0 or more' if zero_allowed else 'above 0'}, not {value}")

    @property
    def chat_max_tokens(self) -> int:
        """max_tokens of a chat that has none; what does not fit the context is cut off later."""
        return min(self.default_max_tokens or self.max_new_tokens, self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """What the server does when the worker of an engine dies."""

    on_engine_failure: str = option(
        "restart",
        "--on-engine-failure",
        "WHAT",
        "when an engine's worker dies: restart the engine, or exit with an error",
        choices=("restart", "exit"),
    )
    max_engine_restarts: int = option(
        5, "--max-engine-restarts", "N", "restarts of an engine in a row; then the server exits with an error"
    )

    def __post_init__(self) -> None:
        if self.max_engine_restarts < 0:
            raise OptionError(f"max_engine_restarts must be 0 or more, not {self.max_engine_restarts}")

    @property
    def restarts(self) -> bool:
        return self.on_engine_failure == "restart"


@dataclass(frozen=True, slots=True)
class LearnConfig:
    """Whether the head that drafts learns from the server's traffic."""

    learn: str | None = option(None, "--learn", "DIR", "adapt the head to the traffic, and keep both in this folder")
    learn_consent: bool = option(
        False, "--learn-consent", "", "agree that --learn stores prompts and answers as token ids"
    )
    learn_ring_mb: int = option(64, "--learn-ring-mb", "N", "size of what --learn stores; the oldest is deleted")
    learn_device: str | None = option(
        None, "--learn-device", "D", "where --learn trains; default: the model's device, while no request runs"
    )
    learn_steps: int = option(16, "--learn-steps", "N", "training steps before a new head is first compared")

    def __post_init__(self) -> None:
        if self.learn is not None and not self.learn_consent:
            raise OptionError(
                f"--learn stores every prompt and answer as token ids, which can be turned back into text, in "
                f"{self.learn} (at most {self.learn_ring_mb} MB); add --learn-consent if you and your users agree"
            )
        if self.learn_ring_mb < 1 or self.learn_steps < 1:
            raise OptionError("--learn-ring-mb and --learn-steps must be 1 or more")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server presents the engine.

    served_model_names  what clients call the model; responses carry the first. NAME:LORA is NAME with an adapter
    loras               names of the model's adapters
    max_num_seqs        sequences the engine runs at a time; the admission control counts the others as waiting
    sampling_defaults   fields of SamplingParams for requests that do not set them, from the model's generation config
    max_model_len       prompt and output tokens of one sequence; None: the model's own limit
    num_draft_tokens    k of requests that do not choose; None: the engine's draft-length policy
    """

    served_model_names: tuple[str, ...] = option(
        (), "--served-model-name", "NAME", "model name in the API; repeatable; default: MODEL"
    )
    log_level: str = option("info", "--log-level", "LEVEL", "debug, info, warning or error", choices=LOG_LEVELS)
    log_prompts: bool = option(False, "--log-prompts", "", "write prompts into the log")
    otlp_traces_endpoint: str | None = option(
        None, "--otlp-traces-endpoint", "URL", "send a trace of each request to this OpenTelemetry collector"
    )
    strict: bool = option(False, "--strict", "", "refuse unknown fields of a request instead of ignoring them")
    generation_config: str = option(
        "model",
        "--generation-config",
        "WHOSE",
        "sampling defaults: model, those of its generation_config.json, or none, OpenAI's",
        "sampling",
        choices=("model", "none"),
    )
    seed: int | None = option(
        None, "--seed", "N", "seed of requests that give none: the same request has one output", "sampling", type=int
    )
    return_tokens_as_token_ids: bool = option(
        False, "--return-tokens-as-token-ids", "", "spell the tokens of log-probabilities token_id:N for every request"
    )
    enable_force_include_usage: bool = option(
        False, "--enable-force-include-usage", "", "every chunk of a stream carries token counts, asked for or not"
    )
    pooling: str = option(
        "mean",
        "--pooling",
        "HOW",
        "embeddings are the mean, the last or the first (cls) of the hidden states",
        choices=("mean", "last", "cls"),
    )
    tool_parser: str = option(
        "auto", "--tool-parser", "NAME", "how the model writes tool calls; auto: as its chat template says; or none"
    )
    reasoning_parser: str = option(
        "auto", "--reasoning-parser", "NAME", "how the model marks reasoning; auto: as its chat template says; or none"
    )
    chat_template: str | None = option(
        None, "--chat-template", "PATH", "chat template, a file or the template itself; default: the model's"
    )
    network: NetworkConfig = field(default_factory=NetworkConfig)
    limits: RequestLimits = field(default_factory=RequestLimits)
    failure: FailurePolicy = field(default_factory=FailurePolicy)
    learning: LearnConfig = field(default_factory=LearnConfig)
    loras: tuple[str, ...] = ()
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    max_num_seqs: int = 16
    max_model_len: int | None = None
    num_draft_tokens: int | None = None

    def lora_of(self, name: str | None) -> str | None:
        """The adapter that a model name asks for; None: the model as it is."""
        lora = (name or "").rpartition(":")[2]
        return lora if lora in self.loras and name in self.served_model_names else None

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise OptionError("a server needs a name for its model")
        if self.max_num_seqs < 1:
            raise OptionError(f"max_num_seqs must be 1 or more, not {self.max_num_seqs}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise OptionError(f"max_model_len must be 2 or more, not {self.max_model_len}")


# The order of their flags in --help and in the docs.
FLAG_CLASSES = (ServerConfig, NetworkConfig, RequestLimits, FailurePolicy, LearnConfig)
