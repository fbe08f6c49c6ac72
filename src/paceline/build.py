"""Options -> runner + drafter + budget. The only file that knows every room.

Imports of the rooms stand inside the creators, so that choosing one method never loads what another needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.config import AUTO, METHODS, DecoderOptions
from paceline.core.cost_model import CostModel
from paceline.core.draft_length import AdaptiveDraftLength, DraftLengthPolicy, FixedDraftLength
from paceline.core.protocols import Drafter, Runner
from paceline.drafting.registry import DrafterContext, build_drafter, head_names, per_request_names
from paceline.engines.local.step import EngineParts, check_capabilities
from paceline.engines.local.verifier import Verifier
from paceline.engines.local.warmup import grain_of, measure_costs, warm_up
from paceline.errors import OptionError
from paceline.hub import locate
from paceline.hub.tokenizer import Tokenizer, load_tokenizer
from paceline.kv.prefix_cache import PrefixCache
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
    drafter = make_drafter(options, target, tokenizer, device)
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

FORMER_NAMES = {"draft": "draft_model", "foreign": "cross_vocab"}


def make_drafter(options: DecoderOptions, target: Runner, tokenizer: Tokenizer, device: str) -> Drafter:
    """The drafter the options name."""
    method = options.method or "none"
    context = drafter_context(options, target, tokenizer, device, PrefixCache())
    return build_drafter(FORMER_NAMES.get(method, method), context)


def drafter_context(
    options: DecoderOptions, target: Runner, tokenizer: Tokenizer, device: str, prefix_cache: PrefixCache
) -> DrafterContext:
    """What the drafters of one engine are built from. A draft model need not be batch-invariant: only the target is."""
    draft_options = replace(options, batch_invariant=False)
    return DrafterContext(
        target=target,
        tokenizer=tokenizer,
        draft_model=options.draft,
        device=device,
        head_dtype=_head_dtype(options, target),
        options=options.method_options,
        prefix_cache=prefix_cache,
        open_runner=lambda model: open_runner(model, draft_options, device, options.draft_dtype),
        open_tokenizer=lambda model: Tokenizer(open_tokenizer(model, None, options)),
    )


def _head_dtype(options: DecoderOptions, target: Runner) -> torch.dtype:
    """The target's, unless told: a head reads the target's states and may speak through its head.

    A target with quantized weights still computes in the device's usual precision, and so does its head.
    """
    from paceline.runners.loading import DTYPES, dtype_named

    own = target.info.dtype if target.info.dtype in DTYPES else None
    word = dtype_named(options.draft_dtype or own, target.info.device)
    if word not in DTYPES and options.draft is not None and options.method not in head_names():
        word = dtype_named(own, target.info.device)  # that of the draft model, which no head shares
    if word not in DTYPES:
        raise OptionError(f"a head runs in {', '.join(DTYPES)}; draft_dtype {word} is for draft models")
    return DTYPES[word]


DRAFTERS = dict.fromkeys(METHODS, make_drafter)


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
    return measure_costs(target, drafter.draft_runner)


# --- engines ----------------------------------------------------------------------------------------------------------

def engine(options: DecoderOptions, settings: EngineSettings | None = None) -> LocalEngine:
    """An engine that writes many texts at a time; each request may choose its own method and k."""
    from paceline.device.load_thread import run_in_load_thread

    return run_in_load_thread(partial(_engine, options, settings))


def _engine(options: DecoderOptions, settings: EngineSettings | None) -> LocalEngine:
    from paceline.drafting.router import DrafterRouter
    from paceline.engines.local.async_engine import LocalEngine
    from paceline.engines.local.settings import EngineSettings

    settings = settings or EngineSettings()
    if options.kv_cache_tokens is None:
        options = replace(options, kv_cache_tokens=settings.kv_cache_tokens + settings.spare)
    assembly = assemble(replace(options, num_draft_tokens=0, max_num_seqs=settings.max_num_seqs))
    target, own, device = assembly.parts.target, options.method or "none", chosen_device(options.device)
    plain = replace(options, method_options={})
    context = drafter_context(plain, target, assembly.tokenizer, device, PrefixCache())
    drafters = {name: build_drafter(name, context) for name in per_request_names() if name != own}
    offered = {word: drafter for word, drafter in drafters.items() if drafter.needs <= target.capabilities}
    drafter = DrafterRouter({own: assembly.parts.drafter, **offered}, own)
    budget: DraftLengthPolicy
    if isinstance(options.num_draft_tokens, int):
        budget = FixedDraftLength(options.num_draft_tokens)
    else:
        budget = AdaptiveDraftLength(starting_costs(options, target, assembly.parts.drafter))
    parts = replace(assembly.parts, drafter=drafter, budget=budget)
    return LocalEngine(parts, assembly.tokenizer, settings, methods=tuple(drafter.drafters))
