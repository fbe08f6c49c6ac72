"""An OpenAI-compatible server with speculation, batching and a page that shows what was guessed.

    paceline serve                                        the default model at http://127.0.0.1:8000/v1
    paceline serve --target BIG --draft SMALL             guesses from a smaller model
    paceline serve --method ngram -k 4 --port 9000        a fixed number of guesses
    PACELINE_API_KEYS=… paceline serve --host 0.0.0.0     for others; a key is then a must

Point any OpenAI client at /v1; open / in a browser to watch guesses being accepted. /metrics is for Prometheus, /health
for whoever restarts it. The first SIGTERM or Ctrl-C lets requests in progress finish, a second one ends them.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.arguments import add_model_arguments, decoder_options, quiet_transformers
from paceline.errors import MissingExtra, OptionError

if TYPE_CHECKING:
    from paceline.config import DecoderOptions
    from paceline.engines.local.settings import EngineSettings
    from paceline.serve.settings import ServerConfig

KEYS_VARIABLE = "PACELINE_API_KEYS"
BATCH, CACHE_TOKENS = 16, 32768


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    _add_door_arguments(parser)
    _add_limit_arguments(parser)


def _add_door_arguments(parser: argparse.ArgumentParser) -> None:
    door = parser.add_argument_group("door")
    door.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine only")
    door.add_argument("--port", type=int, default=8000)
    door.add_argument("--served-name", action="append", default=[], metavar="NAME", help="what clients call the model")
    door.add_argument("--api-key", action="append", default=[], metavar="KEY", help=f"repeatable; also {KEYS_VARIABLE}")
    door.add_argument("--api-key-file", type=Path, metavar="PATH", help="one key a line")
    door.add_argument("--no-key", action="store_true", help="listen beyond this machine without any key")
    door.add_argument("--allowed-host", action="append", default=[], metavar="NAME", help="host name to answer to")
    door.add_argument("--cors-origin", action="append", default=[], metavar="URL", help="web origin that may call")
    door.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    door.add_argument("--log-prompts", action="store_true", help="write prompts into the log")


def _add_limit_arguments(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits")
    limits.add_argument("--batch", type=int, default=BATCH, metavar="N", help="texts written at a time")
    limits.add_argument("--prefill-chunk", type=int, default=256, metavar="N", help="prompt tokens read between rounds")
    limits.add_argument("--residents", type=int, default=16, metavar="N", help="finished texts kept for reuse")
    limits.add_argument("--max-queue", type=int, default=256, metavar="N", help="texts that may wait; then 429")
    limits.add_argument("--max-per-key", type=int, default=0, metavar="N", help="requests of a key at a time; 0: any")
    limits.add_argument("--max-body", type=int, default=4 << 20, metavar="BYTES")
    limits.add_argument("--max-prompt-tokens", type=int, default=1 << 20, metavar="N")
    limits.add_argument("--max-new-tokens", type=int, default=1 << 20, metavar="N")
    limits.add_argument("--max-choices", type=int, default=32, metavar="N", help="texts one request may ask for")
    limits.add_argument("--request-seconds", type=float, default=600.0, metavar="S")
    limits.add_argument("--stall-seconds", type=float, default=30.0, metavar="S", help="for a client to send or take")
    limits.add_argument("--drain-seconds", type=int, default=60, metavar="S", help="for requests to finish at the end")


def main(args: argparse.Namespace) -> int:
    try:
        from paceline.serve.access_log import configure_logs
        from paceline.serve.app import create_app
        from paceline.serve.run import open_socket, run, welcome
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "serve") from error
    from paceline.build import engine

    options, settings = _options(args), serve_settings(args)
    wanted = _engine_settings(args)
    with open_socket(args.host, args.port) as listening:
        quiet_transformers()
        working = engine(options, wanted)
        configure_logs(args.log_level)
        app = create_app(working, working.tokenizer, settings)
        print(f"paceline serves {settings.names[0]} at {welcome(listening)}/v1", flush=True)
        run(app, listening, args.drain_seconds, args.stall_seconds)
    return 0


def _options(args: argparse.Namespace) -> DecoderOptions:
    from dataclasses import replace

    # The engine itself always adapts; a fixed k is the default of requests that do not choose.
    chosen = decoder_options(args, otherwise="auto")
    # What the engine keeps beside the cache is its own affair: it adds to --cache-tokens.
    return replace(chosen, num_draft_tokens="auto", kv_cache_tokens=None, trust_remote_code=args.trust_remote_code)


def _engine_settings(args: argparse.Namespace) -> EngineSettings:
    from paceline.engines.local.settings import EngineSettings

    return EngineSettings(
        max_num_seqs=args.batch,
        kv_cache_tokens=CACHE_TOKENS if args.kv_cache_tokens is None else args.kv_cache_tokens,
        prefill_chunk=args.prefill_chunk,
        residents=args.residents,
    )


def serve_settings(args: argparse.Namespace) -> ServerConfig:
    """What the arguments say about the door and the limits. Raises OptionError."""
    from paceline.config import checked_num_draft_tokens
    from paceline.serve.settings import LOOPBACK, Limits, ServerConfig

    local = args.host in LOOPBACK
    keys = api_keys(args)
    if not local and not keys and not args.no_key:
        raise OptionError(
            f"anyone could use a server on {args.host}: give it a key (--api-key, --api-key-file or {KEYS_VARIABLE}), "
            f"or say --no-key"
        )
    k = checked_num_draft_tokens(args.num_draft_tokens)
    return ServerConfig(
        names=tuple(args.served_name) or (str(args.target),),
        batch=args.batch,
        keys=keys,
        hosts=(*(LOOPBACK if local else ()), *args.allowed_host),
        origins=tuple(args.cors_origin),
        num_draft_tokens=k if isinstance(k, int) else None,
        log_prompts=args.log_prompts,
        limits=Limits(
            body_bytes=args.max_body,
            prompt_tokens=args.max_prompt_tokens,
            new_tokens=args.max_new_tokens,
            choices=args.max_choices,
            queue=args.max_queue,
            per_key=args.max_per_key,
            seconds=args.request_seconds,
            stall=args.stall_seconds,
        ),
    )


def api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Keys from arguments, a file and the environment, together."""
    found = [*args.api_key, *os.environ.get(KEYS_VARIABLE, "").replace(",", " ").split()]
    if args.api_key_file is not None:
        try:
            found += args.api_key_file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"the keys in {args.api_key_file} cannot be read: {error}") from error
        if not found:
            raise OptionError(f"{args.api_key_file} holds no key; write one a line")
    return tuple(dict.fromkeys(found))
