"""What vLLM imports into its worker processes on a CPU as worker_extension_cls: importing it mends vLLM's sampler.

Both are faults of its CPU build (0.32) while draft tokens are verified. Temperature, top_k and top_p do not reach the
verification (kernels.py), and top_k ends the process in a step in which no sequence has draft tokens.
"""

from __future__ import annotations

from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.sample.ops import topk_topp_sampler

from paceline.engines.vllm.kernels import expand, for_rows

register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})
topk_topp_sampler.apply_top_k_only = for_rows(topk_topp_sampler.apply_top_k_only)


class WorkerExtension:
    """Nothing is added to the worker; naming the class is what imports this module."""
