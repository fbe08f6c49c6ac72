"""What the user chose, in vLLM's words: EngineConfig -> arguments of AsyncEngineArgs. Nothing here imports vLLM."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import AUTO, EngineConfig, ModelConfig
from paceline.device.properties import chosen_device, on_host
from paceline.engines.vllm.speculation import speculative_config
from paceline.errors import OptionError
from paceline.hub import locate
from paceline.hub.convert import unpacked_folder
from paceline.runners.loading import DTYPES, dtype_named

GIB = 1 << 30
CPU_KV_CACHE_GIB = 4.0  # vLLM itself would take nearly all memory of the machine
MAX_LOGPROBS = 1024
PASSED_ON = ("quantization", "enforce_eager", "kv_cache_dtype", "max_num_batched_tokens")
OWN_PROCESS_ONLY = frozenset({"disable_log_stats", "use_tqdm_on_load"})  # arguments that say nothing to its own server
NEWER = frozenset({"per_request_spec_decode_metrics"})  # earlier vLLMs run without: counts by sequence are then means
DRAFT_OPTIONS = ("draft_tensor_parallel_size", "draft_sample_method")
WORKER = "paceline.engines.vllm.worker.WorkerExtension"  # on a CPU: kernels of ours where vLLM's are wrong
ADDITIONAL = "paceline"  # our key in vLLM's additional_config, which reaches the worker processes


@dataclass(frozen=True, slots=True)
class VllmArguments:
    """Arguments of AsyncEngineArgs by name, and what is known only beside them.

    folder           the model's directory
    kv_cache_tokens  tokens that the KV cache holds; None: by its bytes
    """

    arguments: dict[str, Any]
    folder: Path
    kv_cache_tokens: int | None


def vllm_arguments(config: EngineConfig, device: str) -> VllmArguments:
    """device: what this build of vLLM runs on. Raises OptionError, ModelNotFound or FetchError."""
    _check_model(config.model, device)
    folder = unpacked_folder(locate(config.model.model).folder)
    speculative = speculative_config(config.speculative, _draft_options(config), config.model.model)
    arguments: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": _tokenizer_folder(config.model),
        "dtype": _dtype(config, device),
        "trust_remote_code": config.model.trust_remote_code or None,
        "max_model_len": config.model.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_logprobs": MAX_LOGPROBS,
        "structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True},
        "speculative_config": speculative,
        "per_request_spec_decode_metrics": "none" if speculative is None else "detailed",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **_distributed(config),
        **_cache(config, device),
        **{name: config.engine_options[name] for name in PASSED_ON if name in config.engine_options},
        **_additional(config),
        "worker_extension_cls": WORKER if on_host(device) and speculative is not None else None,
    }
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return VllmArguments(
        {**arguments, **_object(config, "engine_args")}, folder, config.cache.kv_cache_tokens
    )


def server_command(config: EngineConfig) -> str:
    """`vllm serve` with the same arguments, on the device that is here."""
    arguments = dict(vllm_arguments(config, chosen_device(config.model.device)).arguments)
    words = ["vllm", "serve", arguments.pop("model")]
    for name, value in arguments.items():
        if name not in OWN_PROCESS_ONLY:
            words += _flag(name, value)
    return shlex.join(words)


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}"] if value else [f"--no-{flag}"]
    return [f"--{flag}", json.dumps(value) if isinstance(value, Mapping) else str(value)]


def thread_binding(config: EngineConfig, device: str, cores: set[int]) -> str | None:
    """VLLM_CPU_OMP_THREADS_BIND for several workers on one CPU, which vLLM divides by memory nodes only; None: its own.

    Each worker gets as many of the cores; where they do not suffice, none is bound.
    """
    chosen = config.distributed
    if not on_host(device) or chosen.num_devices * chosen.data_parallel_size == 1:
        return None
    share, ordered = len(cores) // chosen.num_devices, sorted(cores)
    if not share or chosen.data_parallel_size > 1:
        return "nobind"
    groups = [ordered[rank * share : (rank + 1) * share] for rank in range(chosen.num_devices)]
    return "|".join(",".join(map(str, group)) for group in groups)


def _check_model(model: ModelConfig, device: str) -> None:
    if not isinstance(model.model, str):
        raise OptionError("the engine vllm takes a model by name or directory, not a loaded one")
    if model.runner != AUTO:
        raise OptionError(f"the engine vllm runs models itself: leave out --runner {model.runner}, or use engine local")
    if model.batch_invariant:
        raise OptionError("the engine vllm takes batch invariance from its environment: set VLLM_BATCH_INVARIANT=1")
    if model.device in (None, AUTO, device):
        return
    if str(model.device).startswith(f"{device}:"):
        raise OptionError(f"the engine vllm takes devices from CUDA_VISIBLE_DEVICES; leave out --device {model.device}")
    raise OptionError(f"the vLLM that is installed runs on {device}, not on {model.device}")


def _tokenizer_folder(model: ModelConfig) -> str | None:
    if model.tokenizer is None:
        return None
    if not isinstance(model.tokenizer, str | Path):
        raise OptionError("the engine vllm takes a tokenizer by name or directory, not a loaded one")
    return str(locate(str(model.tokenizer)).folder)


def _dtype(config: EngineConfig, device: str) -> str:
    if config.speculative.draft_dtype is not None:
        raise OptionError("the engine vllm runs a draft model in the target's dtype; leave out --draft-dtype")
    dtype = dtype_named(config.model.dtype, device)
    if dtype not in DTYPES:
        raise OptionError(
            f"the engine vllm does not quantize to {dtype}; name a quantized model, or use "
            f"--engine-option quantization=... as vLLM names it"
        )
    return dtype


def _distributed(config: EngineConfig) -> dict[str, Any]:
    chosen = config.distributed
    return {name: getattr(chosen, name) for name in chosen.chosen}


def _cache(config: EngineConfig, device: str) -> dict[str, Any]:
    cache = config.cache
    keys: dict[str, Any] = {"max_num_batched_tokens": cache.prefill_chunk_tokens}
    if cache.prefix_cache_tokens == 0:
        keys["enable_prefix_caching"] = False
    elif cache.prefix_cache_tokens is not None:
        raise OptionError("the engine vllm keeps prefixes where its KV cache is free; prefix_cache_tokens must be 0")
    gib = config.engine_options.get("kv_cache_gib")
    if gib is None and on_host(device) and config.distributed.gpu_memory_utilization is None:
        gib = CPU_KV_CACHE_GIB
    if gib is not None:
        keys["kv_cache_memory_bytes"] = int(_positive("kv_cache_gib", gib) * GIB)
    return keys


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise OptionError(f"{name} must be a number above 0, not {value!r}")
    return float(value)


def _draft_options(config: EngineConfig) -> dict[str, Any]:
    chosen = {name: config.engine_options[name] for name in DRAFT_OPTIONS if name in config.engine_options}
    return {**chosen, **_object(config, "speculative_config")}


def _object(config: EngineConfig, name: str) -> Mapping[str, Any]:
    value = config.engine_options.get(name, {})
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} must be a JSON object, not {value!r}")
    return value


def _additional(config: EngineConfig) -> dict[str, Any]:
    """What the proposer of method auto needs in its worker process."""
    speculative = config.speculative
    if speculative.method != AUTO:
        return {}
    adaptive = speculative.num_draft_tokens == AUTO
    return {"additional_config": {ADDITIONAL: {"adaptive": adaptive, "options": dict(speculative.draft_options)}}}
