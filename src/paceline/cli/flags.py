"""Flags, generated from the fields of paceline.config, and the one road from a command line to a configuration.

An option is written down once, as a field with its help in paceline.config. `add_config_flags` gives it a flag and
`config_from_args` reads it back, so a command that uses both takes every option that the library takes. Nothing here
imports torch: help must be quick. The names of methods and engines are looked up when help is printed.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.cli import interrupt, loading
from paceline.cli.terminal import note
from paceline.config import (
    DEFAULT_MODEL,
    DRAFT_MODEL,
    NONE,
    PARTS,
    CacheConfig,
    DistributedConfig,
    EngineConfig,
    ModelConfig,
    SpeculativeConfig,
)
from paceline.errors import OptionError
from paceline.tuned import LOCAL, adopted

if TYPE_CHECKING:
    from paceline.decoder import SpeculativeDecoder

PREDICTION = "prediction"  # the method
DEFAULT_NEW_TOKENS = 256  # as in paceline.decoder
GROUPS: dict[str, tuple[type, ...]] = {
    "model": (ModelConfig,),
    "speculation": (SpeculativeConfig,),
    "engine": (CacheConfig, EngineConfig),
    "distributed": (DistributedConfig,),
}
MODEL_HELP = "`default`, a Hub id, a directory or a .gguf file"
RENAMED = {
    "--target": "MODEL or --model",
    "--draft": "--draft-model",
    "--draft-tokens": "--num-draft-tokens",
    "--option": "--draft-option",
    "--same-bits": "--batch-invariant",
    "--cache-tokens": "--kv-cache-tokens",
    "--batch": "--max-num-seqs",
    "--prefill-chunk": "--prefill-chunk-tokens",
    "--residents": "--prefix-cache-tokens",
    "--no-key": "--no-api-key",
    "--max-queue": "--max-waiting",
    "--max-per-key": "--max-requests-per-key",
    "--max-body": "--max-body-bytes",
    "--request-seconds": "--request-timeout",
    "--stall-seconds": "--stall-timeout",
    "--drain-seconds": "--drain-timeout",
    "--served-name": "--served-model-name",
    "--ignore-end": "--ignore-eos",
}


# --- the parser of every command --------------------------------------------------------------------------------------


class CommandHelp(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a command's docstring, the usage short, and fills in the names that the registries hold."""

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Iterable[Any], prefix: str | None = None
    ) -> None:
        needed = [action for action in actions if action.required or not action.option_strings]
        parts = [" ".join((*action.option_strings[-1:], self._format_args(action, action.dest))) for action in needed]
        super().add_usage(usage or " ".join(["%(prog)s", *parts, "[options]"]), [], [], prefix)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        for placeholder, names in REGISTRIES.items():
            if text and placeholder in text:
                text = text.replace(placeholder, ", ".join(names()))
        return text and text + _default_text(action, text)


def _default_text(action: argparse.Action, text: str) -> str:
    """The default, where a flag has one and the help does not name it."""
    default = action.default
    if not action.option_strings or default in (None, False, "", argparse.SUPPRESS) or isinstance(default, list | dict):
        return ""
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    return "" if "default" in text or f"({shown})" in text else f"; default: {shown}"


class CommandParser(argparse.ArgumentParser):
    """Flags are written in full; one that was renamed or misspelt is answered with the right one."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": CommandHelp, **how})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """A flag that the parser of a subcommand does not know is its own error: its flags are those to suggest."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        _, _, flags = message.partition("unrecognized arguments: ")
        names = [flag.partition("=")[0] for flag in flags.split()]
        super().error("; ".join([message, *filter(None, map(self._hint, names))]))

    def _hint(self, name: str) -> str | None:
        if name in RENAMED:
            return f"{name} is now {RENAMED[name]}"
        near = difflib.get_close_matches(name, self._option_string_actions, n=1) if name.startswith("--") else []
        return f"did you mean {near[0]}?" if near else None


def _method_names() -> tuple[str, ...]:
    from paceline.drafting import registry

    return tuple(registry.names())


def _engine_names() -> tuple[str, ...]:
    from paceline.engines import registry

    return tuple(registry.names())


def _engine_option_names() -> tuple[str, ...]:
    from paceline.engines import registry

    return tuple(registry.option_names()) or ("none yet",)


def _format_names() -> tuple[str, ...]:
    from paceline.quantization import registry

    return registry.names()


REGISTRIES: dict[str, Callable[[], tuple[str, ...]]] = {
    "{formats}": _format_names,
    "{methods}": _method_names,
    "{engines}": _engine_names,
    "{engine_options}": _engine_option_names,
}


# --- configuration ----------------------------------------------------------------------------------------------------


def add_config_flags(
    parser: argparse.ArgumentParser, *, positional_model: bool, skip: Container[str] = (), default_method: str = NONE
) -> None:
    """Add a flag for every field of the configuration, in the groups model, speculation, engine and distributed.

    positional_model  the model may also be named by position, as in `paceline serve MODEL`
    skip              names of fields that the command has no use for, or has a flag of its own for
    default_method    the method where the user chooses none, as config_from_args has it
    """
    parser.formatter_class = CommandHelp
    for title, kinds in GROUPS.items():
        group = parser.add_argument_group(title)
        if title == "model":
            _add_model_flag(group, positional=positional_model)
        for item in _fields_with_flags(kinds):
            if item.name not in skip:
                _add_flag(group, item, default_method)


def config_from_args(
    args: argparse.Namespace,
    *,
    with_profile: bool = True,
    advised: bool = True,
    default_method: str = NONE,
    **overrides: Any,
) -> EngineConfig:
    """The configuration that the flags ask for, with what `paceline tune` measured for this model.

    with_profile    a profile is used where there is one, and a line on stderr says what for
    advised         the profile of `paceline tune` chooses where the user names neither method nor draft model
    default_method  the method where neither the user nor a profile chooses
    overrides       options that the command decides itself, whatever the flags say; a profile still applies
    """
    options = {name: value for name, value in vars(args).items() if name in _config_names()}
    _check_spelling(options.get("method"))
    chosen = any(options.get(name) for name in ("method", "draft_model", "draft_options"))
    options["draft_options"] = named_values("--draft-option", options.get("draft_options") or ())
    options["engine_options"] = named_values("--engine-option", options.get("engine_options") or ())
    if not options.get("method") and not options.get("draft_model"):
        options["method"] = _offered(default_method, options.get("engine") or LOCAL)
    config = EngineConfig.create(**{**options, **overrides})
    if not with_profile:
        return config
    adoption = adopted(config, chosen=chosen or not advised)
    if adoption.note:
        note(f"paceline: {adoption.note}")
    return adoption.config


def _check_spelling(method: str | None) -> None:
    """Raise OptionError with a suggestion where a method has nearly the name of one, of whatever engine."""
    if method is None or method in _method_names():
        return
    from paceline.engines import registry

    methods = {*_method_names(), *(name for engine in registry.names() for name in registry.spec(engine).methods or ())}
    near = difflib.get_close_matches(method, methods, n=1)
    if near and near[0] != method:
        raise OptionError(f"there is no method {method!r}; did you mean {near[0]}?")


def refuse_prediction(config: EngineConfig) -> EngineConfig:
    """Raise OptionError for the method of predictions: a command line has none to give."""
    if config.speculative.method == PREDICTION:
        raise OptionError(
            "the method prediction drafts from an output that the client expects: give it in Python, "
            "generate(…, prediction=…), or in the field `prediction` of a request to the server"
        )
    return config


def _offered(method: str, engine: str) -> str:
    """A method that a command chooses by itself, or none where the engine does not have it."""
    from paceline.engines.registry import spec

    known = spec(engine).methods
    return method if known is None or method in known else NONE


def named_values(flag: str, items: Iterable[str]) -> dict[str, Any]:
    """`["nodes=24"]` -> {"nodes": 24}. A value that is not JSON is a string. Raises OptionError."""
    options: dict[str, Any] = {}
    for item in items:
        name, value = _split(item, f"{flag} takes NAME=VALUE")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _add_model_flag(group: argparse._ArgumentGroup, *, positional: bool) -> None:
    if positional:  # without a default of its own, so that it does not overwrite --model
        group.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=MODEL_HELP)
    text = "the same by name" if positional else MODEL_HELP
    group.add_argument("-m", "--model", default=DEFAULT_MODEL, metavar="MODEL", help=text)


def _add_flag(group: argparse._ArgumentGroup, item: Field[Any], default_method: str) -> None:
    how: dict[str, Any] = {"dest": item.name, "help": item.metadata["help"], **item.metadata["argparse"]}
    if item.name == "method":
        how["help"] += f"; default: {DRAFT_MODEL} where a draft model is named, else {default_method}"
    if item.metadata["metavar"]:
        how["metavar"] = item.metadata["metavar"]
    if item.default is not MISSING:
        how["default"] = item.default
    group.add_argument(*(item.metadata["flags"] or (flag_name(item.name),)), **how)


def _fields_with_flags(kinds: Iterable[type]) -> list[Field[Any]]:
    return [item for kind in kinds for item in fields(kind) if "help" in item.metadata]


def flag_name(name: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return f"--{name.replace('_', '-')}"


def _config_names() -> set[str]:
    kinds = (kind for group in GROUPS.values() for kind in group)
    return {"model", *(item.name for item in _fields_with_flags(kinds))}


def _split(item: str, usage: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals or not name:
        raise OptionError(f"{usage}, not {item!r}")
    return name, value


# --- sampling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingFlag:
    """The flag of one field of SamplingParams, which cannot be read here: its module imports torch."""

    name: str
    kind: type
    metavar: str
    help: str


SAMPLING_FLAGS = (
    SamplingFlag("temperature", float, "T", "0: greedy, the default; 1: the model's own distribution"),
    SamplingFlag("top_k", int, "N", "sample from the N most likely tokens; default: 0, from all"),
    SamplingFlag("top_p", float, "P", "sample from the likeliest tokens that sum to P; default: 1, from all"),
    SamplingFlag("min_p", float, "P", "drop tokens less likely than P times the likeliest; default: 0"),
    SamplingFlag("repetition_penalty", float, "X", "divide the logits of tokens that occurred; default: 1, off"),
    SamplingFlag("presence_penalty", float, "X", "subtract X once from tokens of the output; default: 0"),
    SamplingFlag("frequency_penalty", float, "X", "subtract X for each time a token is in the output; default: 0"),
    SamplingFlag("logit_bias", str, "TOKEN=BIAS", "add BIAS to the logit of a token id; repeatable"),
    SamplingFlag("seed", int, "N", "the same seed gives the same output"),
)
BIAS = "logit_bias"


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """How the next token is chosen, and when a sequence ends. A flag that is not used leaves the library's default."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-new-tokens", type=int, default=DEFAULT_NEW_TOKENS, metavar="N", help=f"default: {DEFAULT_NEW_TOKENS}"
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this string; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end-of-sequence token")
    for flag in SAMPLING_FLAGS:
        how: dict[str, Any] = {"action": "append"} if flag.name == BIAS else {"type": flag.kind}
        group.add_argument(flag_name(flag.name), default=None, metavar=flag.metavar, help=flag.help, **how)


def sampling_from_args(args: argparse.Namespace) -> dict[str, Any]:
    """Settings for `generate` and `stream`. Raises OptionError now rather than after a model has been loaded."""
    from paceline.core.sampling import SamplingParams

    flags = {flag.name: getattr(args, flag.name) for flag in SAMPLING_FLAGS}
    sampling = {name: value for name, value in flags.items() if value is not None}
    if BIAS in sampling:
        sampling[BIAS] = logit_bias(sampling[BIAS])
    SamplingParams(**sampling)
    return {"max_new_tokens": args.max_new_tokens, "stop": args.stop, "ignore_eos": args.ignore_eos, **sampling}


def logit_bias(items: Iterable[str]) -> dict[int, float]:
    """`["50=-100"]` -> {50: -100.0}. Raises OptionError."""
    usage = "--logit-bias takes TOKEN=BIAS, a token id and a number"
    bias: dict[int, float] = {}
    for item in items:
        token, value = _split(item, usage)
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise OptionError(f"{usage}, not {item!r}") from None
    return bias


# --- from a configuration to a decoder --------------------------------------------------------------------------------


def open_decoder(config: EngineConfig) -> SpeculativeDecoder:
    """Download what is missing with a progress bar, then load without the messages of transformers."""
    from paceline.cli.terminal import quiet_transformers
    from paceline.decoder import SpeculativeDecoder
    from paceline.device.properties import chosen_device
    from paceline.engines.registry import spec
    from paceline.hub import locate

    loading.imported()
    chosen_device(config.model.device)  # one that is missing is refused before anything is downloaded
    names = (config.model.model, config.speculative.draft_model)
    for name in names if spec(config.engine).reads_files else ():
        if isinstance(name, str):
            locate(name)
    quiet_transformers()
    decoder = SpeculativeDecoder(**flat_options(config))
    loading.done()
    interrupt.check()
    return decoder


def flat_options(config: EngineConfig) -> dict[str, Any]:
    """Every option by its name, as EngineConfig.create and SpeculativeDecoder take them."""
    own = {item.name: getattr(config, item.name) for item in fields(config) if item.name not in PARTS}
    for name, kind in PARTS.items():
        part = getattr(config, name)
        own |= {item.name: getattr(part, item.name) for item in fields(kind)}
    return own
