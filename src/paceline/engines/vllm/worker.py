"""What vLLM imports into its worker processes on a CPU as worker_extension_cls: importing it mends vLLM.

All are faults of its CPU build (0.32). While draft tokens are verified, temperature, top_k and top_p do not reach the
verification (kernels.py), and top_k ends the process in a step in which no sequence has draft tokens. Of a DFlash head
with several layers, the context keys of all are normed by the weights of the first.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.sample.ops import topk_topp_sampler

from paceline.engines.vllm.kernels import expand, for_rows, rms_norm_by_layer

register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})
topk_topp_sampler.apply_top_k_only = for_rows(topk_topp_sampler.apply_top_k_only)


def _normed_context_keys(model: Any, keys: Tensor) -> Tensor:
    return rms_norm_by_layer(keys, model._k_norm_weights, model._rms_norm_eps)


DFlashQwen3Model._normalize_context_k = _normed_context_keys


class WorkerExtension:
    """Nothing is added to the worker; naming the class is what imports this module."""
