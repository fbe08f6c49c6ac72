"""How draft tokens are made, in vLLM's words: our method and its options -> vLLM's speculative_config.

What vLLM lacks is an OptionError that names what to use instead. Nothing here imports vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import AUTO, CUSTOM, NONE, SpeculativeConfig
from paceline.drafting import registry as drafters
from paceline.errors import OptionError
from paceline.heads.checkpoint import read_checkpoint
from paceline.heads.registry import spec_of
from paceline.heads.shipped import shipped_head
from paceline.hub import DEFAULT, locate
from paceline.hub.convert import unpacked_folder
from paceline.hub.default import DIRECTORY

PROPOSER = "paceline.engines.vllm.proposer.Proposer"
USUAL_K = 4  # draft tokens a step where the user leaves the number open
MOST_AUTO_K = 8  # … and the most that method auto drafts, where its policy decides
MEDUSA_FOLDER = "vllm"  # `paceline train medusa` writes vLLM's layout into this directory beside its own

INSTEAD = {
    "lookahead": "ngram, suffix or auto",
    "layerskip": "eagle, medusa or draft_model",
    "prediction": "auto or ngram, which find what the prompt already holds",
    CUSTOM: "auto, or engine local for a drafter of one's own",
}


@dataclass(frozen=True, slots=True)
class Translation:
    """A method in vLLM's words.

    method   vLLM's name
    options  our option names -> vLLM's keys
    extra    keys that the method always has
    weights  whether it needs draft_model, may have it, or takes none
    """

    method: str
    options: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    weights: str = "none"


NGRAM_OPTIONS = {"longest": "prompt_lookup_max", "shortest": "prompt_lookup_min"}
TRANSLATIONS = {
    "ngram": Translation("ngram", NGRAM_OPTIONS),
    "ngram_gpu": Translation("ngram_gpu", NGRAM_OPTIONS),
    "suffix": Translation("suffix", {"least": "suffix_decoding_min_token_prob"}),
    "draft_model": Translation("draft_model", weights="needed"),
    "cross_vocab": Translation("draft_model", extra={"use_heterogeneous_vocab": True}, weights="needed"),
    "medusa": Translation("medusa", weights="needed"),
    "eagle": Translation("eagle", weights="needed"),
    "eagle3": Translation("eagle3", weights="needed"),
    "dflash": Translation("dflash", weights="needed"),
    "mtp": Translation("mtp", weights="optional"),
    AUTO: Translation("custom_class", extra={"model": PROPOSER}),
}
ACCEPTANCE = {None: "standard", "token": "standard", "block": "block"}


def speculative_config(
    config: SpeculativeConfig, further: Mapping[str, Any], target: str = DEFAULT
) -> dict[str, Any] | None:
    """vLLM's speculative_config for a target; None: plain decoding. `further`: keys that win. Raises OptionError."""
    method = config.method or NONE
    if config.drafter is not None:
        raise _lacks(CUSTOM)
    if method == NONE or config.num_draft_tokens == 0:
        return None
    if method not in TRANSLATIONS:
        raise _lacks(method)
    translation = TRANSLATIONS[method]
    keys = {"method": translation.method, "num_speculative_tokens": num_draft_tokens(config), **translation.extra}
    keys |= _options(method, translation, config.draft_options)
    keys |= _weights(method, translation, config.draft_model or _shipped(method, target))
    if method == "medusa" and config.num_draft_tokens == AUTO:
        keys |= _num_medusa_heads(keys["model"])
    return {**keys, **_acceptance(config.acceptance), **further}


def num_draft_tokens(config: SpeculativeConfig) -> int:
    """k, which vLLM fixes at the start; 0: plain decoding. Of method auto it is the most that its policy chooses."""
    if (config.method or NONE) == NONE:
        return 0
    if isinstance(config.num_draft_tokens, int):
        return config.num_draft_tokens
    return MOST_AUTO_K if config.method == AUTO else USUAL_K


def _lacks(method: str) -> OptionError:
    known = f"vLLM has {', '.join(TRANSLATIONS)}"
    if method in INSTEAD:
        return OptionError(f"the engine vllm has no method {method}; use {INSTEAD[method]}")
    return OptionError(f"the engine vllm has no method {method!r}; {known}")


def _options(method: str, translation: Translation, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The method's options under vLLM's keys; those that both sides have get our defaults, so that a method is one."""
    if method == AUTO:  # they travel to the proposer in additional_config
        drafters.spec(AUTO).check_options(dict(chosen))
        return {}
    unknown = sorted(set(chosen) - set(translation.options))
    if unknown:
        listed = f"it has {', '.join(translation.options)}" if translation.options else "it has none"
        raise OptionError(f"method {method} has no option {unknown[0]!r} on the engine vllm; {listed}")
    if method not in drafters.names():
        return {translation.options[name]: value for name, value in chosen.items()}
    spec = drafters.spec(method)
    spec.check_options(dict(chosen))
    defaults = {option.name: option.default for option in spec.options if option.name in translation.options}
    return {translation.options[name]: value for name, value in {**defaults, **chosen}.items()}


def _acceptance(rule: str | None) -> dict[str, Any]:
    if rule not in ACCEPTANCE:
        raise OptionError(f"the engine vllm has no acceptance {rule}; use token or block, or engine local")
    return {} if rule is None else {"rejection_sample_method": ACCEPTANCE[rule]}


# --- weights ----------------------------------------------------------------------------------------------------------


def _shipped(method: str, target: str) -> str | None:
    """The head of this method that comes with paceline for this target, if there is one."""
    folder = shipped_head(method, DIRECTORY if target == DEFAULT else Path(target).name)
    return None if folder is None else str(folder)


def _weights(method: str, translation: Translation, draft_model: Any) -> dict[str, Any]:
    if draft_model is None and translation.weights != "needed":
        return {}
    if draft_model is None:
        raise OptionError(f"method {method} needs weights: name them with --draft-model (draft_model=...)")
    if translation.weights == "none":
        raise OptionError(f"method {method} takes no draft model on the engine vllm; use --method draft_model")
    if not isinstance(draft_model, str):
        raise OptionError("the engine vllm takes a draft model by name or directory, not a loaded one")
    if method == "draft_model" or method == "cross_vocab":
        return {"model": str(unpacked_folder(locate(draft_model).folder))}
    return _head(method, Path(draft_model).expanduser(), draft_model)


def _head(method: str, folder: Path, name: str) -> dict[str, Any]:
    """A head's directory, in the layout that vLLM reads; a name that is no directory is left to vLLM."""
    if not folder.is_dir():
        return {"model": name}
    if method == "medusa" and (folder / MEDUSA_FOLDER).is_dir():
        folder = folder / MEDUSA_FOLDER
    keys: dict[str, Any] = {"model": str(folder)}
    kind = spec_of(read_checkpoint(folder)).name if method == "eagle" else None
    if kind in ("eagle3", "peagle"):
        keys["method"] = "eagle3"
    if kind == "peagle":
        keys["parallel_drafting"] = True
    return keys


def _num_medusa_heads(folder: str) -> dict[str, Any]:
    """Each Medusa head makes one draft token, so all of them are used where the user leaves the number open."""
    path = Path(folder) / "config.json"
    document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    heads = document.get("num_heads", document.get("medusa_num_heads"))
    return {} if heads is None else {"num_speculative_tokens": int(heads)}
