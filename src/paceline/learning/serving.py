"""From the configuration of a server to a head that learns. Everything that cannot work is refused at the start."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.config import EngineConfig
from paceline.device.properties import chosen_device
from paceline.drafting.head_folder import optional_head_folder
from paceline.errors import OptionError
from paceline.heads.shipped import shipped_head
from paceline.hub import DEFAULT
from paceline.hub.default import DIRECTORY
from paceline.learning.files import LearnerOptions, opened_folder
from paceline.learning.learner import LearnerSettings
from paceline.serve.config import LearnConfig
from paceline.train.registry import trainer_names, trainer_spec


def learner_settings(config: EngineConfig, learn: LearnConfig) -> LearnerSettings:
    """How the head of this configuration learns. Raises OptionError where it cannot."""
    assert learn.learn is not None
    method = _checked_method(config)
    if sys.platform == "win32":
        raise OptionError("--learn stops its trainer by signals, which this system does not have")
    device = chosen_device(config.model.device)
    learn_device = chosen_device(learn.learn_device) if learn.learn_device else device
    options = LearnerOptions(
        str(config.model.model), method, str(_first_head(config, method)), learn_device, learn.learn_steps
    )
    folder = opened_folder(Path(learn.learn).expanduser().absolute(), options)
    return LearnerSettings(folder, options, learn.learn_ring_mb, pauses=_index(device) == _index(learn_device))


def _checked_method(config: EngineConfig) -> str:
    methods = [name for name in trainer_names() if trainer_spec(name).adapt is not None]
    method = config.speculative.method
    if method not in methods or config.engine != "local":
        raise OptionError(f"--learn adapts a trained head of the local engine: add --method {' or '.join(methods)}")
    return method


def _first_head(config: EngineConfig, method: str) -> Path:
    model, named = str(config.model.model), optional_head_folder(config.speculative.draft_model)
    folder = named or shipped_head(method, DIRECTORY if model == DEFAULT else Path(model).name)
    if folder is None:
        raise OptionError(f"--learn needs a head to start from: name one with --draft-model, or train one (paceline "
                          f"train {method})")  # fmt: skip
    trainer_spec(method).check_adaptable(folder)
    return folder.absolute()


def _index(device: str) -> str:
    """A device with its number."""
    return f"{device}:0" if device in ("cuda", "mps") else device
