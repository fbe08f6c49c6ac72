"""How a model's authors want it sampled: generation_config.json.

`paceline chat` and `paceline serve` follow it where the user or the request says nothing else. The library and
`paceline generate` are greedy and say once what it asks for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.core.sampling import SamplingParams
from paceline.errors import ModelError, OptionError
from paceline.hub.documents import generation_config
from paceline.hub.locate import locate

FILE_NAME = "generation_config.json"
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Settings that change an output and that verification does not apply, with the value that switches each off.
UNSUPPORTED: Mapping[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "guidance_scale": 1.0,
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "bad_words_ids": None,
    "force_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "stop_strings": None,
    "watermarking_config": None,
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a generation config asks for.

    settings     fields of SamplingParams that it sets; empty: nothing
    unsupported  names and values of settings that paceline does not apply
    """

    settings: dict[str, Any] = field(default_factory=dict)
    unsupported: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(filter(None, (_listed(self.settings), _listed(self.unsupported, " (not available)"))))

    @property
    def is_greedy(self) -> bool:
        """Whether it asks for nothing beyond greedy decoding."""
        return SamplingParams(**self.settings).plain_greedy and not self.unsupported


def generation_defaults(model: Any) -> GenerationDefaults:
    """Those of a model's name, or of a loaded model. Raises ModelError where the file cannot be understood."""
    if not isinstance(model, str):
        config = getattr(model, "generation_config", None)
        return GenerationDefaults() if config is None else defaults_from(config.to_diff_dict(), "the loaded model")
    return defaults_from(generation_config(locate(model).folder, model), model)


def defaults_from(document: Mapping[str, Any], name: str) -> GenerationDefaults:
    """What a generation config says, by its own keys alone: transformers' defaults for missing ones are not added."""
    given = {key: value for key, value in document.items() if value is not None}
    settings = {key: given[key] for key in SAMPLING_KEYS if key in given}
    if "do_sample" in given:
        settings["temperature"] = settings.get("temperature", 1.0) if given["do_sample"] else 0.0
    try:
        SamplingParams(**settings)
    except OptionError as error:
        raise ModelError(f"{FILE_NAME} of {name} cannot be followed: {error}; correct the file or remove it") from error
    unsupported = {key: given[key] for key, off in UNSUPPORTED.items() if key in given and given[key] != off}
    return GenerationDefaults(_without_neutral(settings), unsupported)


def _without_neutral(settings: dict[str, Any]) -> dict[str, Any]:
    """Without the settings that cut or penalise nothing. A temperature always says something."""
    plain = SamplingParams()
    return {key: value for key, value in settings.items() if key == "temperature" or value != getattr(plain, key)}


def _listed(settings: Mapping[str, Any], remark: str = "") -> str:
    return ", ".join(f"{name} {json.dumps(value, default=str)}{remark}" for name, value in settings.items())
