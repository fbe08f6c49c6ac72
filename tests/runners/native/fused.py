"""Decode passes through the fused kernels without graphs: through Triton's interpreter where there is no GPU."""

from __future__ import annotations

from paceline.device.graphs import EagerPool
from paceline.runners.native import NativeRunner
from paceline.runners.native.decode_graphs import DecodeGraphs


def eager_graphs(runner: NativeRunner) -> DecodeGraphs:
    parts = (runner.model, runner.kv, runner._rope_caches, runner.options)
    return DecodeGraphs(*parts, EagerPool(), batch_invariant=runner.batch_invariant)
