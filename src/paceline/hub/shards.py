"""Whether the weight files of a model directory are all there and whole."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from paceline.errors import WeightsError
from paceline.hub.documents import read_document

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SAFETENSORS, PICKLED = "*.safetensors", ("*.bin", "medusa_lm_head.pt")
LENGTH_BYTES = 8
LONGEST_HEADER = 100 << 20  # what the safetensors library itself accepts


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model: those of its index, else model.safetensors, else all.

    Repositories keep other forms of the same weights beside them, such as consolidated.safetensors.
    """
    names = [name for name in _indexed(folder, INDEXES[0]) if (folder / name).is_file()]
    alone = folder / "model.safetensors"
    if names:
        return [folder / name for name in names]
    return [alone] if alone.is_file() else sorted(folder.glob(SAFETENSORS))


def _indexed(folder: Path, index: str) -> list[str]:
    """The files that an index names; none where there is no index."""
    if not (folder / index).is_file():
        return []
    return sorted(set((read_document(folder / index, str(folder)).get("weight_map") or {}).values()))


def missing_shards(folder: Path) -> list[str]:
    """Weight files that an index names and that are not in the folder."""
    safetensors, pickled = INDEXES
    shards = _indexed(folder, safetensors)
    if not shards and not any(folder.glob(SAFETENSORS)):
        shards = _indexed(folder, pickled)
    return [shard for shard in shards if not (folder / shard).is_file()]


def missing_files(folder: Path) -> list[str]:
    """What a download into this folder still lacks, as far as the files that are there tell."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    shards = missing_shards(folder)
    if not shards and not has_weights(folder):
        shards = ["model.safetensors"]
    vocabulary = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if (folder / "tokenizer_config.json").is_file() and not any((folder / name).is_file() for name in vocabulary):
        missing.append(vocabulary[0])
    return missing + shards


def has_weights(folder: Path) -> bool:
    return any(path for pattern in (SAFETENSORS, *PICKLED) for path in folder.glob(pattern))


def check_shards(folder: Path, name: str) -> None:
    """Raise WeightsError where a shard is missing or cut short."""
    missing = missing_shards(folder)
    if missing:
        raise WeightsError(f"{name} is not complete: {', '.join(missing)} {_verb(missing)} missing; fetch it again")
    for path in weight_files(folder):
        check_whole(path)


def _verb(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def check_whole(path: Path) -> None:
    """Raise WeightsError where a safetensors file does not end where its header says."""
    try:
        stated, size = _stated_size(path), path.stat().st_size
    except (OSError, ValueError, struct.error, KeyError, TypeError) as error:
        raise WeightsError(f"{path.name} is damaged: its header cannot be read; fetch the file again") from error
    if size != stated:
        what = "cut short" if size < stated else "damaged"
        raise WeightsError(f"{path.name} is {what}: it has {size:,} bytes of {stated:,}; fetch the file again")


def _stated_size(path: Path) -> int:
    """The bytes that a header announces: itself and the last tensor's end."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(LENGTH_BYTES))
        if length > LONGEST_HEADER:
            raise ValueError("no header is so long")
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return int(LENGTH_BYTES + length + max(ends, default=0))
