"""An OpenAI-compatible server with speculative decoding, batching and a web page that shows the draft tokens.

    paceline serve                                        the default model at http://127.0.0.1:8000/v1
    paceline serve MODEL --draft-model SMALL              draft tokens from a smaller model
    paceline serve MODEL --method ngram -k 4 --port 9000  four draft tokens a step, without a draft model
    PACELINE_API_KEYS=… paceline serve --host 0.0.0.0     serve other machines; this needs an API key

Point any OpenAI client at /v1, and open / in a browser to watch draft tokens being accepted. /metrics is for
Prometheus, /health for a load balancer. The first SIGTERM or Ctrl-C lets running requests finish, a second one aborts
them.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import interrupt, loading
from paceline.cli.flags import add_config_flags, config_from_args
from paceline.cli.generation_config import NONE as NO_DEFAULTS
from paceline.cli.generation_config import mention_applied
from paceline.config import AUTO, EngineConfig
from paceline.errors import MissingExtra, OptionError
from paceline.serve.config import API_KEYS_VARIABLE, FLAG_CLASSES, NetworkConfig, RequestLimits, ServerConfig

if TYPE_CHECKING:
    from paceline.core.protocols import Engine

MAX_NUM_SEQS = 16
Groups = dict[str, argparse._ArgumentGroup]


def configure(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser, positional_model=True)
    groups = {name: parser.add_argument_group(name) for name in ("sampling", "server")}
    for config_class in FLAG_CLASSES:
        add_flags(groups, config_class)
    parser.set_defaults(max_num_seqs=MAX_NUM_SEQS)


def main(args: argparse.Namespace) -> int:
    try:
        from paceline.serve.access_log import configure_logging
        from paceline.serve.app import create_app
        from paceline.serve.run import bind_socket, run, start_listening
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "serve") from error

    engine_config = engine_config_from_args(args)
    config = server_config(args, engine_config)
    with bind_socket(config.network.host, config.network.port) as bound_socket:
        engine = open_served_engine(engine_config)
        config = with_sampling_defaults(config, engine_config)
        configure_logging(config.log_level)
        app = create_app(engine, config)
        url = start_listening(bound_socket)
        print(f"paceline serves {config.served_model_names[0]} at {url}/v1", flush=True)
        run(app, bound_socket, config.limits)
    return 0


def engine_config_from_args(args: argparse.Namespace) -> EngineConfig:
    """The configuration of the engine: each request may choose its method and number of draft tokens."""
    return config_from_args(args, default_method=AUTO, per_request=True)


def open_served_engine(config: EngineConfig) -> Engine:
    """The engine adapts k, because a fixed k is only the default of requests that do not choose one.

    An engine whose requests cannot choose gets the fixed k.
    """
    from paceline.build import open_engine
    from paceline.cli.terminal import quiet_transformers
    from paceline.engines import registry

    quiet_transformers()
    adapts = registry.spec(config.engine).per_request
    engine = open_engine(config.with_options(num_draft_tokens=AUTO) if adapts else config)
    loading.done()
    interrupt.check()
    return engine


# --- the configuration of the server ----------------------------------------------------------------------------------


def server_config(args: argparse.Namespace, engine_config: EngineConfig) -> ServerConfig:
    """The configuration of a server over an engine. Raises OptionError."""
    choices = flag_values(args, ServerConfig)
    k = engine_config.speculative.num_draft_tokens
    return ServerConfig(
        **{**choices, "served_model_names": choices["served_model_names"] or (str(engine_config.model.model),)},
        network=NetworkConfig(**{**flag_values(args, NetworkConfig), "api_keys": api_keys(args)}),
        limits=RequestLimits(**flag_values(args, RequestLimits)),
        max_num_seqs=engine_config.max_num_seqs,
        max_model_len=engine_config.model.max_model_len,
        num_draft_tokens=k if isinstance(k, int) else None,
    )


def with_sampling_defaults(config: ServerConfig, engine_config: EngineConfig) -> ServerConfig:
    """The configuration with the sampling defaults of the model's generation config, unless it says none."""
    from paceline.engines import registry
    from paceline.hub.generation_config import generation_defaults

    if config.generation_config == NO_DEFAULTS or not registry.spec(engine_config.engine).reads_files:
        return config
    defaults = generation_defaults(engine_config.model.model)
    mention_applied(defaults, "OpenAI's")
    return replace(config, sampling_defaults=defaults.settings)


def api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """The keys of the flags, the environment and the file together. Raises OptionError."""
    keys = [*args.api_keys, *os.environ.get(API_KEYS_VARIABLE, "").replace(",", " ").split()]
    if args.api_key_file is not None:
        try:
            keys += Path(args.api_key_file).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"the API keys in {args.api_key_file} cannot be read: {error}") from error
        if not keys:
            raise OptionError(f"{args.api_key_file} holds no API key; write one a line")
    return tuple(dict.fromkeys(keys))


# --- flags from the fields of a configuration class -------------------------------------------------------------------


def flag_fields(config_class: type[Any]) -> list[Field[Any]]:
    return [config_field for config_field in fields(config_class) if "flags" in config_field.metadata]


def add_flags(groups: Groups, config_class: type[Any]) -> None:
    """A flag for each field of the class that has one, in the group that its metadata names."""
    for config_field in flag_fields(config_class):
        metadata = config_field.metadata
        how = {"default": config_field.default, **metadata["argparse"]}
        if how.get("action") == "append":
            how["default"] = []
        if metadata["metavar"]:
            how["metavar"] = metadata["metavar"]
        group = groups[metadata["group"]]
        group.add_argument(*metadata["flags"], dest=config_field.name, help=metadata["help"], **how)


def flag_values(args: argparse.Namespace, config_class: type[Any]) -> dict[str, Any]:
    """The values of a class's flags by field name. Repeated flags are tuples."""
    values = {config_field.name: getattr(args, config_field.name) for config_field in flag_fields(config_class)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
