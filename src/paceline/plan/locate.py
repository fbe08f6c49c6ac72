"""A name -> `ModelSizes`: something on disk, the catalogue, or a Hub id (from its cache, else the network)."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import ModelNotFound, OptionError, WeightsError
from paceline.hub.hub_model import cached
from paceline.hub.hub_name import hub_name
from paceline.plan.catalogue import find_model, near_names
from paceline.plan.gguf_header import file_type, header_config, read_header
from paceline.plan.model_sizes import ModelSizes, sizes_from_config


def find_sizes(name: str) -> ModelSizes:
    """The sizes of the model of this name.

    Tried in this order: something on disk (a directory with config.json, a config.json, a .gguf), the catalogue, the
    Hub. Raises ModelNotFound when none has it, WeightsError for a damaged file, OptionError when it cannot be sized.
    """
    path = Path(name).expanduser()
    if name.strip() and path.exists():
        return _sizes_on_disk(path)
    entry = find_model(name)
    if entry is not None:
        return entry.sizes
    remote = hub_name(name)
    if remote is not None and remote.gguf is not None:
        return _sizes_from_gguf(cached(remote))
    if remote is not None:
        return _sizes_from_hub(name)
    raise ModelNotFound(_not_found(name))


def _sizes_on_disk(path: Path) -> ModelSizes:
    if path.is_file() and path.suffix == ".gguf":
        return _sizes_from_gguf(path)
    config = path / "config.json" if path.is_dir() else path
    if config.is_file() and config.suffix == ".json":
        return _with_stored_size(sizes_from_config(_read_json(config), _display_name(config)), config.parent)
    gguf_files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if gguf_files:
        return _sizes_from_gguf(gguf_files[0])
    raise ModelNotFound(f"{path} is neither a directory with a config.json nor a .gguf file")


def _display_name(config: Path) -> str:
    return config.resolve().parent.name or config.name


def _sizes_from_gguf(path: Path) -> ModelSizes:
    header = read_header(path)
    sizes = sizes_from_config(header_config(header), path.stem)
    return replace(sizes, stored_bytes=header.tensor_bytes, stored_precision=file_type(header))


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(config, dict):
        raise OptionError(f"{path} is not a model config: it should be one JSON object")
    return config


# safetensors' names for its element types, and this package's.
_ELEMENT_PRECISION: Mapping[str, str] = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


def _with_stored_size(sizes: ModelSizes, folder: Path) -> ModelSizes:
    """Take the true size from safetensors headers where the weights are beside the config."""
    headers = [_safetensors_header(part) for part in sorted(folder.glob("model*.safetensors"))]
    tensors = [entry for header in headers for name, entry in header.items() if name != "__metadata__"]
    if not tensors:
        return sizes
    kinds = [str(entry["dtype"]) for entry in tensors]
    size = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in tensors)
    stored = sizes.stored_precision or _ELEMENT_PRECISION.get(max(set(kinds), key=kinds.count))
    return replace(sizes, stored_bytes=size, stored_precision=stored)


def _safetensors_header(path: Path) -> dict[str, Any]:
    """The JSON at the front of a safetensors file: every tensor's type and shape."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size)) if size < path.stat().st_size else None
    except (OSError, struct.error, ValueError) as error:
        raise WeightsError(f"{path}: the safetensors header is damaged; fetch the file again") from error
    if not isinstance(header, dict):
        raise WeightsError(f"{path}: the safetensors file is cut short; fetch it again")
    return header


def _sizes_from_hub(name: str) -> ModelSizes:
    """Only the config is fetched, and nothing at all when the Hub's cache on this machine has it."""
    try:
        # Imported here: only a name that is nowhere on this machine needs it.
        from huggingface_hub import hf_hub_download

        config = Path(hf_hub_download(name, "config.json", etag_timeout=5))
    except Exception as error:  # the Hub's client raises many kinds; to the user all mean "not available"
        raise ModelNotFound(f"{_not_found(name)} The Hub could not be reached: {type(error).__name__}.") from error
    return sizes_from_config(_read_json(config), name)


def _not_found(name: str) -> str:
    near = near_names(name)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return (
        f"no model called '{name}': it is no file or directory here, not in the catalogue, and not in the Hub's cache."
        f"{hint} `paceline plan --list models` shows the catalogue."
    )
