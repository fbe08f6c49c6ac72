"""vLLM as an engine: models that one device does not hold, on several devices and machines.

arguments.py    the configuration -> vLLM's arguments
speculation.py  the method -> vLLM's speculative_config, or the error that says what to use instead
requests.py     a request -> vLLM's sampling parameters, or the error that says what cannot be done
steps.py        vLLM's outputs and metrics -> steps, SpecStats, EngineStats
engine.py       AsyncLLM in this process behind `Engine`
proposer.py     suffix lookup and the draft-length policy inside vLLM (method auto)
server_command.py  the line that starts vLLM's own server with the same configuration
worker.py       kernels.py inside vLLM on a CPU, where its own verify draft tokens wrongly
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.config import EngineConfig
from paceline.engines.registry import BuildLocal, EngineOption, EngineSpec

if TYPE_CHECKING:  # --help reads the SPEC and must not wait for torch
    from paceline.core.protocols import Engine

MAX_GPUS = 1024
METHODS = (
    "none", "ngram", "ngram_gpu", "suffix", "draft_model", "cross_vocab", "medusa", "eagle", "eagle3", "dflash", "mtp",
    "auto",
)  # fmt: skip


def _open(config: EngineConfig, build: BuildLocal) -> Engine:
    from paceline.engines.vllm.engine import open_vllm

    return open_vllm(config)


def _server_command(config: EngineConfig) -> str:
    from paceline.engines.vllm.server_command import server_command

    return server_command(config)


def _k_by_load(schedule: list[list[int]]) -> dict[str, Any]:
    return {"speculative_config": {"num_speculative_tokens_per_batch_size": schedule}}


SPEC = EngineSpec(
    "vllm",
    "vLLM: several devices and machines; method and k are fixed at the start",
    _open,
    max_gpus=MAX_GPUS,
    bounds_windows=True,
    options=(
        EngineOption("quantization", "how the weights are quantized, as vLLM names it"),
        EngineOption("enforce_eager", "true: nothing is compiled or captured; starts sooner, runs slower"),
        EngineOption("kv_cache_gib", "GiB of each device for the KV cache; on a CPU 4 unless told"),
        EngineOption("kv_cache_dtype", "dtype of the KV cache, such as fp8"),
        EngineOption("max_num_batched_tokens", "tokens of all sequences in one pass"),
        EngineOption("draft_tensor_parallel_size", "devices that share a layer of the draft model: 1 or the target's"),
        EngineOption("draft_sample_method", "greedy or probabilistic: how a draft model chooses its tokens"),
        EngineOption("speculative_config", "a JSON object of further keys of vLLM's speculative_config"),
        EngineOption("engine_args", "a JSON object of further arguments of vLLM's AsyncEngineArgs"),
    ),
    distributed=frozenset(
        {
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "distributed_executor_backend",
            "gpu_memory_utilization",
        }
    ),
    per_request=False,
    coupled_seeds=False,
    packages=("vllm",),
    methods=METHODS,
    server_command=_server_command,
    k_by_load=_k_by_load,
)
