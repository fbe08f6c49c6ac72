"""All that a user may choose, resolved and validated once.

ModelConfig        which model, and how it runs
SpeculativeConfig  how draft tokens are made and verified
CacheConfig        how much the KV cache and the prefix cache hold
DistributedConfig  how an engine that can divides the model over devices and machines
EngineConfig       the four together, the engine, and how many sequences run at a time

A field says in its metadata how it looks on the command line: flags and help are generated from it, so that an option
is written down once. Nothing here imports torch: `paceline --help` must be quick.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paceline.errors import OptionError

AUTO = "auto"
NONE = "none"
DRAFT_MODEL = "draft_model"  # the method of a draft model that is named without a method
CUSTOM = "custom"  # the method of a drafter object that is passed without a name
DEFAULT_MODEL = "default"
LLAMA_CPP_RUNNER = "llama_cpp"
RUNNERS = ("auto", "native", "hf", LLAMA_CPP_RUNNER)
WARMUPS = ("none", "fast", "full")
EXECUTORS = ("mp", "ray")
ACCEPTANCE = ("token", "block", "coupled", "lossy-typical")
LOSSY_FP8 = "lossy-fp8"
KV_CACHE_DTYPES = (AUTO, LOSSY_FP8)
MAX_DRAFT_TOKENS = 128
MAX_NUM_SEQS = 8
PREFILL_CHUNK, SERVE_PREFILL_CHUNK = 2048, 256


def option(default: Any, help: str, metavar: str = "", flags: tuple[str, ...] = (), **how: Any) -> Any:
    """A field with a flag: `--field-name` unless `flags` says otherwise. how: passed on to argparse."""
    metadata = {"help": help, "metavar": metavar, "flags": flags, "argparse": how}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it runs."""

    model: Any = field(default=DEFAULT_MODEL)  # a name, a directory, a .gguf file, or a loaded AutoModelForCausalLM
    tokenizer: Any = None
    device: str | None = option(None, "cpu, cuda, cuda:N or mps; default: cuda or mps where there is one", "D")
    dtype: str | None = option(
        None, "fp32, bf16, fp16, or a weight format such as int8 or int4; default: by device", "T"
    )
    quantize: str | None = option(None, "convert the weights at load: {formats}; the same as that --dtype", "F")
    runner: str = option(AUTO, "auto, native, hf or llama_cpp (a .gguf file as it is): which code runs the model", "R")
    max_model_len: int | None = option(
        None, "longest sequence, prompt included; default: the model's own", "N", type=int
    )
    batch_invariant: bool = option(
        False, "on cuda: a batch computes bit for bit what its sequences compute alone; slower", action="store_true"
    )
    trust_remote_code: bool = option(False, "run code that comes with the model", action="store_true")
    lora: dict[str, str] = field(default_factory=dict)  # directories of LoRA adapters by name; a request names one

    def __post_init__(self) -> None:
        if self.model is None:
            raise OptionError("model must be a name, a directory, a .gguf file or a loaded model, not None")
        _set(self, model=_path_or_model(self.model), device=_device_name(self.device), dtype=_dtype_name(self.dtype))
        _set(self, **_weight_format(self.dtype, self.quantize))
        _one_of("runner", self.runner, RUNNERS)
        _set(self, lora=_lora_folders(self.lora))
        _set(self, max_model_len=_at_least("max_model_len", self.max_model_len, 2))


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How draft tokens are made and verified.

    method            a name of drafting/registry.py; None: `draft_model` if a draft model is named, else `none`
    num_draft_tokens  draft tokens a step, or "auto": chosen from measured costs, 0 where drafting would be slower
    acceptance        None: `token`; `coupled` for a seeded sequence, so that the same seed gives the same output with
                      every method
    """

    method: str | None = option(None, "how to draft: {methods}", "M")
    draft_model: Any = option(None, "a smaller model that drafts, or the directory of a trained head", "MODEL")
    num_draft_tokens: int | str = option(
        AUTO,
        f"draft tokens a step: 0 to {MAX_DRAFT_TOKENS}, or auto: chosen from measured costs",
        "N",
        ("-k", "--num-draft-tokens"),
    )
    draft_dtype: str | None = option(None, "dtype of the draft model; its errors cost acceptance, never output", "T")
    acceptance: str | None = option(None, f"{', '.join(ACCEPTANCE)}; default: token, coupled with a seed", "R")
    draft_options: dict[str, Any] = option(
        {}, "an option of the method, such as nodes=24; repeatable", "NAME=VALUE", ("--draft-option",), action="append"
    )
    drafter: Any = None  # a Drafter of one's own, used instead of `method`

    def __post_init__(self) -> None:
        if self.draft_options is None or not isinstance(self.draft_options, Mapping):
            raise OptionError(f"draft_options must be a dictionary of option names, not {self.draft_options!r}")
        _set(
            self,
            draft_model=None if self.draft_model is None else _path_or_model(self.draft_model),
            draft_dtype=_dtype_name(self.draft_dtype),
            num_draft_tokens=checked_num_draft_tokens(self.num_draft_tokens),
            method=self.method or self._default_method(),
            draft_options=dict(self.draft_options),
        )
        if not isinstance(self.method, str):
            raise OptionError(f"method must be a name, not {self.method!r}")
        if self.acceptance is not None:
            _one_of("acceptance", self.acceptance, ACCEPTANCE)

    def _default_method(self) -> str:
        if self.drafter is not None:
            return CUSTOM
        return NONE if self.draft_model is None else DRAFT_MODEL


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much is kept of sequences."""

    kv_cache_tokens: int | None = option(
        None, "tokens whose keys and values fit, over all sequences; default: enough for --max-num-seqs", "N", type=int
    )
    kv_cache_dtype: str = option(
        AUTO, "auto: the model's own; lossy-fp8: half of its bytes, and the output is not the model's", "T"
    )
    prefix_cache_tokens: int | None = option(
        None, "tokens of finished sequences kept for shared prefixes; 0: none; default: what is free", "N", type=int
    )
    prefill_chunk_tokens: int | None = option(
        None, "prompt tokens read between two steps of running sequences; default: 256 when serving", "N", type=int
    )

    def __post_init__(self) -> None:
        _set(
            self,
            kv_cache_tokens=_at_least("kv_cache_tokens", self.kv_cache_tokens, 1),
            prefix_cache_tokens=_at_least("prefix_cache_tokens", self.prefix_cache_tokens, 0),
            prefill_chunk_tokens=_at_least("prefill_chunk_tokens", self.prefill_chunk_tokens, 1),
        )
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)

    @property
    def rounded_kv(self) -> bool:
        """Whether keys and values are kept in eight bits."""
        return self.kv_cache_dtype == LOSSY_FP8


@dataclass(frozen=True, slots=True)
class DistributedConfig:
    """How the model is divided over devices and machines. Only an engine that can do it takes these."""

    tensor_parallel_size: int = option(1, "devices that share each layer", "N", type=int)
    pipeline_parallel_size: int = option(1, "groups of layers, each on devices of its own", "N", type=int)
    data_parallel_size: int = option(1, "copies of the model that share the requests", "N", type=int)
    distributed_executor_backend: str | None = option(None, "what starts the worker processes: mp or ray", "B")
    gpu_memory_utilization: float | None = option(
        None, "share of a device's memory for weights and KV cache, 0 to 1", "F", type=float
    )

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            _set(self, **{name: _at_least(name, getattr(self, name), 1)})
        if self.distributed_executor_backend is not None:
            _one_of("distributed_executor_backend", self.distributed_executor_backend, EXECUTORS)
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise OptionError(f"gpu_memory_utilization must be above 0 and at most 1, not {share!r}")

    @property
    def num_devices(self) -> int:
        """Devices that one copy of the model takes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def chosen(self) -> list[str]:
        """Names of the options that differ from their defaults."""
        return [item.name for item in fields(self) if getattr(self, item.name) != item.default]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built from.

    warmup       what is left of it is done when a sequence first needs it, and that sequence waits
    per_request  requests may choose their method and number of draft tokens, as the server's do
    tuned        costs measured earlier: a TunedProfile that `paceline tune` wrote, or a core.cost_model.CostModel
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    engine: str = option("local", "which engine runs the model: {engines}", "E")
    engine_options: dict[str, Any] = option(
        {}, "an option of the engine; repeatable: {engine_options}", "NAME=VALUE", ("--engine-option",), action="append"
    )
    max_num_seqs: int = option(MAX_NUM_SEQS, "sequences generated at the same time; others wait", "N", type=int)
    warmup: str = option(
        "fast", "what is compiled and captured at load: none, fast (what one sequence meets) or full (batches too)", "W"
    )
    per_request: bool = False
    tuned: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.engine_options, Mapping):
            raise OptionError(f"engine_options must be a dictionary of option names, not {self.engine_options!r}")
        _set(self, max_num_seqs=_at_least("max_num_seqs", self.max_num_seqs, 1))
        _one_of("warmup", self.warmup, WARMUPS)

    @property
    def prefill_chunk(self) -> int:
        """Prompt tokens read between two steps. Serving keeps it short: every running sequence waits meanwhile."""
        return self.cache.prefill_chunk_tokens or (SERVE_PREFILL_CHUNK if self.per_request else PREFILL_CHUNK)

    @classmethod
    def create(cls, model: Any = DEFAULT_MODEL, **options: Any) -> EngineConfig:
        """From flat options: the fields of all five classes by their names. Raises OptionError for an unknown one."""
        options["model"] = model
        parts: dict[str, Any] = {}
        for name, kind in PARTS.items():
            parts[name] = kind(**{key: options.pop(key) for key in _names(kind) if key in options})
        own = {key: options.pop(key) for key in _names(cls) if key in options}
        if options:
            raise OptionError(_unknown("option", options, option_names()))
        return cls(**parts, **own)

    def with_options(self, **options: Any) -> EngineConfig:
        """The same with some options changed, named as in `create`."""
        changed = self
        for name, kind in PARTS.items():
            own = {key: options.pop(key) for key in _names(kind) if key in options}
            changed = replace(changed, **{name: replace(getattr(changed, name), **own)}) if own else changed
        return replace(changed, **options) if options else changed


PARTS: dict[str, type] = {
    "model": ModelConfig,
    "speculative": SpeculativeConfig,
    "cache": CacheConfig,
    "distributed": DistributedConfig,
}


def option_names() -> list[str]:
    """Every name that `EngineConfig.create` takes."""
    names = (name for kind in (*PARTS.values(), EngineConfig) for name in _names(kind))
    return list(dict.fromkeys(name for name in names if name == "model" or name not in PARTS))


# --- values -----------------------------------------------------------------------------------------------------------


def checked_num_draft_tokens(value: Any) -> int | str:
    """A number from 0 to MAX_DRAFT_TOKENS, or "auto"."""
    if isinstance(value, str) and value != AUTO:
        try:
            value = int(value)
        except ValueError:
            raise _wrong_draft_tokens(value) from None
    return AUTO if value == AUTO else checked_k(value)


def checked_k(value: Any) -> int:
    """A number of draft tokens, or an error the user understands."""
    number = as_int(value)
    if number is None or not 0 <= number <= MAX_DRAFT_TOKENS:
        raise _wrong_draft_tokens(value)
    return number


def _wrong_draft_tokens(value: Any) -> OptionError:
    return OptionError(f"num_draft_tokens (k) must be 0 to {MAX_DRAFT_TOKENS} or auto, not {value!r}")


def as_int(value: Any) -> int | None:
    """A whole number of any kind (numpy's and torch's too) as an int; None for anything else, booleans included."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return int(value.__index__())
    except TypeError:  # torch: only a tensor with one whole number has an index
        return None


def unknown_names(what: str, names: Iterable[str], known: Iterable[str]) -> OptionError:
    """The error for names that do not exist, with the nearest that do."""
    return OptionError(_unknown(what, names, known))


def _unknown(what: str, names: Iterable[str], known: Iterable[str]) -> str:
    wrong = sorted(names)
    near = difflib.get_close_matches(wrong[0], list(known), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown {what}: {', '.join(wrong)}{hint}"


def _names(kind: type) -> list[str]:
    return [item.name for item in fields(kind)]


def _set(config: Any, **values: Any) -> None:
    """Write normalised values into a frozen record, from its own __post_init__ only."""
    for name, value in values.items():
        object.__setattr__(config, name, value)


def _at_least(name: str, value: Any, least: int) -> int | None:
    if value is None:
        return None
    number = as_int(value)
    if number is None or number < least:
        raise OptionError(f"{name} must be {least} or more, not {value!r}")
    return number


def _path_or_model(model: Any) -> Any:
    """Paths as strings; names and loaded models as they are."""
    if isinstance(model, os.PathLike):
        return os.fspath(model)
    if isinstance(model, bool | int | float | bytes | list | dict) or model == "":
        raise OptionError(f"a model is a name, a directory, a .gguf file or a loaded model, not {model!r}")
    return model


def _lora_folders(folders: Any) -> dict[str, str]:
    """Adapters by name, as `base:name` is written in the API."""
    if not isinstance(folders, Mapping) or not all(isinstance(name, str) for name in folders):
        raise OptionError(f"lora must be a dictionary of directories by name, not {folders!r}")
    for name in folders:
        if not name or ":" in name:
            raise OptionError(f"a LoRA adapter needs a name without a colon, not {name!r}")
    return {name: os.fspath(folder) for name, folder in folders.items()}


def _device_name(device: Any) -> str | None:
    """A device's name: torch's devices and bare CUDA indices are understood."""
    index = as_int(device)
    if index is not None:
        return f"cuda:{index}"
    if device is None or isinstance(device, str):
        return device
    if type(device).__name__ == "device":
        return str(device)
    raise OptionError(f"device must be cpu, cuda, cuda:N or mps, not {device!r}")


def _dtype_name(dtype: Any) -> str | None:
    """A dtype's name: torch's dtypes are understood."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    if str(dtype).startswith("torch."):
        return str(dtype).removeprefix("torch.")
    raise OptionError(f"dtype must be a name such as fp32, bf16 or int8, not {dtype!r}")


def _weight_format(dtype: str | None, quantize: Any) -> dict[str, Any]:
    """`quantize` as the dtype that it stands for. Raises OptionError where both are given and differ."""
    if quantize is None:
        return {}
    if not isinstance(quantize, str) or dtype not in (None, AUTO, quantize):
        raise OptionError(f"quantize {quantize!r} and dtype {dtype!r} exclude each other; name the weight format alone")
    return {"dtype": quantize, "quantize": None}


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OptionError(f"{name} must be one of {', '.join(known)}; not {value!r}")
