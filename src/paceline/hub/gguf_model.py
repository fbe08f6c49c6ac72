"""A GGUF file as it is: where it lies, its sizes and its tokenizer. For engines that read the weights themselves.

Nothing is converted but the tokenizer, which is kept in the cache.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ModelNotFound, OptionError
from paceline.hub import default
from paceline.hub.cache import cached_directory
from paceline.hub.convert import CONVERTER, open_gguf
from paceline.hub.gguf_eos import eos_token_ids
from paceline.hub.gguf_fields import GgufFields
from paceline.hub.hub_model import obtain
from paceline.hub.hub_name import hub_name
from paceline.hub.locate import DEFAULT

SIZES, TOKENIZER = "sizes.json", "tokenizer"
SIZE_KEYS = {"max_seq_len": "context_length", "num_layers": "block_count", "hidden_size": "embedding_length"}


@dataclass(frozen=True, slots=True)
class GgufModel:
    """One GGUF file. tokenizer_folder: a Hugging Face directory that holds its tokenizer and nothing else."""

    name: str
    path: Path
    tokenizer_folder: Path
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_seq_len: int
    num_layers: int
    hidden_size: int


def locate_gguf(name: str) -> GgufModel:
    """The model of a .gguf file, or of `default`. Raises ModelNotFound, FetchError, OptionError or WeightsError."""
    path = gguf_path(name)
    folder = cached_directory(f"{path.stem}-gguf-{_key(path)}", lambda folder: _describe(path, folder))
    sizes: dict[str, Any] = json.loads((folder / SIZES).read_text())
    eos = frozenset(sizes.pop("eos_token_ids"))
    return GgufModel(name, path, folder / TOKENIZER, eos_token_ids=eos, **sizes)


def gguf_path(name: str) -> Path:
    """The file of a name; `default` is downloaded where it is not here yet."""
    if name == DEFAULT:
        return cached_directory(default.GGUF_DIRECTORY, default.fill_gguf) / default.GGUF
    remote = hub_name(name)
    if remote is None or remote.gguf is None:
        path = Path(name).expanduser()
    else:
        path = obtain(remote)
    if path.suffix != ".gguf":
        raise OptionError(f"{name} is not a GGUF file; name a .gguf file or `default`, or use the engine local")
    if not path.is_file():
        raise ModelNotFound(f"there is no file or directory {name}")
    return path


def _key(path: Path) -> str:
    """A changed file is another model, so size and modification time are part of the key."""
    status = path.stat()
    identity = f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}:{CONVERTER}"
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def _describe(path: Path, folder: Path) -> None:
    """Write the sizes and the tokenizer of a file."""
    from transformers import __version__

    from paceline.hub.gguf_tokenizer import save_tokenizer

    fields = GgufFields(open_gguf(path), path)
    fields.check_whole_model()
    tokenizer = folder / TOKENIZER
    tokenizer.mkdir()
    save_tokenizer(path, fields, tokenizer)
    # Without it a Qwen tokenizer is taken for a faulty Mistral one.
    document = {"model_type": fields.architecture, "transformers_version": __version__}
    (tokenizer / "config.json").write_text(json.dumps(document))
    (folder / SIZES).write_text(json.dumps(_sizes(fields)))


def _sizes(fields: GgufFields) -> dict[str, Any]:
    eos = eos_token_ids(fields)
    sizes: dict[str, Any] = {name: int(fields.number(key, 0)) for name, key in SIZE_KEYS.items()}
    sizes["vocab_size"] = len(fields.get("tokenizer.ggml.tokens", ()))
    sizes["eos_token_ids"] = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return sizes
