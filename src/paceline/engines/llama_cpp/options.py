"""What of paceline's configuration llama.cpp takes, in its own words. What it does not have is refused by name."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import Any

from paceline.config import AUTO, DRAFT_MODEL, NONE, EngineConfig, as_int
from paceline.engines.registry import EngineOption
from paceline.errors import OptionError

NGRAM = "ngram"
# paceline's name of a method -> llama.cpp's
DRAFT_TYPES = {DRAFT_MODEL: "DRAFT_SIMPLE", "eagle": "DRAFT_EAGLE3", "mtp": "DRAFT_MTP", "dflash": "DRAFT_DFLASH"}
NGRAM_KINDS = {"simple": "NGRAM_SIMPLE", "map-k": "NGRAM_MAP_K", "map-k4v": "NGRAM_MAP_K4V", "mod": "NGRAM_MOD"}
METHODS = (NONE, NGRAM, *DRAFT_TYPES)
NEED_NO_FILE = (NONE, NGRAM, "mtp")  # mtp: the target's own layers
KV_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
AUTO_NGRAM_TOKENS, NGRAM_SIZE = 8, 3
MOD_NGRAM_SIZE = 16  # of kind mod, which looks its n-grams up by a hash: short ones collide
DASHES = str.maketrans("._", "--")
LIBRARY_CONTEXT, SERVE_CONTEXT = 8192, 32768

OPTIONS = (
    EngineOption("threads", "CPU threads; default: all cores"),
    EngineOption("gpu_layers", "layers on the GPU; default: all, 0 with --device cpu"),
    EngineOption("context_size", "tokens of the KV cache, shared by all sequences; default: --kv-cache-tokens"),
    EngineOption("batch_size", "prompt tokens in a pass; default: --prefill-chunk-tokens"),
    EngineOption("kv_cache_type", f"of keys and values: {', '.join(KV_CACHE_TYPES)}; default: f16"),
    EngineOption("draft_gpu_layers", "layers of the draft model on the GPU; default: all"),
    EngineOption("draft_p_min", "stop drafting below this probability, 0 to 1; default: 0"),
    EngineOption("ngram_kind", f"of method ngram: {', '.join(NGRAM_KINDS)}; default: simple"),
    EngineOption("ngram_size", f"tokens that method ngram looks up; default: {NGRAM_SIZE}"),
    EngineOption("log", "true: show llama.cpp's own log"),
)


@dataclass(frozen=True, slots=True)
class LlamaCppOptions:
    """All that llama.cpp is started with, checked."""

    method: str
    num_draft_tokens: int | None  # None: llama.cpp's default
    threads: int
    gpu_layers: int
    context_size: int
    max_num_seqs: int
    batch_size: int | None
    kv_cache_type: str | None
    draft_gpu_layers: int
    draft_p_min: float
    ngram_kind: str
    ngram_size: int
    cache_prompt: bool
    log: bool

    @classmethod
    def of(cls, config: EngineConfig, max_seq_len: int) -> LlamaCppOptions:
        """Raises OptionError. max_seq_len: what the model was trained for."""
        check_supported(config)
        values = _Values(config.engine_options)
        on_cpu = config.model.device == "cpu"
        kind = values.one_of("ngram_kind", tuple(NGRAM_KINDS)) or "simple"
        return cls(
            method=method_of(config),
            num_draft_tokens=_num_draft_tokens(config),
            threads=values.whole("threads", 1) or _num_cores(),
            gpu_layers=values.whole_or("gpu_layers", 0 if on_cpu else -1, least=-1),
            context_size=values.whole("context_size", 1) or config.cache.kv_cache_tokens
            or _context_size(config, max_seq_len),
            max_num_seqs=config.max_num_seqs,
            batch_size=values.whole("batch_size", 32) or config.cache.prefill_chunk_tokens,
            kv_cache_type=values.one_of("kv_cache_type", KV_CACHE_TYPES),
            draft_gpu_layers=values.whole_or("draft_gpu_layers", 0 if on_cpu else -1, least=-1),
            draft_p_min=values.share("draft_p_min"),
            ngram_kind=kind,
            ngram_size=values.whole("ngram_size", 1) or (MOD_NGRAM_SIZE if kind == "mod" else NGRAM_SIZE),
            cache_prompt=config.cache.prefix_cache_tokens != 0,
            log=bool(config.engine_options.get("log", False)),
        )

    def params(self, model: str, api_key: str) -> dict[str, Any]:
        """Fields of llama.cpp's common_params."""
        cache_type = None if self.kv_cache_type is None else f"ggml_type.{self.kv_cache_type.upper()}"
        chosen: dict[str, Any] = {
            "model.path": model,
            "api_keys": [api_key],
            "cpuparams.n_threads": self.threads,
            "cpuparams_batch.n_threads": self.threads,
            "n_gpu_layers": self.gpu_layers,
            "n_ctx": self.context_size,
            "n_parallel": self.max_num_seqs,
            "kv_unified": True,  # a long sequence may use what short ones leave
            "cache_ram_mib": 0,  # of gigabytes that it would take for prompts it has seen
            "cache_idle_slots": False,
            "n_batch": self.batch_size,
            "cache_type_k": cache_type,
            "cache_type_v": cache_type,
            "ui": False,
            "endpoint_metrics": True,
            "verbosity": 3 if self.log else 1,
        }
        return {name: value for name, value in chosen.items() if value is not None}

    def speculative(self, draft_model: str | None) -> dict[str, Any]:
        """Types and fields of llama.cpp's common_params_speculative."""
        if self.method == NONE:
            return {"types": [], "params": {}}
        if self.method == NGRAM:
            return {"types": [NGRAM_KINDS[self.ngram_kind]], "params": self._ngram_params()}
        params: dict[str, Any] = {
            "draft.mparams.path": draft_model,
            "draft.n_max": self.num_draft_tokens,
            "draft.n_gpu_layers": self.draft_gpu_layers,
            "draft.p_min": self.draft_p_min,
            "draft.cpuparams.n_threads": self.threads,
            "draft.cpuparams_batch.n_threads": self.threads,
        }
        params = {name: value for name, value in params.items() if value is not None}
        return {"types": [DRAFT_TYPES[self.method]], "params": params}

    def _ngram_params(self) -> dict[str, Any]:
        number = self.num_draft_tokens or AUTO_NGRAM_TOKENS
        if self.ngram_kind == "mod":
            return {"ngram_mod.n_match": self.ngram_size, "ngram_mod.n_min": 1, "ngram_mod.n_max": number}
        name = f"ngram_{self.ngram_kind.replace('-', '_')}"
        return {f"{name}.size_n": self.ngram_size, f"{name}.size_m": number, f"{name}.min_hits": 1}

    def command(self, model: str, draft_model: str | None) -> str:
        """The line that starts llama-server the same way."""
        words = ["llama-server", "-m", model, "-c", self.context_size, "-np", self.max_num_seqs, "-t", self.threads]
        number = self.num_draft_tokens
        if self.method == NGRAM:
            words += ["--spec-type", f"ngram-{self.ngram_kind}", *self._ngram_flags()]
        elif self.method != NONE:
            words += ["--spec-type", DRAFT_TYPES[self.method].lower().replace("_", "-")]
            words += ["-md", draft_model] if draft_model else []
            words += ["--spec-draft-n-max", number] if number else []
        return shlex.join(str(word) for word in words)

    def _ngram_flags(self) -> list[Any]:
        """`ngram_simple.size_n` is --spec-ngram-simple-size-n."""
        flags = ((f"--spec-{name.translate(DASHES)}", value) for name, value in self._ngram_params().items())
        return [word for flag in flags for word in flag]


def method_of(config: EngineConfig) -> str:
    """The method, or none where no token is drafted."""
    return NONE if config.speculative.num_draft_tokens == 0 else config.speculative.method or NONE


def check_supported(config: EngineConfig) -> None:
    """Raise OptionError for what llama.cpp does not have, with what to use instead."""
    speculative, model = config.speculative, config.model
    if speculative.drafter is not None or speculative.method not in METHODS:
        name = "a drafter of one's own" if speculative.drafter is not None else f"method {speculative.method}"
        raise OptionError(f"llama.cpp does not have {name}; it has {', '.join(METHODS)}: or use the engine local")
    if speculative.draft_model is None and speculative.method not in NEED_NO_FILE:
        raise OptionError(f"method {speculative.method} needs a draft model: name its .gguf file with --draft-model")
    for name, value in (
        ("dtype", model.dtype), ("draft_dtype", speculative.draft_dtype), ("acceptance", speculative.acceptance),
        ("draft_options", speculative.draft_options or None), ("batch_invariant", model.batch_invariant or None),
    ):  # fmt: skip
        if value is not None:
            raise OptionError(f"llama.cpp does not take {name}: {REASONS[name]}")


REASONS = {
    "dtype": "the GGUF file says how its weights are stored; name another file",
    "draft_dtype": "the GGUF file of the draft model says how its weights are stored; name another file",
    "acceptance": "it draws each token from the target and accepts the draft tokens that are equal",
    "draft_options": "they are of paceline's own drafters; `paceline generate --help` lists the engine's options",
    "batch_invariant": "its kernels depend on the batch; use the engine local",
}


def _context_size(config: EngineConfig, max_seq_len: int) -> int:
    """Enough for one sequence of the length that the user asks for, and no more than all sequences can fill."""
    longest = config.model.max_model_len or max_seq_len
    usual = SERVE_CONTEXT if config.per_request else LIBRARY_CONTEXT
    return min(max(config.model.max_model_len or 0, usual), config.max_num_seqs * longest)


def _num_draft_tokens(config: EngineConfig) -> int | None:
    number = config.speculative.num_draft_tokens
    return None if number == AUTO else int(number)


def _num_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


class _Values:
    """Engine options with the checks of their types."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def whole(self, name: str, least: int) -> int | None:
        value = self._options.get(name)
        if value is None:
            return None
        number = as_int(value)
        if number is None or number < least:
            raise OptionError(f"engine option {name} must be {least} or more, not {value!r}")
        return number

    def whole_or(self, name: str, default: int, *, least: int) -> int:
        number = self.whole(name, least)
        return default if number is None else number

    def share(self, name: str) -> float:
        value = self._options.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise OptionError(f"engine option {name} must lie between 0 and 1, not {value!r}")
        return float(value)

    def one_of(self, name: str, known: tuple[str, ...]) -> str | None:
        value = self._options.get(name)
        if value is not None and value not in known:
            raise OptionError(f"engine option {name} must be one of {', '.join(known)}; not {value!r}")
        return value
