"""An OpenAI-compatible server with speculative decoding, batching and a web page that shows the draft tokens.

    paceline serve                                        the default model at http://127.0.0.1:8000/v1
    paceline serve MODEL --draft-model SMALL              draft tokens from a smaller model
    paceline serve MODEL --method ngram -k 4 --port 9000  four draft tokens a step, without a draft model
    PACELINE_API_KEYS=… paceline serve --host 0.0.0.0     serve other machines; this needs an API key
    paceline serve --method eagle --learn DIR --learn-consent    the head learns from the traffic, which is stored
    paceline serve MODEL OTHER                            several models; requests choose by `model`
    paceline serve --config serve.toml                    … each with its own names and options

Point any OpenAI client at /v1, and open / in a browser to watch draft tokens being accepted. /metrics is for
Prometheus, /health for a load balancer. Where the worker of an engine dies, the engine is restarted. The first SIGTERM
or Ctrl-C lets running requests finish, a second one aborts them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import Field, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import interrupt, loading
from paceline.cli.flags import add_config_flags, config_from_args, named_values
from paceline.cli.generation_config import NONE as NO_DEFAULTS
from paceline.cli.generation_config import mention_applied
from paceline.cli.serve_config import arguments_of_models, check_names
from paceline.config import AUTO, EngineConfig
from paceline.errors import MissingExtra, OptionError
from paceline.serve.config import (
    API_KEYS_VARIABLE,
    FLAG_CLASSES,
    FailurePolicy,
    LearnConfig,
    NetworkConfig,
    RequestLimits,
    ServerConfig,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

    from paceline.core.protocols import Engine

MAX_NUM_SEQS = 16
Groups = dict[str, argparse._ArgumentGroup]


def configure(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser, positional_model=True, default_method=AUTO)
    parser.add_argument("more_models", nargs="*", default=[], metavar="OTHER", help="further models")
    lora_help = "a LoRA adapter in PEFT's layout, asked for as MODEL:NAME; repeatable"
    parser.add_argument("--lora", action="append", default=[], metavar="NAME=DIR", help=lora_help)
    parser.add_argument("--config", metavar="FILE", help="a TOML file: [server] settings and [[models]]")
    groups = {name: parser.add_argument_group(name) for name in ("sampling", "server")}
    for config_class in FLAG_CLASSES:
        add_flags(groups, config_class)
    parser.set_defaults(max_num_seqs=MAX_NUM_SEQS)


def main(args: argparse.Namespace) -> int:
    try:
        from paceline.serve.access_log import configure_logging
        from paceline.serve.chat_template import chat_template
        from paceline.serve.run import bind_socket, run, start_listening
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "serve") from error

    launches = [Launch.of(model_args) for model_args in arguments_of_models(args)]
    check_names(name for launch in launches for name in launch.server.served_model_names)
    check_learning(launches)
    for launch in launches:
        chat_template("", launch.server)  # a wrong name or file is an error before the model is loaded
    config = launches[0].server
    if config.network.has_short_key:
        print("paceline: a short API key can be found by trying; `openssl rand -hex 24` makes one", file=sys.stderr)
    with bind_socket(config.network.host, config.network.port) as bound_socket:
        app = open_app(launches)
        configure_logging(config.log_level)
        url = start_listening(bound_socket)
        names = ", ".join(launch.server.served_model_names[0] for launch in launches)
        print(f"paceline serves {names} at {url}/v1", flush=True)
        run(app, bound_socket, config.limits)
    return 0


def check_learning(launches: list[Launch]) -> None:
    """Raise OptionError where several models would learn in one folder."""
    if len(launches) > 1 and launches[0].server.learning.learn is not None:
        raise OptionError("--learn is for a server with one model; start one server for each model that learns")


@dataclass(frozen=True, slots=True)
class Launch:
    """One model to serve: how its engine is opened, and how the server presents it."""

    engine: EngineConfig
    server: ServerConfig

    @classmethod
    def of(cls, args: argparse.Namespace) -> Launch:
        engine_config = engine_config_from_args(args)
        return cls(engine_config, server_config(args, engine_config))


def open_app(launches: list[Launch]) -> FastAPI:
    """Open the engines, and return the application that serves them and restarts those that fail."""
    from paceline.serve.app import create_app
    from paceline.serve.context import ModelToServe

    engines = [open_supervised(launch) for launch in launches]
    models = [
        ModelToServe(engine.engine, with_sampling_defaults(launch.server, launch.engine))
        for engine, launch in zip(engines, launches)
    ]
    first, *others = models
    return create_app(first.engine, first.config, others, [work for engine in engines for work in engine.background])


@dataclass(frozen=True, slots=True)
class EngineAndWork:
    """An engine to serve, and what runs beside the server for it."""

    engine: Engine
    background: list[Callable[[], Awaitable[None]]]


def open_supervised(launch: Launch) -> EngineAndWork:
    """The engine of one model, restarted where it fails; with --learn its head learns."""
    from paceline.serve.supervisor import SupervisedEngine

    learn, failure = launch.server.learning, launch.server.failure
    if learn.learn is None:
        engine = SupervisedEngine(partial(open_served_engine, launch.engine), failure)
        return EngineAndWork(engine, [engine.watch])

    from paceline.learning.learner import Learner, head_in_use
    from paceline.learning.serving import learner_settings

    settings = learner_settings(launch.engine, learn)
    engine = SupervisedEngine(
        lambda: open_served_engine(launch.engine.with_options(draft_model=str(head_in_use(settings)))), failure
    )
    learner = Learner(engine, settings)
    return EngineAndWork(learner.engine, [engine.watch, learner.watch])


def engine_config_from_args(args: argparse.Namespace) -> EngineConfig:
    """The configuration of the engine: each request may choose its method and number of draft tokens."""
    lora = {name: str(folder) for name, folder in named_values("--lora", args.lora).items()}
    return config_from_args(args, default_method=AUTO, per_request=True, lora=lora)


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
    choices, loras = flag_values(args, ServerConfig), tuple(engine_config.model.lora)
    names = choices["served_model_names"] or (str(engine_config.model.model),)
    k = engine_config.speculative.num_draft_tokens
    return ServerConfig(
        **{**choices, "served_model_names": (*names, *(f"{name}:{lora}" for lora in loras for name in names))},
        loras=loras,
        network=NetworkConfig(**{**flag_values(args, NetworkConfig), "api_keys": api_keys(args)}),
        limits=RequestLimits(**flag_values(args, RequestLimits)),
        failure=FailurePolicy(**flag_values(args, FailurePolicy)),
        learning=LearnConfig(**flag_values(args, LearnConfig)),
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
