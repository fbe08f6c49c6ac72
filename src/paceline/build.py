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

from paceline.config import AUTO, DecoderOptions
from paceline.core.cost_model import CostModel
from paceline.core.draft_length import AdaptiveDraftLength, DraftLengthPolicy, FixedDraftLength
from paceline.core.protocols import Drafter, Runner
from paceline.core.types import Capability
from paceline.engines.local.step import EngineParts, check_capabilities
from paceline.engines.local.verifier import Verifier
from paceline.engines.local.warmup import grain_of, measure_costs, warm_up
from paceline.errors import CapabilityError, OptionError, PairError
from paceline.hub import DEFAULT, locate
from paceline.hub.tokenizer import Tokenizer, load_tokenizer
from paceline.tuned import Profile

if TYPE_CHECKING:
    from paceline.engines.local.async_engine import LocalEngine
    from paceline.engines.local.settings import EngineSettings

USUAL_WIDTHS = (1, 8)  # of passes, where the never-lose rule decides how many guesses there are


@dataclass(frozen=True, slots=True)
class Assembly:
    """Everything a decoder or an engine works with."""

    parts: EngineParts
    tokenizer: Tokenizer
    options: DecoderOptions


def assemble(options: DecoderOptions) -> Assembly:
    """Put together what the options ask for. Raises OptionError, ModelError or PairError before any text is begun."""
    device = chosen_device(options.device)
    target = open_runner(options.target, options, device)
    tokenizer = Tokenizer(open_tokenizer(options.target, options.tokenizer, options))
    drafter = DRAFTERS[options.method or "none"](options, target, tokenizer, device)
    check_capabilities(target, drafter)
    budget = make_draft_length(options, target, drafter)
    if widths := _unseen_widths(options):
        warm_up(target, widths)
    return Assembly(EngineParts(target, drafter, budget, Verifier(options.acceptance or "token")), tokenizer, options)


def _unseen_widths(options: DecoderOptions) -> tuple[int, ...]:
    """Of passes that a text will need and that nobody has run yet: where the costs of passes were measured, none."""
    fixed = 0 if options.method == "none" else options.num_draft_tokens
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
    if options.batch_invariant and getattr(runner, "narrow", None) is None:
        raise OptionError("same_bits is for models of the Llama family on a CUDA device")
    return runner


def _runner_of_name(name: str, options: DecoderOptions, device: str, dtype: str | None) -> Runner:
    from paceline.runners.loading import DTYPES, dtype_named, load_model

    word = dtype_named(dtype or options.dtype, device)
    files = locate(name)
    if options.runner != "hf" and _is_native(files.folder, options):
        from paceline.runners.native import NativeRunner

        return NativeRunner.load(
            files.folder, files.name, word, device, options.kv_cache_tokens, batch_invariant=options.batch_invariant
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
    return NativeRunner.of_model(model, name, options.kv_cache_tokens, batch_invariant=options.batch_invariant)


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

Creator = Callable[[DecoderOptions, Runner, Tokenizer, str], Drafter]


def configured(kind: Callable[..., Drafter], options: DecoderOptions) -> Drafter:
    """A drafter made with the user's method options, or an OptionError that names those it has."""
    known = list(inspect.signature(kind).parameters)
    for name in options.method_options:
        if name not in known:
            raise OptionError(f"method {options.method} has no option {name!r}; it has {', '.join(known)}")
    return kind(**options.method_options)


def _nothing(options: DecoderOptions, target: Runner, tokenizer: Tokenizer, device: str) -> Drafter:
    from paceline.drafting.no_draft import NoDraft

    return NoDraft()


def _ngram(options: DecoderOptions, target: Runner, tokenizer: Tokenizer, device: str) -> Drafter:
    from paceline.drafting.ngram import Ngram

    return configured(Ngram, options)


def _suffix(options: DecoderOptions, target: Runner, tokenizer: Tokenizer, device: str) -> Drafter:
    from paceline.drafting.suffix import Suffix

    return configured(Suffix, options)


def _lookahead(options: DecoderOptions, target: Runner, tokenizer: Tokenizer, device: str) -> Drafter:
    from paceline.drafting.lookahead import Lookahead

    return configured(Lookahead, options)


def _open_draft(options: DecoderOptions, device: str) -> Runner:
    """The model that guesses; what it rounds to costs guesses, never the text."""
    return open_runner(options.draft, replace(options, batch_invariant=False), device, options.draft_dtype)


def _draft_model(options: DecoderOptions, target: Runner, tokenizer: Tokenizer, device: str) -> Drafter:
    from paceline.drafting.draft_model import DraftModel
    from paceline.hub.vocabulary import compare

    runner = _open_draft(options, device)
    other = Tokenizer(open_tokenizer(options.draft, None, options)) if isinstance(options.draft, str | Path) else tokenizer
    found = compare(tokenizer.hf_tokenizer, other.hf_tokenizer)
    if not found.same:
        raise PairError(found.explained(target.info.name, runner.info.name))
    return DraftModel(runner, target.info.vocab_size)


def _foreign(options: DecoderOptions, target: Runner, tokenizer: Tokenizer, device: str) -> Drafter:
    from paceline.drafting.cross_vocab import CrossVocab

    runner = _open_draft(options, device)
    theirs = open_tokenizer(options.draft, None, options)
    return configured(partial(CrossVocab, runner, tokenizer.hf_tokenizer, theirs, target.info.vocab_size), options)


def _auto(options: DecoderOptions, target: Runner, tokenizer: Tokenizer, device: str) -> Drafter:
    """A look into the text itself, and beside it a draft model if one was named, or else the head that is shipped."""
    from paceline.drafting.auto import AutoDrafter
    from paceline.drafting.suffix import Suffix

    others: dict[str, Drafter] = {}
    if options.draft is not None:
        others["draft"] = _draft_model(options, target, tokenizer, device)
    elif _shipped("eagle", target) is not None:
        others["eagle"] = _eagle(replace(options, method="eagle", method_options={}), target, tokenizer, device)
    return AutoDrafter(cast(Suffix, configured(Suffix, options)), others)


def _eagle(options: DecoderOptions, target: Runner, tokenizer: Tokenizer, device: str) -> Drafter:
    from paceline.drafting.eagle import Eagle
    from paceline.heads.files import load_eagle

    head = load_eagle(_head_folder(options, target), dtype=_head_dtype(options, target), device=device)
    return configured(partial(Eagle, head, _opened(target, Capability.HIDDEN_STATES)), options)


def _medusa(options: DecoderOptions, target: Runner, tokenizer: Tokenizer, device: str) -> Drafter:
    from paceline.drafting.medusa import Medusa
    from paceline.heads.files import load_medusa

    heads = load_medusa(_head_folder(options, target), dtype=_head_dtype(options, target), device=device)
    return configured(partial(Medusa, heads, _opened(target, Capability.HIDDEN_STATES)), options)


def _layerskip(options: DecoderOptions, target: Runner, tokenizer: Tokenizer, device: str) -> Drafter:
    """The adapter is named as the draft or as the method's option `adapter`; without one the bare layer speaks."""
    from paceline.drafting.layerskip import LayerSkip
    from paceline.heads.files import load_exit

    others = dict(options.method_options)
    folder = others.pop("adapter", None) or options.draft
    adapter = load_exit(folder, dtype=_head_dtype(options, target), device=device) if folder else None
    kind = partial(LayerSkip, _opened(target, Capability.EARLY_EXIT), adapter=adapter)
    return configured(kind, replace(options, method_options=others))


def _opened(target: Runner, capability: Capability) -> Runner:
    """A target one can look into; asked before a drafter that lives on it is made."""
    if capability not in target.capabilities:
        raise CapabilityError(f"this method needs a model that can {capability.value}; {target.info.name} cannot")
    return target


def _head_folder(options: DecoderOptions, target: Runner) -> Path:
    """Where the head lies: the directory or Hub id given as the draft, or the head that comes with paceline."""
    if options.draft is not None:
        named = Path(str(options.draft)).expanduser()
        return named if named.is_dir() else locate(str(options.draft)).folder
    found = _shipped(options.method or "", target)
    if found is None:
        raise OptionError(
            f"method {options.method} needs a trained head for {target.info.name}: name its directory with draft=... "
            f"(on the command line --draft), or train one (paceline train {options.method})"
        )
    return found


def _shipped(method: str, target: Runner) -> Path | None:
    """The head of this method that comes with paceline for this target, if there is one."""
    from paceline.heads.shipped import shipped_head
    from paceline.hub.default import DIRECTORY

    return shipped_head(method, DIRECTORY if target.info.name == DEFAULT else Path(target.info.name).name)


def _head_dtype(options: DecoderOptions, target: Runner) -> torch.dtype:
    """The target's, unless told: a head reads the target's states and may speak through its head.

    A target with quantized weights still computes in the device's usual precision, and so does its head.
    """
    from paceline.runners.loading import DTYPES, dtype_named

    own = target.info.dtype if target.info.dtype in DTYPES else None
    word = dtype_named(options.draft_dtype or own, target.info.device)
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


def make_draft_length(options: DecoderOptions, target: Runner, drafter: Drafter) -> DraftLengthPolicy:
    """A fixed k, or the never-lose rule with measured costs."""
    if options.method == "none":
        return FixedDraftLength(0)
    if isinstance(options.num_draft_tokens, int):
        return FixedDraftLength(options.num_draft_tokens)
    return AdaptiveDraftLength(starting_costs(options, target, drafter))


def starting_costs(options: DecoderOptions, target: Runner, drafter: Drafter) -> CostModel:
    """From the profile if there is one, else from a short measurement."""
    if isinstance(options.profile, CostModel):
        return options.profile
    if isinstance(options.profile, Profile) and options.profile.pass_seconds:
        return CostModel.known(options.profile.pass_seconds, options.profile.draft_seconds, grain_of(target.info))
    return measure_costs(target, getattr(drafter, "runner", None))


# --- engines ----------------------------------------------------------------------------------------------------------

OFFERED = ("none", "ngram", "suffix", "lookahead")  # methods that need no weights: every request may name them


def engine(options: DecoderOptions, settings: EngineSettings | None = None) -> LocalEngine:
    """An engine that writes many texts at a time; each request may choose its own method and k."""
    from paceline.device.load_thread import run_in_load_thread

    return run_in_load_thread(partial(_engine, options, settings))


def _engine(options: DecoderOptions, settings: EngineSettings | None) -> LocalEngine:
    from paceline.drafting.prediction import Prediction
    from paceline.drafting.router import PREDICTION, DrafterRouter
    from paceline.engines.local.async_engine import LocalEngine
    from paceline.engines.local.settings import EngineSettings

    settings = settings or EngineSettings()
    if options.kv_cache_tokens is None:
        options = replace(options, kv_cache_tokens=settings.kv_cache_tokens + settings.spare)
    assembly = assemble(replace(options, num_draft_tokens=0, max_num_seqs=settings.max_num_seqs))
    target, own, device = assembly.parts.target, options.method or "none", chosen_device(options.device)
    plain = replace(options, method_options={})
    drafters = {word: DRAFTERS[word](plain, target, assembly.tokenizer, device) for word in OFFERED if word != own}
    offered = {word: drafter for word, drafter in drafters.items() if drafter.needs <= target.capabilities}
    drafter = DrafterRouter({own: assembly.parts.drafter, **offered, PREDICTION: Prediction()}, own)
    budget: DraftLengthPolicy
    if isinstance(options.num_draft_tokens, int):
        budget = FixedDraftLength(options.num_draft_tokens)
    else:
        budget = AdaptiveDraftLength(starting_costs(options, target, assembly.parts.drafter))
    parts = replace(assembly.parts, drafter=drafter, budget=budget)
    return LocalEngine(parts, assembly.tokenizer, settings, methods=tuple(drafter.drafters))
