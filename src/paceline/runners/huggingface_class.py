"""Which class of transformers reads a directory as a model that continues text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import ModelError


def model_class(folder: Path, name: str, *, trust_remote_code: bool = False) -> Any:
    """The auto class for a causal language model, also for one that could read images beside its text.

    Raises ModelError for other kinds of models. A config that cannot be read is left to the loading itself.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception:  # loading says what is wrong with it
        return AutoModelForCausalLM
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto_class._model_mapping or auto_class.__name__ in (
            getattr(config, "auto_map", None) or {}
        ):
            return auto_class
    if config.is_encoder_decoder:
        reason = "an encoder-decoder model, which answers a text and does not continue it"
    else:
        reason = "no causal language model in this version of transformers"
    raise ModelError(f"{name} ({config.model_type}) is {reason}: choose a causal language model")
