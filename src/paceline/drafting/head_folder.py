"""Where the trained head of a method lies, and whether the target can be drafted for on its states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.protocols import Runner
from paceline.core.types import Capability
from paceline.drafting.registry import DrafterContext
from paceline.errors import CapabilityError, OptionError
from paceline.heads.checkpoint import gguf_file
from paceline.heads.shipped import shipped_head
from paceline.hub import DEFAULT, locate
from paceline.hub.default import DIRECTORY


def head_folder(method: str, context: DrafterContext) -> Path:
    """The directory or Hub id given as the draft model, or the head that comes with paceline. Raises OptionError."""
    folder = optional_head_folder(context.draft_model) or shipped_head_folder(method, context.target)
    if folder is None:
        raise OptionError(
            f"method {method} needs a trained head for {context.target.info.name}: name its directory with "
            f"draft_model=... (on the command line --draft-model), or train one (paceline train {method})"
        )
    return folder


def optional_head_folder(name: Any) -> Path | None:
    """The directory or GGUF file of a head from its path or Hub id; None where none is named."""
    if name is None:
        return None
    folder = Path(str(name)).expanduser()
    return folder if folder.is_dir() or gguf_file(folder) is not None else locate(str(name)).folder


def shipped_head_folder(method: str, target: Runner) -> Path | None:
    """The head of this method that comes with paceline for this target, if there is one."""
    return shipped_head(method, DIRECTORY if target.info.name == DEFAULT else Path(target.info.name).name)


def checked_target(method: str, target: Runner, capability: Capability) -> Runner:
    """The target, if it has the capability a method needs at construction. Raises CapabilityError."""
    if capability not in target.capabilities:
        raise CapabilityError(f"method {method} needs a model that can {capability.value}; {target.info.name} cannot")
    return target
