"""Heads that come with paceline: METHOD-MODEL beside this file, each with a README that says how it was trained."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def shipped_head(method: str, model: str) -> Path | None:
    """The directory of the head trained for a model (the last part of its name), or None."""
    folder = HERE / f"{method}-{model}"
    return folder if (folder / "config.json").is_file() else None


def shipped_heads() -> list[str]:
    """Every head, as METHOD-MODEL."""
    return sorted(config.parent.name for config in HERE.glob("*/config.json"))
