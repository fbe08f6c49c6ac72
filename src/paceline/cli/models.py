"""The models on this machine: what is in the caches, what it is, and how to make room.

    paceline models list                            name, size, last use, format and kind of every model
    paceline models show default                    architecture, layers, precision, files, and what runs it
    paceline models rm SmolLM2-135M-Instruct        remove it from the cache; asks first, unless --yes

Converted models are in paceline's cache (PACELINE_CACHE), downloads in that of the Hugging Face Hub (HF_HOME). Files
that lie elsewhere, such as the .gguf a model was converted from, are never touched.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ModelError, ModelNotFound, OptionError
from paceline.hub.progress import size_text

if TYPE_CHECKING:
    from paceline.hub.inventory import CachedModel

FAST_PATH, SLOW_PATH = "paceline's own runner (the fast path)", "transformers"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", prog="paceline models", help="list, show or rm"
    )
    listing = actions.add_parser("list", description="every model in the caches, the last used first")
    details = actions.add_parser("show", description="what a model is, and what runs it")
    removal = actions.add_parser("rm", description="remove a model from its cache")
    details.add_argument("model", metavar="MODEL", help="a name of `paceline models list`, or a model's directory")
    removal.add_argument("model", metavar="MODEL", help="a name of `paceline models list`")
    removal.add_argument("-y", "--yes", action="store_true", help="do not ask")
    for action in (listing, details):
        action.add_argument("--json", action="store_true", help="print one JSON document instead")


def main(args: argparse.Namespace) -> int:
    return {"list": _list, "show": _show, "rm": _remove}[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from paceline.hub.inventory import cached_models

    models = cached_models()
    if args.json:
        print(json.dumps({"models": [_entry(model) for model in models]}))
        return 0
    if not models:
        print("no models yet; `paceline fetch default` gets the embedded one")
        return 0
    width = max(len(model.name) for model in models)
    stored = max(len(model.format) for model in models)
    for model in models:
        sizes = f"{size_text(model.size):>8}  {_day(model.last_used)}"
        print(f"{model.name:<{width}}  {sizes}  {model.format:<{stored}}  {model.kind}")
    return 0


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _entry(model: CachedModel) -> dict[str, Any]:
    entry = {"name": model.name, "kind": model.kind, "bytes": model.size, "folder": str(model.folder)}
    return entry | {"last_used": int(model.last_used), "format": model.format}


# --- show -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """What a directory holds."""

    architecture: str
    layers: int
    dtype: str
    runs_on: str
    reason: str  # why it is not the fast path; empty: it is
    files: dict[str, int]


def _show(args: argparse.Namespace) -> int:
    folder = _folder(args.model)
    details = _details(folder, args.model)
    if args.json:
        fields = {name: getattr(details, name) for name in ModelDetails.__slots__}
        print(json.dumps({"model": args.model, "folder": str(folder), **fields}))
        return 0
    reason = f" ({details.reason})" if details.reason else ""
    print(f"folder        {folder}\narchitecture  {details.architecture}\nlayers        {details.layers}")
    print(f"dtype         {details.dtype}\nruns on       {details.runs_on}{reason}")
    for index, (name, size) in enumerate(details.files.items()):
        print(f"{'files' if index == 0 else '':<14}{size_text(size):>8}  {name}")
    return 0


def _folder(name: str) -> Path:
    from paceline.hub.inventory import cached_model

    path = Path(name).expanduser()
    return path if (path / "config.json").is_file() else cached_model(name).folder


def _details(folder: Path, name: str) -> ModelDetails:
    from paceline.hub.documents import checked_config
    from paceline.hub.inventory import stored_format
    from paceline.hub.model_config import decoder_sizes

    if not (folder / "config.json").is_file():
        return _gguf_details(folder, name)
    config = checked_config(folder, name)
    reason = _why_slow(folder, name)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    return ModelDetails(
        architecture=", ".join(config.get("architectures") or [str(config.get("model_type", "unknown"))]),
        layers=decoder_sizes(config, name).num_layers,
        dtype=stored_format(folder),
        runs_on=SLOW_PATH if reason else FAST_PATH,
        reason=reason,
        files=files,
    )


def _gguf_details(folder: Path, name: str) -> ModelDetails:
    """Of the first GGUF file: its header, without its weights."""
    from paceline.hub.inventory import stored_format
    from paceline.models.registry import model_types
    from paceline.plan.locate import find_sizes

    paths = sorted(folder.rglob("*.gguf"))
    if not paths:
        raise ModelNotFound(f"{name} is only the tokenizer of a GGUF file; name the file itself")
    sizes = find_sizes(str(paths[0]))
    reason = "" if sizes.architecture in model_types() else f"no architecture is registered for {sizes.architecture}"
    return ModelDetails(
        architecture=sizes.architecture,
        layers=sizes.num_layers,
        dtype=stored_format(folder),
        runs_on=SLOW_PATH if reason else FAST_PATH,
        reason=reason,
        files={path.relative_to(folder).as_posix(): path.stat().st_size for path in paths},
    )


def _why_slow(folder: Path, name: str) -> str:
    """Why transformers runs a model; empty: the native runner does."""
    from paceline.models.registry import unsupported
    from paceline.runners.native import read_config

    if not any(folder.glob("*.safetensors")):
        return "it is not stored as safetensors"
    try:
        return unsupported(read_config(folder, name)) or ""
    except ModelError as error:
        return str(error)


# --- rm ---------------------------------------------------------------------------------------------------------------


def _remove(args: argparse.Namespace) -> int:
    from paceline.hub.inventory import cached_model

    model = cached_model(args.model)
    if not args.yes and not _agreed(model):
        print("nothing was removed", file=sys.stderr)
        return 1
    model.remove()
    print(f"removed {model.name}, {size_text(model.size)}")
    return 0


def _agreed(model: CachedModel) -> bool:
    if not sys.stdin.isatty():
        raise OptionError(f"to remove {model.name} without being asked, add --yes")
    print(f"remove {model.name} ({size_text(model.size)}, {model.root})? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
