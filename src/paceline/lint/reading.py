"""A reading of a head's files: what a wrong line of a config, or tensors in another order, would have meant.

A reading is an edit of the checkpoint, so whatever the linter finds can be written down as a corrected copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from paceline.heads.checkpoint import Checkpoint

TOP = ""  # the config itself, as the name of a section


@dataclass(frozen=True, slots=True, eq=False)
class HeadReading:
    """One way to read a head.

    name    short, for the table of the report
    change  the line of the config, or the tensors, to change, in a user's words
    edit    the files changed in this way
    """

    name: str
    change: str
    edit: Callable[[Checkpoint], Checkpoint]


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """A key of a config and the sections it may be in, the usual one first. "": the top level."""

    name: str
    sections: tuple[str, ...] = (TOP,)

    def places(self, config: Mapping[str, Any]) -> list[str]:
        """The sections that have the key, the one that is read first; where none has it, the one it belongs in."""
        present = [place for place in self.sections if section_of(config, place).get(self.name) is not None]
        existing = [place for place in self.sections if place == TOP or section_of(config, place)]
        return present or (existing or [TOP])[:1]

    def value(self, config: Mapping[str, Any], default: Any = None) -> Any:
        """What the config says; null counts as nothing."""
        value = section_of(config, self.places(config)[0]).get(self.name)
        return default if value is None else value

    def written(self, config: Mapping[str, Any], value: Any) -> dict[str, Any]:
        """A copy of the config with this value wherever it has the key: programs read different places."""
        copy = deepcopy(dict(config))
        for place in self.places(config):
            section_of(copy, place)[self.name] = value
        return copy

    def line(self, config: Mapping[str, Any], value: Any) -> str:
        """The change in a user's words."""
        paths = [f'"{place}.{self.name}"' if place else f'"{self.name}"' for place in self.places(config)]
        old = self.value(config)
        before = "which is not there now" if old is None else f"not {json.dumps(old)}"
        return f"config.json: {' and '.join(paths)}: {json.dumps(value)}, {before}"


def section_of(config: Mapping[str, Any], section: str) -> Any:
    """A part of a config, by its dotted path; an empty one where it is missing."""
    part: Any = config
    for name in section.split(".") if section else ():
        part = part.get(name)
        if not isinstance(part, dict):
            return {}
    return part


def config_reading(name: str, key: ConfigKey, value: Any, checkpoint: Checkpoint) -> HeadReading:
    """The same head with another value of one line."""

    def edit(files: Checkpoint) -> Checkpoint:
        return replace(files, config=key.written(files.config, value))

    return HeadReading(name, key.line(checkpoint.config, value), edit)


def tensor_reading(name: str, change: str, endings: Iterable[str], function: Callable[[Tensor], Tensor]) -> HeadReading:
    """The same head with the tensors of these names changed. endings: how their names end."""
    ends = tuple(endings)

    def edit(files: Checkpoint) -> Checkpoint:
        changed = {key: function(value) for key, value in files.tensors.items() if key.endswith(ends)}
        return replace(files, tensors={**files.tensors, **changed})

    return HeadReading(name, f"model.safetensors: {change}", edit)


def choices(name: str, key: ConfigKey, values: Iterable[Any], checkpoint: Checkpoint, now: Any) -> list[HeadReading]:
    """One reading for each of these values that the head does not have now. name: with one gap for the value."""
    others = [value for value in dict.fromkeys(values) if value is not None and value != now]
    return [config_reading(name.format(value), key, value, checkpoint) for value in others]
