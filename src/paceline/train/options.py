"""Settings of a training, written once: a dataclass field carries its default, its help and how it is shown.

The command line makes one flag of every field; the record of a training holds the same names and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_type_hints

from paceline.errors import OptionError

Options = TypeVar("Options")


def setting(default: Any, help: str, metavar: str = "N", alias: str | None = None) -> Any:
    """A field of an options dataclass that is a flag on the command line. A default of 0 or None is in the help."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "alias": alias})


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting as the command line shows it."""

    name: str
    kind: type
    help: str
    metavar: str
    alias: str | None = None

    @property
    def spellings(self) -> list[str]:
        """The option and, where it has one, its other name."""
        return [self.option] + ([self.alias] if self.alias else [])

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


def flags_of(options: type) -> Iterator[Flag]:
    """One flag of every field that was declared with `setting`."""
    hints = get_type_hints(options)
    for entry in fields(options):
        if "help" not in entry.metadata:
            continue
        kinds = [kind for kind in get_args(hints[entry.name]) if kind is not NoneType] or [hints[entry.name]]
        default = f" ({entry.default})" if entry.default else ""
        shown = (entry.metadata["help"] + default, entry.metadata["metavar"], entry.metadata["alias"])
        yield Flag(entry.name, kinds[0], *shown)


def from_values(options: type[Options], values: Mapping[str, Any]) -> Options:
    """Options with those of the values that are its own; others keep their defaults. Raises OptionError."""
    own = {entry.name: values[entry.name] for entry in fields(cast(Any, options)) if entry.name in values}
    for name, value in own.items():
        if isinstance(value, int | float) and value < 0:
            raise OptionError(f"--{name.replace('_', '-')} cannot be {value}")
    return options(**own)
