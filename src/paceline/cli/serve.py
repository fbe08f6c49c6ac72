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
import types
import typing
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import MissingExtra, OptionError
from paceline.serve.config import API_KEYS_VARIABLE, FLAG_CLASSES, NetworkConfig, RequestLimits, ServerConfig

if TYPE_CHECKING:
    from paceline.core.protocols import Engine

GROUPS = ("model", "speculation", "sampling", "server")
Groups = dict[str, argparse._ArgumentGroup]


def configure(parser: argparse.ArgumentParser) -> None:
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    _add_engine_flags(groups)
    for config_class in FLAG_CLASSES:
        add_flags(groups, config_class)


def main(args: argparse.Namespace) -> int:
    try:
        from paceline.serve.access_log import configure_logging
        from paceline.serve.app import create_app
        from paceline.serve.run import bind_socket, run, start_listening
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "serve") from error

    config = server_config(args)
    with bind_socket(config.network.host, config.network.port) as bound_socket:
        engine = _open_engine(args)
        configure_logging(config.log_level)
        app = create_app(engine, config)
        url = start_listening(bound_socket)
        print(f"paceline serves {config.served_model_names[0]} at {url}/v1", flush=True)
        run(app, bound_socket, config.limits)
    return 0


# --- flags of the server, from the fields of its configuration --------------------------------------------------------


def add_flags(groups: Groups, config_class: type[Any]) -> None:
    """A flag for each field of the class that has one."""
    types_by_name = typing.get_type_hints(config_class)
    for config_field in fields(config_class):
        if "flag" in config_field.metadata:
            metadata = config_field.metadata
            options = _argument_options(config_field, types_by_name[config_field.name])
            groups[metadata["group"]].add_argument(
                metadata["flag"], dest=config_field.name, default=config_field.default, help=metadata["help"], **options
            )


def _argument_options(config_field: Field[Any], field_type: Any) -> dict[str, Any]:
    if field_type is bool:
        return {"action": "store_true"}
    options = {"metavar": config_field.metadata["metavar"], "choices": config_field.metadata.get("choices")}
    if typing.get_origin(field_type) is tuple:
        return {**options, "action": _AppendToTuple}
    optional = isinstance(field_type, types.UnionType)
    return {**options, "type": typing.get_args(field_type)[0] if optional else field_type}


class _AppendToTuple(argparse.Action):
    """A repeatable flag. Unlike "append" it leaves the default, which the configuration class owns, as it is."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), values))


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The configuration of the server. Raises OptionError."""
    network = {**_values(args, NetworkConfig), "api_keys": api_keys(args)}
    k = _num_draft_tokens(args)
    choices = _values(args, ServerConfig)
    choices["served_model_names"] = args.served_model_names or (str(args.target),)
    return ServerConfig(
        **choices,
        network=NetworkConfig(**network),
        limits=RequestLimits(**_values(args, RequestLimits)),
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        num_draft_tokens=k,
    )


def _values(args: argparse.Namespace, config_class: type[Any]) -> dict[str, Any]:
    names = [config_field.name for config_field in fields(config_class) if "flag" in config_field.metadata]
    return {name: getattr(args, name) for name in names}


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


# --- flags of the engine: until paceline.cli.flags generates them from paceline.config --------------------------------
# Then _add_engine_flags is add_config_flags(parser, ModelConfig, SpeculativeConfig, CacheConfig), _open_engine is
# build_engine(config_from_args(args)), and _num_draft_tokens reads config_from_args(args).

KV_CACHE_TOKENS = 32768


def _add_engine_flags(groups: Groups) -> None:
    _add_model_flags(groups["model"])
    _add_speculation_flags(groups["speculation"])


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "target", nargs="?", default="default", metavar="MODEL", help="`default`, Hub id, directory or .gguf"
    )
    group.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N; default: cuda where there is one")
    group.add_argument("--dtype", metavar="T", help="fp32, bf16, fp16, int8, int4; default: by device")
    group.add_argument("--runner", metavar="R", default="auto", help="auto, native or hf")
    group.add_argument("--batch-invariant", action="store_true", help="cuda: the same bits in every batch; slower")
    group.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    group.add_argument("--max-model-len", type=int, metavar="N", help="prompt and output tokens of a sequence")
    group.add_argument("--max-num-seqs", type=int, default=16, metavar="N", help="sequences that run at a time")
    group.add_argument("--kv-cache-tokens", type=int, metavar="N", help=f"KV cache size; default: {KV_CACHE_TOKENS}")
    group.add_argument("--prefix-cache-tokens", type=int, metavar="N", help="prompt tokens kept for reuse; 0: none")
    group.add_argument("--prefill-chunk", type=int, default=256, metavar="N", help="prompt tokens read a step")


def _add_speculation_flags(group: argparse._ArgumentGroup) -> None:
    from paceline.config import ACCEPTANCE, METHODS

    group.add_argument("--draft-model", dest="draft", metavar="MODEL", help="smaller model of the same vocabulary")
    group.add_argument("--draft-dtype", metavar="T", help="dtype of the draft model; it never changes the output")
    group.add_argument("--method", metavar="M", help=f"{', '.join(METHODS)}; default: auto")
    group.add_argument("-k", "--num-draft-tokens", metavar="N", default="auto", help="draft tokens a step: 0-128, auto")
    group.add_argument("--acceptance", metavar="R", help=f"{', '.join(ACCEPTANCE)}; default: token")
    group.add_argument(
        "--draft-option", dest="option", action="append", default=[], metavar="NAME=VALUE", help="such as nodes=24"
    )


def _num_draft_tokens(args: argparse.Namespace) -> int | None:
    """k of requests that do not choose; None: the draft-length policy."""
    from paceline.config import checked_num_draft_tokens

    k = checked_num_draft_tokens(args.num_draft_tokens)
    return k if isinstance(k, int) else None


def _open_engine(args: argparse.Namespace) -> Engine:
    from paceline.build import engine
    from paceline.cli.arguments import decoder_options, quiet_transformers
    from paceline.engines.local.settings import EngineSettings

    quiet_transformers()
    # The engine always adapts k; a fixed k is the default of requests that do not choose one.
    options = replace(
        decoder_options(args, otherwise="auto"),
        num_draft_tokens="auto",
        kv_cache_tokens=None,
        trust_remote_code=args.trust_remote_code,
    )
    settings = EngineSettings(
        max_num_seqs=args.max_num_seqs,
        kv_cache_tokens=KV_CACHE_TOKENS if args.kv_cache_tokens is None else args.kv_cache_tokens,
        prefill_chunk=args.prefill_chunk,
        residents=0 if args.prefix_cache_tokens == 0 else EngineSettings().residents,
    )
    return engine(options, settings)
