"""Reading and writing a folder of one config and its tensors, and putting tensors into a module by name.

Whatever does not fit is named: a head with one tensor missing still runs in most programs, and only draft tokens badly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ModelNotFound, WeightsError

SAFE_FILES = ("model.safetensors", "medusa_lm_head.safetensors")
PICKLED_FILES = ("pytorch_model.bin", "medusa_lm_head.pt")
INDEX = "model.safetensors.index.json"
SHOWN = 3  # names listed in an error


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """What lies in a folder. called: how the file names a tensor, where `tensors` has been renamed; for errors."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    called: Callable[[str], str] = str


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """Config and tensors of a folder. Raises ModelNotFound or WeightsError."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ModelNotFound(f"there is no directory {folder}; a trained head is a directory with a config.json")
    return Checkpoint(path, _read_config(path), _read_tensors(path))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(f"{folder} holds no trained head: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise WeightsError(f"{path} is not a JSON object")
    return found


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    for name in SAFE_FILES:
        if (folder / name).is_file():
            return _read_safe(folder / name)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    for name in PICKLED_FILES:
        if (folder / name).is_file():
            return _read_pickled(folder / name)
    raise WeightsError(f"{folder} has a config.json but none of {', '.join((*SAFE_FILES, *PICKLED_FILES))}")


def _read_safe(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path} is damaged or not a safetensors file: {error}") from error


def _read_shards(folder: Path) -> dict[str, Tensor]:
    try:
        places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(f"{folder / INDEX} cannot be read: {error}") from error
    found: dict[str, Tensor] = {}
    for shard in sorted(set(places.values())):
        found.update(_read_safe(folder / Path(shard).name))
    return found


def _read_pickled(path: Path) -> dict[str, Tensor]:
    """Opened without running what it may hold."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each raise types of their own
        reason = str(error).strip().split("\n")[0]
        raise WeightsError(
            f"{path} is damaged, or would run code when opened and is refused. Convert it to safetensors ({reason})"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise WeightsError(f"{path} is not a plain mapping of names to tensors")
    return {str(name): value for name, value in found.items()}


def install(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's tensors into a module.

    Raises WeightsError naming the missing, the surplus or the misshapen tensor; the module is then as it was.
    """
    wanted, tensors, where = module.state_dict(), checkpoint.tensors, checkpoint.folder
    missing = [checkpoint.called(name) for name in wanted if name not in tensors]
    surplus = [checkpoint.called(name) for name in tensors if name not in wanted]
    if missing:
        raise WeightsError(f"{where} is incomplete: {_listed(missing)} missing")
    if surplus:
        raise WeightsError(f"{where} holds what this kind of head does not have: {_listed(surplus)} surplus")
    for name, expected in wanted.items():
        if tensors[name].shape != expected.shape:
            found, right = list(tensors[name].shape), list(expected.shape)
            raise WeightsError(f"{where}: {checkpoint.called(name)} has shape {found}; the other tensors want {right}")
    module.load_state_dict({name: value.to(wanted[name].dtype) for name, value in tensors.items()})


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return f"{', '.join(every[:SHOWN])}{more} {'is' if len(every) == 1 else 'are'}"


def tensor_named(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor the sizes are counted from."""
    if name not in checkpoint.tensors:
        raise WeightsError(f"{checkpoint.folder} is incomplete: {checkpoint.called(name)} is missing")
    return checkpoint.tensors[name]


def number(config: Mapping[str, Any], key: str, otherwise: float) -> float:
    """A number of the config, or what it is where the config does not say."""
    value = config.get(key)
    return otherwise if value is None else float(value)


def write_checkpoint(
    folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str = SAFE_FILES[0]
) -> None:
    """Write config and tensors. Each file appears at once or not at all; the config, which says all is there, last."""
    from safetensors.torch import save_file

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    whole = {key: value.detach().cpu().clone().contiguous() for key, value in tensors.items()}
    fresh = path / f".{name}.{os.getpid()}"
    save_file(whole, fresh, metadata={"format": "pt"})
    os.replace(fresh, path / name)
    fresh = path / f".config.json.{os.getpid()}"
    fresh.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(fresh, path / "config.json")
