"""`vllm serve` with the same configuration: for those who run vLLM's own server. Nothing here imports vLLM."""

from __future__ import annotations

import json
import shlex
from typing import Any

from paceline.config import EngineConfig
from paceline.device.properties import chosen_device
from paceline.engines.vllm.arguments import vllm_arguments

# Arguments that only this process has a use for: its own counting, logging and detokenizing.
IN_PROCESS = frozenset(
    {
        "model", "disable_log_stats", "use_tqdm_on_load", "per_request_spec_decode_metrics", "max_logprobs",
        "structured_outputs_config", "worker_cls",
    }
)  # fmt: skip


def server_command(config: EngineConfig) -> str:
    """Raises OptionError, as opening the engine does."""
    device = chosen_device(config.model.device).partition(":")[0]
    arguments = vllm_arguments(config.with_options(device=None), device).arguments
    words = ["vllm", "serve", str(arguments["model"])]
    for name, value in arguments.items():
        if name not in IN_PROCESS and value is not False:
            words += _flag(name, value)
    return shlex.join(words)


def _flag(name: str, value: Any) -> list[str]:
    """`speculative_config` is --speculative-config with JSON; what is true is a flag alone."""
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    return [flag, value if isinstance(value, str) else json.dumps(value)]
