"""The trainable kinds of drafter by name. A kind is one module that ends with `SPEC = TrainerSpec(...)`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.errors import OptionError

if TYPE_CHECKING:
    from paceline.train.task import TrainerSpec

# Modules are imported when their kind is used, so that listing the names does not import torch.
MODULES: Mapping[str, str] = {
    "eagle": "paceline.train.eagle",
    "dflash": "paceline.train.dflash",
    "dflash2": "paceline.train.dflash2",
    "mtp": "paceline.train.mtp",
    "medusa": "paceline.train.medusa",
    "draft-model": "paceline.train.draft_model",
    "exit-adapter": "paceline.train.exit_adapter",
}


def trainer_names() -> tuple[str, ...]:
    return tuple(MODULES)


def trainer_spec(name: str) -> TrainerSpec:
    """The spec of a kind. Raises OptionError for an unknown name."""
    if name not in MODULES:
        raise OptionError(f"there is no training called {name!r}; the kinds are {', '.join(MODULES)}")
    spec: TrainerSpec = importlib.import_module(MODULES[name]).SPEC
    return spec
