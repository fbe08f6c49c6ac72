"""--generation-config: whether the model's own sampling defaults apply where no flag says otherwise."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from paceline.cli.terminal import note

if TYPE_CHECKING:
    from paceline.hub.generation_config import GenerationDefaults

MODEL, NONE = "model", "none"
CHOICES = (MODEL, NONE)
HELP = "sampling defaults: model, those of its generation_config.json, or none"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def add_generation_config_flag(parser: argparse.ArgumentParser, default: str) -> None:
    help_text = f"{HELP}, greedy; default: {default}"
    parser.add_argument("--generation-config", choices=CHOICES, default=default, metavar="WHOSE", help=help_text)


def with_defaults(settings: dict[str, Any], choice: str, defaults: GenerationDefaults) -> dict[str, Any]:
    """Settings with the model's defaults for what they leave open, or greedy. Says which on stderr."""
    if choice == MODEL:
        mention_applied(defaults)
        return {"temperature": 0.0, **defaults.settings, **settings}
    chosen = any(name in settings for name in SAMPLING)
    if not chosen and not defaults.is_greedy:
        note(f"greedy; the model's generation_config.json asks for {defaults} (--generation-config model)")
    return settings if chosen else {"temperature": 0.0, **settings}


def mention_applied(defaults: GenerationDefaults, otherwise: str = "greedy") -> None:
    """Say what the model's own defaults are, if there are any, and which of them are not available."""
    if defaults.settings or defaults.unsupported:
        note(f"sampling defaults of the model: {defaults} (--generation-config none: {otherwise})")
