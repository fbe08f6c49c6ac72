"""Models of registered architectures, run natively: eager on any device, fused kernels and graphs on CUDA."""

from paceline.runners.native.loading import is_native, is_one_kernel, read_config, stored_dtype
from paceline.runners.native.runner import NativeRunner

__all__ = ["NativeRunner", "is_native", "is_one_kernel", "read_config", "stored_dtype"]
