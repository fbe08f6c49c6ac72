"""Which models `paceline serve` serves, and how: from its arguments, or from a TOML file.

    [server]                          flags of the server by their long names; a flag on the command line wins
    port = 8000
    api-key-file = "keys.txt"

    [[models]]                        one table a model; the first is for requests that name none
    model = "default"
    names = ["small", "gpt-4o-mini"]  names in the API; default: the model's
    method = "ngram"                  options of the engine by their long names; a flag is the default of all models
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from paceline.config import DEFAULT_MODEL, option_names, unknown_names
from paceline.errors import OptionError
from paceline.serve.config import FLAG_CLASSES

Table = dict[str, Any]
NAMES = "names"  # the key of a model's names in the API
OPTION_TABLES = ("draft_options", "engine_options", "lora")  # NAME=VALUE on the command line, tables in a file


def arguments_of_models(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The arguments of `paceline serve` for each model. Raises OptionError."""
    if args.config is None:
        models: list[Table] = [{}, *({"model": name} for name in args.more_models)]
    else:
        if args.more_models or args.model != DEFAULT_MODEL:
            raise OptionError("name the models in the file of --config or as arguments, not both")
        args, models = _from_file(args, Path(args.config))
    if len(models) > 1 and args.served_model_names:
        raise OptionError("--served-model-name is for one model; several have names = [...] in the file of --config")
    return [_model_arguments(args, table) for table in models]


def check_names(names: Iterable[str]) -> None:
    """Raise OptionError for a name that two models have."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise OptionError(f"two models are called {name}; give them names of their own in the file of --config")
        seen.add(name)


def _from_file(args: argparse.Namespace, path: Path) -> tuple[argparse.Namespace, list[Table]]:
    document = _read(path)
    wrong = set(document) - {"server", "models"}
    if wrong:
        raise unknown_names(f"table in {path}", wrong, ("server", "models"))
    models = document.get("models")
    if not isinstance(models, list) or not models or not all(isinstance(table, dict) for table in models):
        raise OptionError(f"{path} names no model; it needs a [[models]] table for each")
    return _with_server_flags(args, document.get("server", {}), path), [_normal(table) for table in models]


def _read(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the configuration in {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"{path} is not valid TOML: {error}") from error


def _normal(table: Table) -> Table:
    return {key.replace("-", "_"): value for key, value in table.items()}


# --- the server -------------------------------------------------------------------------------------------------------


def _server_fields() -> dict[str, Field[Any]]:
    """Fields with a flag, by the flag's name and by their own."""
    flagged = [item for kind in FLAG_CLASSES for item in fields(kind) if "flags" in item.metadata]
    by_flag = {item.metadata["flags"][0].removeprefix("--").replace("-", "_"): item for item in flagged}
    return {**by_flag, **{item.name: item for item in flagged}}


def _with_server_flags(args: argparse.Namespace, table: Any, path: Path) -> argparse.Namespace:
    """The arguments, with those of the file where the command line has none."""
    if not isinstance(table, dict):
        raise OptionError(f"server in {path} is a table: [server]")
    known, values = _server_fields(), dict(vars(args))
    for key, value in _normal(table).items():
        if key not in known:
            raise unknown_names(f"setting in [server] of {path}", [key], known)
        item = known[key]
        if values[item.name] in (item.default, []):
            values[item.name] = _checked(key, value, item.default)
    return argparse.Namespace(**values)


def _checked(key: str, value: Any, default: Any) -> Any:
    """A value of the type that its flag has. Raises OptionError."""
    if isinstance(default, tuple):
        value = [value] if isinstance(value, str) else value
        fits = isinstance(value, list) and all(isinstance(part, str) for part in value)
    elif isinstance(default, float):
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = type(value) is (str if default is None else type(default))
    if not fits:
        raise OptionError(f"{key} in [server] cannot be {value!r}; `paceline serve --help` says what it takes")
    return value


# --- one model --------------------------------------------------------------------------------------------------------


def _model_arguments(args: argparse.Namespace, table: Table) -> argparse.Namespace:
    values = dict(vars(args))
    known = [NAMES, *(name for name in option_names() if name in values)]
    wrong = set(table) - set(known)
    if wrong:
        raise unknown_names("setting of a model", wrong, known)
    if NAMES in table:
        values["served_model_names"] = _checked(NAMES, table[NAMES], ())
    for key in set(table) - {NAMES}:
        values[key] = _named_values(key, table[key]) if key in OPTION_TABLES else table[key]
    return argparse.Namespace(**values)


def _named_values(key: str, table: Any) -> list[str]:
    """A table as the flags that it stands for."""
    if not isinstance(table, dict):
        raise OptionError(f"{key} of a model is a table, such as {{ nodes = 24 }}")
    return [f"{name}={json.dumps(value)}" for name, value in table.items()]
