"""The JSON documents of a model directory, read with errors that say which file is wrong and how."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import WeightsError

# Counts that no model can have at zero or below, under the names that configs give them.
COUNTS = (
    "num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_attention_heads", "n_head", "num_heads", "n_heads",
    "num_key_value_heads", "head_dim", "hidden_size", "n_embd", "d_model", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)
MAY_BE_ZERO = ("intermediate_size", "head_dim", "num_key_value_heads", "max_position_embeddings")
EOS_TOKEN_ID = "eos_token_id"


def read_document(path: Path, name: str) -> dict[str, Any]:
    """A JSON object. Raises WeightsError."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{name} has no readable {path.name}: {error}") from error
    if not isinstance(document, dict):
        raise WeightsError(f"{name} has no readable {path.name}: it holds no JSON object")
    return document


def checked_config(folder: Path, name: str) -> dict[str, Any]:
    """config.json. Raises WeightsError if a count in it is not one."""
    document = read_document(folder / "config.json", name)
    for part in (document, document.get("text_config")):
        if isinstance(part, Mapping):
            _check_counts(part, name)
    return document


def _check_counts(config: Mapping[str, Any], name: str) -> None:
    for key, value in _counts(config):
        if isinstance(value, bool | float | str) or value < (0 if key in MAY_BE_ZERO else 1):
            raise WeightsError(f"{name}: config.json says {key} = {value!r}, which no model can have")
    sizes = dict(_counts(config))
    hidden_size, heads = sizes.get("hidden_size"), sizes.get("num_attention_heads")
    if hidden_size and heads and not sizes.get("head_dim") and heads > hidden_size:
        raise WeightsError(f"{name}: config.json says {heads} attention heads for a hidden size of {hidden_size}")


def _counts(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Counts that are given once; some models give one for each layer."""
    for key in COUNTS:
        value = config.get(key)
        if isinstance(value, int | float | str):
            yield key, value


def generation_config(folder: Path, name: str) -> dict[str, Any]:
    """generation_config.json; empty where there is none. Raises WeightsError if it is malformed."""
    path = folder / "generation_config.json"
    document = read_document(path, name) if path.is_file() else {}
    tokens = document.get(EOS_TOKEN_ID)
    listed = tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
        raise WeightsError(f"{name}: generation_config.json says {EOS_TOKEN_ID} = {tokens!r}, which are no token ids")
    return document
