"""Our own run of the Llama family: one definition, plain torch on any device, fused kernels and graphs on CUDA."""

from paceline.runners.native.config import Shape, is_native
from paceline.runners.native.runner import NativeRunner

__all__ = ["NativeRunner", "Shape", "is_native"]
