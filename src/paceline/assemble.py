"""Options -> runner + drafter + budget. The only file that knows every room.

Imports of the rooms stand inside the creators, so that choosing one method never loads what another needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from paceline.core.budget import AdaptiveBudget, Budget, FixedBudget
from paceline.core.costs import Costs
from paceline.core.protocols import Ability, Drafter, OpenRunner, Runner
from paceline.decode.calibrate import grain_of, measure_costs, warm_up
from paceline.decode.judge import Judge
from paceline.decode.step import Machinery, check_abilities
from paceline.decode.text import Codec, load_tokenizer
from paceline.errors import AbilityError, OptionError, PairError
from paceline.models import DEFAULT, locate
from paceline.options import AUTO, DecoderOptions
from paceline.profile import Profile

if TYPE_CHECKING:
    from paceline.engines.local import LocalEngine
    from paceline.engines.settings import EngineSettings

USUAL_WIDTHS = (1, 8)  # of passes, where the never-lose rule decides how many guesses there are


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
    budget = make_budget(options, target, drafter)
    if widths := _unseen_widths(options):
        warm_up(target, widths)
    return Assembly(Machinery(target, drafter, budget, Judge(options.acceptance or "token")), codec, options)


def _unseen_widths(options: DecoderOptions) -> tuple[int, ...]:
    """Of passes that a text will need and that nobody has run yet: where the costs of passes were measured, none."""
    fixed = 0 if options.method == "none" else options.draft_tokens
    if isinstance(fixed, int):
        return (1, 1 + fixed)
    return () if options.profile is None else USUAL_WIDTHS


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
    """A runner for a name or a loaded model: our own run of the Llama family, transformers' of everything else."""
    if isinstance(model, str | Path):
        runner = _runner_of_name(str(model), options, device, dtype)
    else:
        runner = _runner_of_loaded(model, options)
    if options.same_bits and getattr(runner, "narrow", None) is None:
        raise OptionError("same_bits is for models of the Llama family on a CUDA device")
    return runner


def _runner_of_name(name: str, options: DecoderOptions, device: str, dtype: str | None) -> Runner:
    from paceline.runners.loading import DTYPES, dtype_named, load_model

    word = dtype_named(dtype or options.dtype, device)
    files = locate(name)
    if options.runner != "hf" and _is_native(files.folder, options):
        from paceline.runners.native import NativeRunner

        return NativeRunner.load(
            files.folder, files.name, word, device, options.cache_tokens, same_bits=options.same_bits
        )
    if options.runner == "native" or word not in DTYPES:
        need = "runner native" if options.runner == "native" else f"dtype {word}"
        raise OptionError(f"{need} is for the Llama family (Llama, Mistral, Qwen2, Qwen3) stored as safetensors")
    from paceline.runners.huggingface import HuggingFaceRunner

    remote = options.trust_remote_code
    loaded = load_model(files.folder, files.name, DTYPES[word], device, trust_remote_code=remote)
    return HuggingFaceRunner(loaded, files.name)


def _is_native(folder: Path, options: DecoderOptions) -> bool:
    """Whether the directory holds a model of the family in safetensors."""
    from transformers import AutoConfig

    from paceline.runners.native import is_native

    if not any(folder.glob("*.safetensors")):
        return False
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError, KeyError):
        return False  # the Hugging Face runner says what is wrong with it
    return is_native(config)


def _runner_of_loaded(model: Any, options: DecoderOptions) -> Runner:
    """A loaded model runs as it is; runner="native" copies its weights into our own layout."""
    from paceline.runners.huggingface import HuggingFaceRunner

    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    if options.runner != "native":
        return HuggingFaceRunner(model, name)
    from paceline.runners.native import NativeRunner, is_native

    if not is_native(model.config):
        raise OptionError(f"runner native is for the Llama family; {name} is not of it")
    return NativeRunner.of_model(model, name, options.cache_tokens, same_bits=options.same_bits)


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


def configured(kind: Callable[..., Drafter], options: DecoderOptions) -> Drafter:
    """A drafter made with the user's method options, or an OptionError that names those it has."""
    known = list(inspect.signature(kind).parameters)
    for name in options.method_options:
        if name not in known:
            raise OptionError(f"method {options.method} has no option {name!r}; it has {', '.join(known)}")
    return kind(**options.method_options)


def _nothing(options: DecoderOptions, target: Runner, codec: Codec, device: str) -> Drafter:
    from paceline.drafting.nothing import Nothing

    return Nothing()


def _ngram(options: DecoderOptions, target: Runner, codec: Codec, device: str) -> Drafter:
    from paceline.drafting.ngram import Ngram

    return configured(Ngram, options)


def _suffix(options: DecoderOptions, target: Runner, codec: Codec, device: str) -> Drafter:
    from paceline.drafting.suffix import Suffix

    return configured(Suffix, options)


def _lookahead(options: DecoderOptions, target: Runner, codec: Codec, device: str) -> Drafter:
    from paceline.drafting.lookahead import Lookahead

    return configured(Lookahead, options)


def _open_draft(options: DecoderOptions, device: str) -> Runner:
    """The model that guesses; what it rounds to costs guesses, never the text."""
    return open_runner(options.draft, replace(options, same_bits=False), device, options.draft_dtype)


def _draft_model(options: DecoderOptions, target: Runner, codec: Codec, device: str) -> Drafter:
    from paceline.drafting.draft_model import DraftModel
    from paceline.models.vocabulary import compare

    runner = _open_draft(options, device)
    other = Codec(open_tokenizer(options.draft, None, options)) if isinstance(options.draft, str | Path) else codec
    found = compare(codec.tokenizer, other.tokenizer)
    if not found.same:
        raise PairError(found.explained(target.card.name, runner.card.name))
    return DraftModel(runner, target.card.vocab_size)


def _foreign(options: DecoderOptions, target: Runner, codec: Codec, device: str) -> Drafter:
    from paceline.drafting.foreign import Foreign

    runner = _open_draft(options, device)
    theirs = open_tokenizer(options.draft, None, options)
    return configured(partial(Foreign, runner, codec.tokenizer, theirs, target.card.vocab_size), options)


def _auto(options: DecoderOptions, target: Runner, codec: Codec, device: str) -> Drafter:
    """A look into the text itself, and beside it a draft model if one was named, or else the head that is shipped."""
    from paceline.drafting.combined import Combined
    from paceline.drafting.suffix import Suffix

    others: dict[str, Drafter] = {}
    if options.draft is not None:
        others["draft"] = _draft_model(options, target, codec, device)
    elif _shipped("eagle", target) is not None:
        others["eagle"] = _eagle(replace(options, method="eagle", method_options={}), target, codec, device)
    return Combined(cast(Suffix, configured(Suffix, options)), others)


def _eagle(options: DecoderOptions, target: Runner, codec: Codec, device: str) -> Drafter:
    from paceline.drafting.eagle import Eagle
    from paceline.heads.files import load_eagle

    head = load_eagle(_head_folder(options, target), dtype=_head_dtype(options, target), device=device)
    return configured(partial(Eagle, head, _opened(target, Ability.HIDDEN)), options)


def _medusa(options: DecoderOptions, target: Runner, codec: Codec, device: str) -> Drafter:
    from paceline.drafting.medusa import Medusa
    from paceline.heads.files import load_medusa

    heads = load_medusa(_head_folder(options, target), dtype=_head_dtype(options, target), device=device)
    return configured(partial(Medusa, heads, _opened(target, Ability.HIDDEN)), options)


def _layerskip(options: DecoderOptions, target: Runner, codec: Codec, device: str) -> Drafter:
    """The adapter is named as the draft or as the method's option `adapter`; without one the bare layer speaks."""
    from paceline.drafting.layerskip import LayerSkip
    from paceline.heads.files import load_exit

    others = dict(options.method_options)
    folder = others.pop("adapter", None) or options.draft
    adapter = load_exit(folder, dtype=_head_dtype(options, target), device=device) if folder else None
    kind = partial(LayerSkip, _opened(target, Ability.EXIT), adapter=adapter)
    return configured(kind, replace(options, method_options=others))


def _opened(target: Runner, ability: Ability) -> OpenRunner:
    """A target one can look into; asked before a drafter that lives on it is made."""
    if ability not in target.abilities:
        raise AbilityError(f"this method needs a model that can {ability.value}; {target.card.name} cannot")
    return cast(OpenRunner, target)


def _head_folder(options: DecoderOptions, target: Runner) -> Path:
    """Where the head lies: the directory or Hub id given as the draft, or the head that comes with paceline."""
    if options.draft is not None:
        named = Path(str(options.draft)).expanduser()
        return named if named.is_dir() else locate(str(options.draft)).folder
    found = _shipped(options.method or "", target)
    if found is None:
        raise OptionError(
            f"method {options.method} needs a trained head for {target.card.name}: name its directory with draft=... "
            f"(on the command line --draft), or train one (paceline train {options.method})"
        )
    return found


def _shipped(method: str, target: Runner) -> Path | None:
    """The head of this method that comes with paceline for this target, if there is one."""
    from paceline.heads.shipped import shipped_head
    from paceline.models.default import DIRECTORY

    return shipped_head(method, DIRECTORY if target.card.name == DEFAULT else Path(target.card.name).name)


def _head_dtype(options: DecoderOptions, target: Runner) -> torch.dtype:
    """The target's, unless told: a head reads the target's states and may speak through its head.

    A target with quantized weights still computes in the device's usual precision, and so does its head.
    """
    from paceline.runners.loading import DTYPES, dtype_named

    own = target.card.dtype if target.card.dtype in DTYPES else None
    word = dtype_named(options.draft_dtype or own, target.card.device)
    if word not in DTYPES:
        raise OptionError(f"a head runs in {', '.join(DTYPES)}; draft_dtype {word} is for draft models")
    return DTYPES[word]


DRAFTERS: dict[str, Creator] = {
    "none": _nothing,
    "draft": _draft_model,
    "foreign": _foreign,
    "ngram": _ngram,
    "suffix": _suffix,
    "lookahead": _lookahead,
    "layerskip": _layerskip,
    "medusa": _medusa,
    "eagle": _eagle,
    "auto": _auto,
}


def make_budget(options: DecoderOptions, target: Runner, drafter: Drafter) -> Budget:
    """A fixed k, or the never-lose rule with measured costs."""
    if options.method == "none":
        return FixedBudget(0)
    if isinstance(options.draft_tokens, int):
        return FixedBudget(options.draft_tokens)
    return AdaptiveBudget(starting_costs(options, target, drafter))


def starting_costs(options: DecoderOptions, target: Runner, drafter: Drafter) -> Costs:
    """From the profile if there is one, else from a short measurement."""
    if isinstance(options.profile, Costs):
        return options.profile
    if isinstance(options.profile, Profile) and options.profile.pass_seconds:
        return Costs.known(options.profile.pass_seconds, options.profile.draft_seconds, grain_of(target.card))
    return measure_costs(target, getattr(drafter, "runner", None))


# --- engines ----------------------------------------------------------------------------------------------------------

OFFERED = ("none", "ngram", "suffix", "lookahead")  # methods that need no weights: every request may name them


def engine(options: DecoderOptions, settings: EngineSettings | None = None) -> LocalEngine:
    """An engine that writes many texts at a time; each request may choose its own method and k."""
    from paceline.engines.apart import apart

    return apart(partial(_engine, options, settings))


def _engine(options: DecoderOptions, settings: EngineSettings | None) -> LocalEngine:
    from paceline.drafting.by_text import PREDICTION, ByText
    from paceline.drafting.prediction import Prediction
    from paceline.engines.local import LocalEngine
    from paceline.engines.settings import EngineSettings

    settings = settings or EngineSettings()
    if options.cache_tokens is None:
        options = replace(options, cache_tokens=settings.cache_tokens + settings.spare)
    assembly = assemble(replace(options, draft_tokens=0, largest_batch=settings.largest_batch))
    target, own, device = assembly.machinery.target, options.method or "none", chosen_device(options.device)
    plain = replace(options, method_options={})
    drafters = {word: DRAFTERS[word](plain, target, assembly.codec, device) for word in OFFERED if word != own}
    offered = {word: drafter for word, drafter in drafters.items() if drafter.needs <= target.abilities}
    drafter = ByText({own: assembly.machinery.drafter, **offered, PREDICTION: Prediction()}, own)
    budget: Budget
    if isinstance(options.draft_tokens, int):
        budget = FixedBudget(options.draft_tokens)
    else:
        budget = AdaptiveBudget(starting_costs(options, target, assembly.machinery.drafter))
    machinery = replace(assembly.machinery, drafter=drafter, budget=budget)
    return LocalEngine(machinery, assembly.codec, settings, methods=tuple(drafter.drafters))
