"""The attributes of a Hugging Face config, as JSON and back: what a config class of transformers fills in is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.hub.resolved import keep_resolved, read_resolved

PARTS, VALUES = "configs", "values"


class ResolvedConfig:
    """A config with the attributes that transformers' own had, and none of its methods but one."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.__dict__.update(document[VALUES])
        self.__dict__.update({name: ResolvedConfig(part) for name, part in document[PARTS].items()})

    def get_text_config(self) -> Any:
        """The part that describes the text decoder."""
        return getattr(self, "text_config", None) or self


def read_config_file(path: Path) -> ResolvedConfig | None:
    """The config that an earlier start kept; None: there is none."""
    text = read_resolved(path)
    try:
        return None if text is None else ResolvedConfig(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # damaged: it is read by transformers and kept again


def keep_config_file(path: Path, document: Mapping[str, Any]) -> None:
    keep_resolved(path, json.dumps(document))


def config_document(config: Any) -> dict[str, Any]:
    """The attributes of a config that JSON can hold, those under the other names of its attribute_map included."""
    values, parts = {"model_type": config.model_type}, {}
    for name in sorted({*vars(config), *config.attribute_map}):
        value = getattr(config, name, None)
        if hasattr(value, "attribute_map"):
            parts[name] = config_document(value)
        elif not name.startswith("_") and hasattr(config, name):
            with suppress(TypeError, ValueError):
                values[name] = json.loads(json.dumps(value))
    return {VALUES: values, PARTS: parts}
