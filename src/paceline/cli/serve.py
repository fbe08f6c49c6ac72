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
import json
import os
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import AUTO, CacheConfig, EngineConfig, ModelConfig, SpeculativeConfig
from paceline.errors import MissingExtra, OptionError
from paceline.serve.config import API_KEYS_VARIABLE, FLAG_CLASSES, NetworkConfig, RequestLimits, ServerConfig

if TYPE_CHECKING:
    from paceline.core.protocols import Engine

GROUPS = ("model", "speculation", "sampling", "server")
MAX_NUM_SEQS = 16
Groups = dict[str, argparse._ArgumentGroup]


def configure(parser: argparse.ArgumentParser) -> None:
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    _add_engine_flags(groups)
    for config_class in FLAG_CLASSES:
        add_flags(groups, config_class, "server")
    parser.set_defaults(max_num_seqs=MAX_NUM_SEQS)


def main(args: argparse.Namespace) -> int:
    try:
        from paceline.serve.access_log import configure_logging
        from paceline.serve.app import create_app
        from paceline.serve.run import bind_socket, run, start_listening
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "serve") from error

    engine_config = _engine_config(args)
    config = server_config(args, engine_config)
    with bind_socket(config.network.host, config.network.port) as bound_socket:
        engine = _open_engine(engine_config)
        configure_logging(config.log_level)
        app = create_app(engine, config)
        url = start_listening(bound_socket)
        print(f"paceline serves {config.served_model_names[0]} at {url}/v1", flush=True)
        run(app, bound_socket, config.limits)
    return 0


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


def add_flags(groups: Groups, config_class: type[Any], group: str, **help_values: str) -> None:
    """A flag for each field of the class that has flags, in the group that the field or `group` names."""
    for config_field in flag_fields(config_class):
        metadata = config_field.metadata
        how = dict(metadata["argparse"])
        if how.get("action") == "append":
            how["default"] = []
        else:
            how["default"] = config_field.default
        if how.get("action") != "store_true":
            how["metavar"] = metadata["metavar"]
        flags = metadata["flags"] or (f"--{config_field.name.replace('_', '-')}",)
        help_text = metadata["help"].format(**help_values) if help_values else metadata["help"]
        groups[metadata.get("group", group)].add_argument(*flags, dest=config_field.name, help=help_text, **how)


def flag_values(args: argparse.Namespace, config_class: type[Any]) -> dict[str, Any]:
    """The values of a class's flags by field name. Repeated flags are tuples."""
    values = {config_field.name: getattr(args, config_field.name) for config_field in flag_fields(config_class)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


# --- the engine: until paceline.cli.flags generates these flags for every command -------------------------------------
# Then _add_engine_flags is add_config_flags(parser, ModelConfig, SpeculativeConfig, CacheConfig, EngineConfig) and
# _engine_config is config_from_args(args) with per_request=True.

ENGINE_GROUPS = {"model": (ModelConfig, CacheConfig, EngineConfig), "speculation": (SpeculativeConfig,)}


def _add_engine_flags(groups: Groups) -> None:
    from paceline.drafting import registry as drafters
    from paceline.engines import registry as engines

    groups["model"].add_argument(
        "model", nargs="?", default="default", metavar="MODEL", help="`default`, Hub id, directory or .gguf"
    )
    help_values = {"methods": ", ".join(drafters.names()), "engines": ", ".join(engines.names())}
    for group, config_classes in ENGINE_GROUPS.items():
        for config_class in config_classes:
            add_flags(groups, config_class, group, **help_values)


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    """What the flags and the profile of `paceline tune` say about the engine."""
    from paceline.tuned import adopted

    options: dict[str, Any] = {"model": args.model, "per_request": True}
    for config_classes in ENGINE_GROUPS.values():
        for config_class in config_classes:
            options |= flag_values(args, config_class)
    options["draft_options"] = dict(map(_draft_option, args.draft_options))
    options["method"] = args.method or (None if args.draft_model else AUTO)
    chosen = bool(args.method or args.draft_model or args.draft_options)
    return adopted(EngineConfig.create(**options), chosen=chosen)


def _draft_option(text: str) -> tuple[str, Any]:
    """`nodes=24` -> ("nodes", 24). A value that is not JSON is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise OptionError(f"--draft-option takes NAME=VALUE, not {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _open_engine(config: EngineConfig) -> Engine:
    from transformers.utils import logging

    from paceline.build import open_engine

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # The engine adapts k; a fixed k is the default of requests that do not choose one.
    return open_engine(config.with_options(num_draft_tokens=AUTO))
