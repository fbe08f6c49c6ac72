"""A directory with one config and its tensors: reading it, writing it, and loading its tensors into a module by name.

Every error names the tensor that does not fit: most programs run a head with a missing tensor, and it drafts badly.
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
from torch.overrides import TorchFunctionMode

from paceline.errors import ModelNotFound, WeightsError

SAFE_FILES = ("model.safetensors", "medusa_lm_head.safetensors")
PICKLED_FILES = ("pytorch_model.bin", "medusa_lm_head.pt")
INDEX = "model.safetensors.index.json"
SHOWN = 3  # names listed in an error
FILLS = frozenset({nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, Tensor.uniform_, Tensor.normal_})


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Config and tensors of a directory. file_name: the name in the file of a renamed tensor, for errors."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    file_name: Callable[[str], str] = str


@dataclass(frozen=True, slots=True)
class Provenance:
    """What the config of a head says about the target it was trained for."""

    target: str = ""
    architectures: tuple[str, ...] = ("LlamaForCausalLM",)
    num_draft_tokens: int = 5


# --- reading ----------------------------------------------------------------------------------------------------------


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """Config and tensors of a directory. Raises ModelNotFound or WeightsError."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ModelNotFound(f"there is no directory {folder}; a trained head is a directory with a config.json")
    return Checkpoint(path, _read_config(path), _read_tensors(path))


def gguf_file(path: Path) -> Path | None:
    """A head in one GGUF file: the file itself, or the only one of a directory without a config."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    files = list(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
    return files[0] if len(files) == 1 else None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(f"{folder} holds no trained head: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise WeightsError(f"{path} is not a JSON object")
    return config


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


def tensor_names(folder: Path) -> list[str]:
    """The names of the tensors of a directory, read without the tensors where the format allows it; none where it has
    no file that a head may have."""
    if not any((folder / name).is_file() for name in (INDEX, *SAFE_FILES, *PICKLED_FILES)):
        return []
    if (folder / INDEX).is_file():
        return list(_shard_by_name(folder))
    safe = next((folder / name for name in SAFE_FILES if (folder / name).is_file()), None)
    if safe is None:
        return list(_read_tensors(folder))
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(safe, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{safe} is damaged or not a safetensors file: {error}") from error


def _read_safe(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path} is damaged or not a safetensors file: {error}") from error


def _read_shards(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(_shard_by_name(folder).values())):
        tensors.update(_read_safe(folder / Path(shard).name))
    return tensors


def _shard_by_name(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{folder / INDEX} cannot be read: {error}") from error


def _read_pickled(path: Path) -> dict[str, Tensor]:
    """Tensors of a pickle, opened without running the code it may contain."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each raise types of their own
        reason = str(error).strip().split("\n")[0]
        raise WeightsError(
            f"{path} is damaged, or would run code when opened and is refused. Convert it to safetensors ({reason})"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise WeightsError(f"{path} is not a plain mapping of names to tensors")
    return {str(name): value for name, value in tensors.items()}


# --- what a checkpoint says -------------------------------------------------------------------------------------------


def declared_kind(checkpoint: Checkpoint) -> str | None:
    """The kind of head its config names; None where it names none, as most published configs do."""
    if "dflash_config" in checkpoint.config:
        return "dflash"
    declared = checkpoint.config.get("speculators_model_type")
    return None if declared is None else str(declared)


def plain_name(name: str) -> str:
    """The name of a tensor without the wrapper module that some trainers save around the head."""
    return name.removeprefix("model.")


def tensor_named(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor that sizes are read from."""
    if name not in checkpoint.tensors:
        raise WeightsError(f"{checkpoint.folder} is incomplete: {checkpoint.file_name(name)} is missing")
    return checkpoint.tensors[name]


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    """A number of the config, or the default where the config does not have it."""
    value = config.get(key)
    return default if value is None else float(value)


# --- loading ----------------------------------------------------------------------------------------------------------


class WithoutRandomWeights(TorchFunctionMode):
    """Modules are made without filling their weights, which are loaded right after: filling took most of the time."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in FILLS:
            return function(*args, **(kwargs or {}))
        return args[0] if args else kwargs["tensor"]


def install(module: nn.Module, checkpoint: Checkpoint, *, assign: bool = False) -> None:
    """Load the tensors of a checkpoint into a module. assign: they become its own, in the dtype they are stored in.

    Raises WeightsError naming the missing, surplus or misshapen tensor; the module is then unchanged.
    """
    expected, tensors, folder = module.state_dict(), checkpoint.tensors, checkpoint.folder
    missing = [checkpoint.file_name(name) for name in expected if name not in tensors]
    surplus = [checkpoint.file_name(name) for name in tensors if name not in expected]
    if missing:
        raise WeightsError(f"{folder} is incomplete: {_listed(missing)} missing")
    if surplus:
        raise WeightsError(f"{folder} holds tensors this kind of head does not have: {_listed(surplus)} surplus")
    for name, value in expected.items():
        if tensors[name].shape != value.shape:
            shape, needed = list(tensors[name].shape), list(value.shape)
            raise WeightsError(
                f"{folder}: {checkpoint.file_name(name)} has shape {shape}; the other tensors need {needed}"
            )
    if assign:
        module.load_state_dict(tensors, assign=True)
    else:
        module.load_state_dict({name: value.to(expected[name].dtype) for name, value in tensors.items()})


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return f"{', '.join(every[:SHOWN])}{more} {'is' if len(every) == 1 else 'are'}"


# --- writing ----------------------------------------------------------------------------------------------------------


def write_checkpoint(
    folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str = SAFE_FILES[0]
) -> None:
    """Write config and tensors. Each file appears whole or not at all; the config is last: it marks a complete head."""
    from safetensors.torch import save_file

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    contiguous = {key: value.detach().cpu().clone().contiguous() for key, value in tensors.items()}
    temporary = path / f".{name}.{os.getpid()}"
    save_file(contiguous, temporary, metadata={"format": "pt"})
    os.replace(temporary, path / name)
    temporary = path / f".config.json.{os.getpid()}"
    temporary.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, path / "config.json")


def converted(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor in the dtype to write; integers and booleans stay as they are."""
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value
