"""Options -> runner + drafter + budget. The only file that knows every room.

Imports of the rooms stand inside the creators, so that choosing one method never loads what another needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.core.budget import AdaptiveBudget, Budget, Costs, FixedBudget
from paceline.core.protocols import Drafter, Runner
from paceline.decode.judge import Judge
from paceline.decode.step import Machinery, check_abilities
from paceline.decode.text import Codec, load_tokenizer
from paceline.errors import OptionError, PairError
from paceline.models import locate
from paceline.options import AUTO, DecoderOptions


@dataclass(frozen=True, slots=True)
class Assembly:
    """Everything a decoder or an engine works with."""

    machinery: Machinery
    codec: Codec
    options: DecoderOptions


def assemble(options: DecoderOptions) -> Assembly:
    """Put together what the options ask for. Raises OptionError, ModelError or PairError before any text is begun."""
    device = chosen_device(options.device)
    target = open_runner(options.target, options, device)
    codec = Codec(open_tokenizer(options.target, options.tokenizer, options))
    drafter = DRAFTERS[options.method or "none"](options, target, codec, device)
    check_abilities(target, drafter)
    machinery = Machinery(target, drafter, make_budget(options, target, drafter), Judge(options.acceptance))
    return Assembly(machinery, codec, options)


def chosen_device(word: str | None) -> str:
    """cuda where there is one, unless told."""
    if word is None or word == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(word)
    except RuntimeError:
        raise OptionError(f"device must be cpu, cuda or cuda:N, not {word!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("device cuda was asked for, and torch sees no CUDA device here")
    if device.type not in ("cpu", "cuda", "mps"):
        raise OptionError(f"device must be cpu, cuda or cuda:N, not {word!r}")
    return word


def open_runner(model: Any, options: DecoderOptions, device: str, dtype: str | None = None) -> Runner:
    """A runner for a name or a loaded model."""
    from paceline.runners.huggingface import HuggingFaceRunner, dtype_named, load_model

    if not isinstance(model, str | Path):
        return HuggingFaceRunner(model, getattr(model.config, "_name_or_path", "") or type(model).__name__)
    kind = dtype_named(dtype or options.dtype, device)
    files = locate(str(model))
    loaded = load_model(files.folder, files.name, kind, device, trust_remote_code=options.trust_remote_code)
    return HuggingFaceRunner(loaded, files.name)


def open_tokenizer(model: Any, tokenizer: Any, options: DecoderOptions) -> Any:
    """The tokenizer given, or the one that lies beside the model."""
    if tokenizer is not None and not isinstance(tokenizer, str):
        return tokenizer
    name = tokenizer or (model if isinstance(model, str | Path) else getattr(model.config, "_name_or_path", ""))
    if not name:
        raise OptionError("a loaded model that was not read from a directory needs tokenizer=...")
    files = locate(str(name))
    return load_tokenizer(files.folder, files.name, trust_remote_code=options.trust_remote_code)


# --- drafters ---------------------------------------------------------------------------------------------------------

Creator = Callable[[DecoderOptions, Runner, Codec, str], Drafter]


def _nothing(options: DecoderOptions, target: Runner, codec: Codec, device: str) -> Drafter:
    from paceline.drafting.nothing import Nothing

    return Nothing()


def _ngram(options: DecoderOptions, target: Runner, codec: Codec, device: str) -> Drafter:
    from paceline.drafting.ngram import Ngram

    return Ngram(**options.method_options)


def _draft_model(options: DecoderOptions, target: Runner, codec: Codec, device: str) -> Drafter:
    from paceline.drafting.draft_model import DraftModel
    from paceline.models.vocabulary import compare

    runner = open_runner(options.draft, options, device, options.draft_dtype)
    other = Codec(open_tokenizer(options.draft, None, options)) if isinstance(options.draft, str | Path) else codec
    found = compare(codec.tokenizer, other.tokenizer)
    if not found.same:
        raise PairError(found.explained(target.card.name, runner.card.name))
    return DraftModel(runner, target.card.vocab_size)


DRAFTERS: dict[str, Creator] = {"none": _nothing, "ngram": _ngram, "draft": _draft_model}


def make_budget(options: DecoderOptions, target: Runner, drafter: Drafter) -> Budget:
    """A fixed k, or the never-lose rule with measured costs."""
    if options.method == "none":
        return FixedBudget(0)
    if isinstance(options.draft_tokens, int):
        return FixedBudget(options.draft_tokens)
    return AdaptiveBudget(starting_costs(options, target, drafter))


def starting_costs(options: DecoderOptions, target: Runner, drafter: Drafter) -> Costs:
    """From the profile if there is one, else from a short measurement."""
    from paceline.decode.calibrate import measure_costs

    if isinstance(options.profile, Costs):
        return options.profile
    return measure_costs(target, getattr(drafter, "runner", None))
