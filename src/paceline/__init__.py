"""paceline: speculative decoding for language models. Several tokens a step, and the output is provably unchanged.

    from paceline import SpeculativeDecoder

    with SpeculativeDecoder("default", method="ngram") as decoder:
        print(decoder.generate([{"role": "user", "content": "Explain attention."}], max_new_tokens=64).text)
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from paceline.core.sampling import SamplingParams
    from paceline.decoder import SpeculativeDecoder
    from paceline.integrations.transformers import hf_generate

__version__ = "0.2.0.dev0"
__all__ = ["SamplingParams", "SpeculativeDecoder", "hf_generate"]

# Imported on first use: `paceline --help` and `paceline plan` must not wait for torch.
_MODULES = {
    "SpeculativeDecoder": "paceline.decoder",
    "SamplingParams": "paceline.core.sampling",
    "hf_generate": "paceline.integrations.transformers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(_imported(_MODULES[name]), name)


def _imported(name: str) -> ModuleType:
    if name in sys.modules:
        return importlib.import_module(name)  # which waits where another thread is importing it
    from paceline.device.garbage import while_importing

    with while_importing():
        return importlib.import_module(name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
