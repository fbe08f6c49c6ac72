"""EngineConfig -> runner + drafter + draft-length policy + verifier -> engine.

The only file that knows every room, and the only road: the decoder, the server, bench, audit, tune and the benchmarks
build through it. Rooms that only some configurations need are imported inside the functions that need them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from paceline.config import AUTO, LLAMA_CPP_RUNNER, LOSSY_FP8, NONE, EngineConfig, ModelConfig
from paceline.core.cost_model import CostCurve, CostModel
from paceline.core.draft_length import AdaptiveDraftLength, DraftLengthPolicy, FixedDraftLength
from paceline.core.protocols import Drafter, Engine, Runner
from paceline.core.types import Capability, ModelInfo, WarmupPlan
from paceline.device.attention_plans import without_plans
from paceline.device.garbage import MODEL_LOADS
from paceline.device.graphs import NUM_SEQS, needed
from paceline.device.load_thread import run_beside, run_in_load_thread
from paceline.device.properties import chosen_device, default_dtype, device_in_use, may_hold_memory, supports_graphs
from paceline.drafting import registry as drafters
from paceline.drafting.chain_drafter import ChainDrafter
from paceline.drafting.no_draft import NoDraft
from paceline.drafting.registry import DrafterContext
from paceline.drafting.router import PREDICTION, DrafterRouter
from paceline.engines import registry as engines
from paceline.engines.local.engine import EngineParts, LocalEngine
from paceline.engines.local.rehearsal import rehearse
from paceline.engines.local.verifier import Verifier
from paceline.engines.local.warmup import LoadTimes, measure_costs, pass_grain, run_preparations, warm_up
from paceline.errors import CapabilityError, ModelError, OptionError
from paceline.hub import locate
from paceline.hub.model_tokenizer import compare_tokenizers, open_tokenizer
from paceline.hub.resolved_tokenizer import prepare_chats
from paceline.hub.tokenizer import Tokenizer
from paceline.kv.block_manager import BLOCK_SIZE, BlockManager
from paceline.kv.prefix_cache import PrefixCache, target_owner
from paceline.quantization import registry as formats
from paceline.runners.loading import DTYPES, dtype_named
from paceline.tuned import TunedProfile

if TYPE_CHECKING:
    from paceline.hub.locate import ModelFiles
    from paceline.runners.native import NativeRunner

LOG = logging.getLogger(__name__)
AUTO_KS = tuple(range(1, 16))  # draft tokens that are prepared for where the policy decides: a tile of 16 rows
FAST_CONTEXT = 2048  # tokens of a sequence that a fast warm-up prepares for …
FAST_KS = tuple(range(1, 8))  # … and draft tokens, where the policy decides: with the last token a tile of eight rows
QUICK_BATCHES = (2, 4, 8)  # sequences; the graphs of a size also run the sizes down to half of it
USUAL_WIDTHS = (1, 8)  # tokens in a pass, where the draft-length policy decides how many draft tokens there are
LIBRARY_PREFIX_TOKENS = 8192  # of finished sequences, where no server shares them among clients
SERVE_CACHE_TOKENS = 32768
DRAFTER_NAMES = frozenset(name for name in vars(Drafter) if not name.startswith("_"))
PROBES = 64  # tokens a draft tree may carry beyond its draft tokens


def open_engine(config: EngineConfig) -> Engine:
    """The engine that the configuration names. Raises OptionError, ModelError or PairError before any request."""
    return engines.open_engine(config, _build_apart)


def _build_apart(config: EngineConfig) -> LocalEngine:
    """In a thread that ends: the engine's own thread is then the only one that OpenMP keeps a team for."""
    with MODEL_LOADS.under_way(may_hold_memory=may_hold_memory()):
        return run_in_load_thread(lambda: build_engine(config))


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A target that is loaded. Several engines may be built over it, as bench and audit do."""

    target: Runner
    tokenizer: Tokenizer
    device: str


def open_model(config: EngineConfig) -> OpenModel:
    """Load the target of a configuration."""
    config = _with_cache_size(config)
    device = chosen_device(config.model.device)
    target = open_runner(config.model, device, config.cache.kv_cache_tokens, rounded_kv=config.cache.rounded_kv)
    tokenizer = open_tokenizer(config.model)
    run_beside(lambda: prepare_chats(tokenizer.hf_tokenizer))
    return OpenModel(target, tokenizer, device)


def build_engine(config: EngineConfig, opened: OpenModel | None = None) -> LocalEngine:
    """A local engine, to be stepped by the calling thread. opened: the target, where it is loaded already."""
    config, times = _with_cache_size(config), LoadTimes()
    _check_method(config)
    if opened is None:
        device = chosen_device(config.model.device)
        with device_in_use(device), without_plans(device):
            opened = open_model(config)
    times.took("target")
    with device_in_use(opened.target.info.device), without_plans(opened.target.info.device):
        return _engine_over(config, opened, times)


def _engine_over(config: EngineConfig, opened: OpenModel, times: LoadTimes) -> LocalEngine:
    target, tokenizer, device = opened.target, opened.tokenizer, opened.device
    prefix_cache = PrefixCache(max_tokens=_prefix_limits(config))
    context = drafter_context(config, target, tokenizer, device, prefix_cache)
    drafter = _drafter(config, context)
    times.took("drafter")
    plan = warmup_plan(config, target.info)
    _prepare(target, drafter, plan)
    times.took("graphs")
    draft_length = make_draft_length(config, target, drafter)
    if plan is not None and (widths := _unmeasured_widths(config)):
        warm_up(target, widths)
    times.took("costs")
    methods: tuple[str, ...] = (config.speculative.method or NONE,)
    if config.per_request:
        drafter = _router(config, context, drafter)
        methods = tuple(drafter.drafters)
    if (value := draft_length.draft_value()) is not None:
        drafter.use_value(value)
    parts = EngineParts(target, drafter, draft_length, Verifier(), prefix_cache)
    engine = LocalEngine(parts, tokenizer, config, methods)
    rehearse(engine, plan)
    times.took("rehearsal")
    LOG.debug("ready after %s", times)
    return engine


# --- models -----------------------------------------------------------------------------------------------------------


def open_runner(
    config: ModelConfig, device: str, kv_cache_tokens: int | None = None, *, rounded_kv: bool = False
) -> Runner:
    """A runner for a name or a loaded model: our own for the architectures of models/, transformers' for all others."""
    sizes = CacheSizes(kv_cache_tokens, rounded_kv)
    if config.runner == LLAMA_CPP_RUNNER:
        runner = _load_gguf(config, device, sizes)
    else:
        runner = _load(config, device, sizes) if isinstance(config.model, str) else _wrap(config, sizes)
    if config.batch_invariant and Capability.BATCH_INVARIANT not in runner.capabilities:
        raise OptionError("batch_invariant needs a model that the native runner runs on a CUDA device")
    if config.lora:
        runner.read_adapters(config.lora)
    return runner


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Tokens that the KV cache of a runner holds, and whether in eight bits."""

    kv_cache_tokens: int | None
    rounded_kv: bool


def _load(config: ModelConfig, device: str, sizes: CacheSizes) -> Runner:
    from paceline.runners.loading import load_model

    dtype = dtype_named(config.dtype, device)
    files = locate(config.model)
    if config.runner != "hf" and _is_native(files, config):
        from paceline.runners.native import stored_dtype

        dtype, runner_class = stored_dtype(files.folder, config.dtype, device), _native_class(config)
        parts = (files.folder, files.name, dtype, device, sizes.kv_cache_tokens)
        return runner_class.load(*parts, batch_invariant=config.batch_invariant, rounded_kv=sizes.rounded_kv)
    if config.runner == "native" or dtype not in DTYPES:
        need = "runner native" if config.runner == "native" else f"dtype {dtype}"
        raise OptionError(f"{need} needs an architecture that paceline runs itself, stored as safetensors")
    model = load_model(files.folder, files.name, DTYPES[dtype], device, trust_remote_code=config.trust_remote_code)
    return _hugging_face(model, files.name, sizes)


def _load_gguf(config: ModelConfig, device: str, sizes: CacheSizes) -> Runner:
    """A GGUF file in llama.cpp; the file decides its precision."""
    from paceline.runners.llama_cpp import open_llama_cpp

    if config.dtype is not None:
        raise OptionError(f"runner {LLAMA_CPP_RUNNER} computes with the weights of the .gguf file; leave dtype out")
    if sizes.rounded_kv:
        raise OptionError(f"kv_cache_dtype {LOSSY_FP8} is not for runner {LLAMA_CPP_RUNNER}; leave it out")
    return open_llama_cpp(config.model, device, sizes.kv_cache_tokens)


def _hugging_face(model: Any, name: str, sizes: CacheSizes) -> Runner:
    """transformers' own code; its buffers grow as they like unless kv_cache_tokens bounds them."""
    from paceline.runners.huggingface_probe import open_hugging_face

    if sizes.rounded_kv:
        raise OptionError(f"kv_cache_dtype {LOSSY_FP8} needs a model that paceline runs itself; {name} runs elsewhere")
    kv_cache_tokens = sizes.kv_cache_tokens
    blocks = None if kv_cache_tokens is None else BlockManager(max(1, -(-kv_cache_tokens // BLOCK_SIZE)))
    return open_hugging_face(model, name, blocks=blocks)


def _is_native(files: ModelFiles, config: ModelConfig) -> bool:
    """Whether the directory holds safetensors or a GGUF file of an architecture that the native runner runs."""
    from paceline.hub.gguf_index import has_index
    from paceline.runners.native import is_native, read_config

    if not any(files.folder.glob("*.safetensors")) and not has_index(files.folder):
        return False
    try:
        hf_config = read_config(files.folder, files.name, trust_remote_code=config.trust_remote_code)
    except ModelError:
        return False  # the Hugging Face runner says what is wrong with it
    return is_native(hf_config)


def _wrap(config: ModelConfig, sizes: CacheSizes) -> Runner:
    """A loaded model runs as it is; runner="native" copies its weights into our own layout."""
    from paceline.runners.native import is_native

    model = config.model
    if not hasattr(model, "config") or not hasattr(model, "parameters"):
        raise OptionError(f"a model is a name, a directory, a .gguf file or a loaded model, not {type(model).__name__}")
    name = str(model.config._name_or_path) or type(model).__name__
    if config.runner != "native":
        return _hugging_face(model, name, sizes)
    if not is_native(model.config):
        raise OptionError(f"runner native needs an architecture that paceline runs itself; {name} has none")
    options: Any = {"batch_invariant": config.batch_invariant, "rounded_kv": sizes.rounded_kv}
    return _native_class(config).of_model(model, name, sizes.kv_cache_tokens, **options)


def _native_class(config: ModelConfig) -> type[NativeRunner]:
    """The native runner, or the one that reads adapters."""
    from paceline.runners.native import NativeRunner
    from paceline.runners.native.lora_runner import LoraRunner

    return LoraRunner if config.lora else NativeRunner


def _with_cache_size(config: EngineConfig) -> EngineConfig:
    """A server states how much its sequences may hold together; the library takes the runner's default."""
    if not config.per_request or config.cache.kv_cache_tokens is not None:
        return config
    return config.with_options(kv_cache_tokens=SERVE_CACHE_TOKENS + PROBES * config.max_num_seqs)


def _prefix_limits(config: EngineConfig) -> dict[str, int]:
    tokens = config.cache.prefix_cache_tokens
    if tokens is None and not config.per_request:
        tokens = LIBRARY_PREFIX_TOKENS
    return {} if tokens is None else {target_owner(lora): tokens for lora in (None, *config.model.lora)}


# --- drafters ---------------------------------------------------------------------------------------------------------


def drafter_context(
    config: EngineConfig, target: Runner, tokenizer: Tokenizer, device: str, prefix_cache: PrefixCache
) -> DrafterContext:
    """What drafters are built from."""
    speculative = config.speculative

    def draft_config(model: Any) -> ModelConfig:
        dtype = speculative.draft_dtype or _draft_dtype(config.model, model, device)
        # What a draft rounds to costs acceptance, never output: it need not be batch-invariant.
        return replace(config.model, model=model, dtype=dtype, tokenizer=None, batch_invariant=False, lora={})

    return DrafterContext(
        target=target,
        tokenizer=tokenizer,
        draft_model=speculative.draft_model,
        device=device,
        head_dtype=_head_dtype(speculative.draft_dtype, target),
        head_in_int8=(speculative.draft_dtype or target.info.dtype) in formats.names(),
        options=speculative.draft_options,
        prefix_cache=prefix_cache,
        open_runner=lambda model: open_runner(draft_config(model), device, config.cache.kv_cache_tokens),
        open_tokenizer=lambda model: open_tokenizer(draft_config(model)),
        compare_tokenizers=lambda model: compare_tokenizers(tokenizer, draft_config(model)),
    )


def _draft_dtype(config: ModelConfig, model: Any, device: str) -> str | None:
    """Of a draft model, unless one is named: as the target's, or plain weights where those are quicker than packed."""
    from paceline.runners.native import is_one_kernel, read_config

    is_packed = config.dtype in (None, AUTO) or config.dtype in formats.names()
    if not is_packed or not isinstance(model, str) or config.runner not in (AUTO, "native"):
        return config.dtype
    files = locate(model)
    quicker = _is_native(files, config) and is_one_kernel(read_config(files.folder, files.name), device)
    return default_dtype(device) if quicker else config.dtype


def _check_method(config: EngineConfig) -> None:
    """A method that does not exist, or lacks what it needs, is an error before any model is loaded."""
    speculative = config.speculative
    if speculative.drafter is not None:
        _check_own_drafter(speculative.drafter)
    else:
        method = drafters.spec(speculative.method or NONE)
        method.check_options(speculative.draft_options)
        method.check_weights(speculative.draft_model)
        if speculative.draft_model is not None and not method.takes_draft_model:
            LOG.warning("the draft model is not used: the method %s drafts without one", method.name)


def _check_own_drafter(drafter: Any) -> None:
    """Raise OptionError for an object that is no drafter."""
    missing = [name for name in sorted(DRAFTER_NAMES) if not hasattr(drafter, name)]
    if missing:
        raise OptionError(
            f"drafter must be an object of a subclass of paceline.core.protocols.Drafter; {type(drafter).__name__} "
            f"has no {', '.join(missing)}"
        )


def _drafter(config: EngineConfig, context: DrafterContext) -> Drafter:
    own, method, target = config.speculative.drafter, config.speculative.method or NONE, context.target
    if target.plain_only is not None:
        if own is not None or method != NONE or config.per_request:
            LOG.warning("%s is decoded plainly, without draft tokens: %s", target.info.name, target.plain_only)
        return NoDraft()
    return fitted(target, drafters.build_drafter(method, context) if own is None else own)


def _router(config: EngineConfig, context: DrafterContext, own: Drafter) -> DrafterRouter:
    """Every request may name its own method: those that need no weights are always offered."""
    method = config.speculative.method or NONE
    plain = replace(context, options={})
    names = [name for name in drafters.per_request_names() if name != method]
    if context.target.plain_only is not None:  # a request may still name a method, as on any server
        return DrafterRouter({method: own, **{name: NoDraft() for name in names}}, method)
    others = {name: _chains_if_needed(context.target, drafters.build_drafter(name, plain)) for name in names}
    offered = {name: drafter for name, drafter in others.items() if drafter.needs <= context.target.capabilities}
    prediction = offered.pop(PREDICTION, None)
    last = {} if prediction is None else {PREDICTION: prediction}
    return DrafterRouter({method: own, **offered, **last}, method)


def _head_dtype(name: str | None, target: Runner) -> torch.dtype:
    """The target's, unless told: a head reads the target's hidden states and may use its lm_head.

    A target with quantized weights still computes in the device's usual precision, and so does its head.
    """
    own = target.info.dtype if target.info.dtype in DTYPES else None
    dtype = dtype_named(name or own, target.info.device)
    return DTYPES[dtype] if dtype in DTYPES else DTYPES[dtype_named(None, target.info.device)]


def fitted(target: Runner, drafter: Drafter) -> Drafter:
    """The drafter as the target can verify it: chains instead of trees where need be. Raises CapabilityError."""
    drafter = _chains_if_needed(target, drafter)
    check_capabilities(target, drafter)
    return drafter


def _chains_if_needed(target: Runner, drafter: Drafter) -> Drafter:
    return drafter if Capability.TREE in target.capabilities else ChainDrafter(drafter)


def check_capabilities(target: Runner, drafter: Drafter) -> None:
    """Raise CapabilityError where the target cannot do what the drafter needs."""
    for capability in sorted(drafter.needs - target.capabilities, key=lambda item: item.value):
        name = type(drafter).__name__
        raise CapabilityError(f"{name} needs a model that can {capability.value}; {target.info.name} cannot")


# --- draft length -----------------------------------------------------------------------------------------------------


def make_draft_length(config: EngineConfig, target: Runner, drafter: Drafter) -> DraftLengthPolicy:
    """A fixed number of draft tokens, or the policy that never loses, with measured costs."""
    if target.plain_only is not None:
        return FixedDraftLength(0)
    fixed = _fixed_k(config)
    if fixed is not None:
        return FixedDraftLength(fixed)
    costs = starting_costs(config, target, drafter)
    if not supports_graphs(target.info.device):
        return AdaptiveDraftLength(costs)
    # Wider passes than a tile are multiplied in another way, and a near-tie might fall to the other side.
    return AdaptiveDraftLength(costs, AUTO_KS[-1], target.info.rows_rounded_alike)


def _fixed_k(config: EngineConfig) -> int | None:
    """The number of draft tokens that the configuration names; 0 where nothing drafts. None: the policy decides."""
    if config.speculative.method == NONE and config.speculative.drafter is None and not config.per_request:
        return 0
    num_draft_tokens = config.speculative.num_draft_tokens
    return num_draft_tokens if isinstance(num_draft_tokens, int) else None


def starting_costs(config: EngineConfig, target: Runner, drafter: Drafter) -> CostModel:
    """From the tuned profile if there is one, else from a short measurement."""
    tuned = config.tuned
    if isinstance(tuned, CostModel):
        return tuned
    if isinstance(tuned, TunedProfile) and tuned.pass_seconds:
        grain = pass_grain(target.info, CostCurve(tuned.pass_seconds))
        return CostModel.known(tuned.pass_seconds, tuned.draft_seconds, grain)
    # `auto` weighs what a draft model must read first itself: its lookups need not wait until that pays.
    return measure_costs(target, None if config.speculative.method == AUTO else drafter.draft_runner)


# --- warm-up ----------------------------------------------------------------------------------------------------------


def warmup_plan(config: EngineConfig, info: ModelInfo) -> WarmupPlan | None:
    """What is compiled and captured at load: fast is what one sequence meets, full is what batches meet too."""
    if config.warmup == "none":
        return None
    fixed, longest = _fixed_k(config), min(info.max_seq_len, config.model.max_model_len or info.max_seq_len)
    auto = AUTO_KS if config.warmup == "full" else FAST_KS
    ks = auto if fixed is None else (fixed,) if fixed else ()
    widths = tuple(range(1, AUTO_KS[-1] + 2)) if fixed is None else tuple(sorted({1, 1 + fixed}))
    batches = tuple(size for size in QUICK_BATCHES if size < 2 * config.max_num_seqs)
    if config.warmup == "full":
        return WarmupPlan(widths, ks, longest, tuple(needed(NUM_SEQS, config.max_num_seqs)), batches)
    return WarmupPlan(widths, ks, min(longest, FAST_CONTEXT), quick_batches=batches)


def _prepare(target: Runner, drafter: Drafter, plan: WarmupPlan | None) -> None:
    """Graphs of all sizes of the plan. Before anything is measured."""
    if plan is not None:
        trees = drafter.loops_trees(plan) or Capability.TREE in drafter.needs
        own = target.preparations(replace(plan, num_draft_tokens=(), trees=trees))
        run_preparations(own + drafter.preparations(plan), "capturing graphs", target.info.device)


def _unmeasured_widths(config: EngineConfig) -> tuple[int, ...]:
    """Tokens in passes that a sequence will need and that no measurement has run yet."""
    fixed = 0 if config.speculative.method == NONE else config.speculative.num_draft_tokens
    if isinstance(fixed, int):
        return (1, 1 + fixed)
    return () if config.tuned is None else USUAL_WIDTHS
