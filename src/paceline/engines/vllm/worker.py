"""What vLLM imports into its worker processes on a CPU, as its worker_extension_cls: importing registers our kernels."""

from __future__ import annotations

from vllm.triton_utils.dispatcher import register_kernels

from paceline.engines.vllm.kernels import expand

register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})


class WorkerExtension:
    """Nothing is added to the worker; naming the class is what imports this module."""
