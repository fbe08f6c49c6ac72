"""The built-in catalogue of model sizes (`models.toml`), so that planning works without a network."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from paceline.plan.model_sizes import ModelSizes, sizes_from_config


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model people ask about: its sizes, its other names, and the number of weights its publisher states."""

    sizes: ModelSizes
    aliases: tuple[str, ...]
    published_parameters: int

    @property
    def name(self) -> str:
        return self.sizes.name

    @property
    def runnable_name(self) -> str:
        """The MODEL to name on a command line: a Hub id where there is one (the last listed, the instruct variant)."""
        if "default" in self.aliases:
            return "default"
        hub_ids = [alias for alias in self.aliases if "/" in alias]
        return hub_ids[-1] if hub_ids else self.name

    @property
    def short_names(self) -> frozenset[str]:
        """The last parts of its Hub ids, as heads are named after models."""
        return frozenset(alias.rpartition("/")[2] for alias in self.aliases)


@cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    """Every entry, in the order of the file."""
    rows = load_table("models.toml")["model"]
    configs = {row["name"]: row["config"] for row in rows if "config" in row}
    return tuple(_entry(row, row.get("config") or configs[row["like"]]) for row in rows)


def find_model(name: str) -> CatalogueEntry | None:
    """The entry of this name or alias, in any case; None where the catalogue has no such model."""
    return _by_name().get(name.strip().lower())


def near_names(name: str) -> tuple[str, ...]:
    """Names that look like a misspelt one, for an error message."""
    return tuple(difflib.get_close_matches(name.strip().lower(), _by_name(), n=3, cutoff=0.6))


def load_table(file_name: str) -> dict[str, Any]:
    """One of the tables that ship beside this module."""
    return tomllib.loads(files("paceline.plan").joinpath(file_name).read_text(encoding="utf-8"))


@cache
def _by_name() -> dict[str, CatalogueEntry]:
    return {name.lower(): entry for entry in catalogue() for name in (entry.name, *entry.aliases)}


def _entry(row: dict[str, Any], config: dict[str, Any]) -> CatalogueEntry:
    sizes = sizes_from_config(config, row["name"])
    sizes = replace(sizes, tokenizer=row["tokenizer"], other_parameters=row.get("other_parameters", 0))
    return CatalogueEntry(sizes, tuple(row["aliases"]), row["parameters"])
