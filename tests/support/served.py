"""A server as `paceline serve` puts it together from its flags, in a thread of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.cli.flags import CommandParser
from paceline.cli.serve import (
    configure,
    engine_config_from_args,
    open_served_engine,
    server_config,
    with_sampling_defaults,
)
from tests.serve.running import RunningServer, serving


@contextmanager
def serving_flags(*flags: str) -> Iterator[RunningServer]:
    """Serve what these flags ask for."""
    parser = CommandParser()
    configure(parser)
    args = parser.parse_args(flags)
    engine_config = engine_config_from_args(args)
    config = server_config(args, engine_config)
    engine = open_served_engine(engine_config)
    with serving(engine, with_sampling_defaults(config, engine_config)) as server:
        yield server
