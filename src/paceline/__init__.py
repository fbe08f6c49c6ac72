"""paceline: speculative decoding as a product. The same text from your language model, faster, provably unchanged.

    from paceline import SpeculativeDecoder
    decoder = SpeculativeDecoder("default", method="ngram")
    print(decoder.generate("Explain attention.", max_new_tokens=64).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.core.sampling import SamplingParams
    from paceline.decoder import Result, SpeculativeDecoder
    from paceline.integrations.transformers import hf_generate

__version__ = "0.1.0"
__all__ = ["PacelineError", "Result", "SamplingParams", "SpeculativeDecoder", "hf_generate"]

# Loaded on first use: `paceline --help` and `paceline plan` must not wait for torch.
_HOMES = {
    "SpeculativeDecoder": "paceline.decoder",
    "Result": "paceline.decoder",
    "hf_generate": "paceline.integrations.transformers",
    "SamplingParams": "paceline.core.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
