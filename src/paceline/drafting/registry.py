"""Drafters by name (interim)."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from paceline.core.protocols import Drafter, Runner
from paceline.errors import OptionError
from paceline.hub.tokenizer import Tokenizer
from paceline.kv.prefix_cache import PrefixCache


class WeightsNeeded(Enum):
    NONE = "none"; MODEL = "model"; HEAD = "head"
@dataclass(frozen=True)
class DrafterContext:
    target: Runner
    tokenizer: Tokenizer
    draft_model: Any
    device: str
    head_dtype: torch.dtype
    options: dict[str, Any]
    prefix_cache: PrefixCache
    open_runner: Callable[[Any], Runner]
    open_tokenizer: Callable[[Any], Tokenizer]
@dataclass(frozen=True)
class DrafterSpec:
    name: str
    weights: WeightsNeeded
    build: Callable[[DrafterContext], Drafter]
    per_request: bool = False
def _s() -> dict[str, DrafterSpec]:
    from paceline.drafting.draft_model import DraftModel
    from paceline.drafting.eagle import Eagle
    from paceline.drafting.lookahead import Lookahead
    from paceline.drafting.ngram import Ngram
    from paceline.drafting.no_draft import NoDraft
    from paceline.drafting.prediction import Prediction
    from paceline.drafting.suffix import Suffix
    from paceline.heads.files import load_eagle
    from paceline.heads.shipped import shipped_head
    N = WeightsNeeded.NONE
    return {s.name: s for s in [
        DrafterSpec("none", N, lambda c: NoDraft(), True), DrafterSpec("ngram", N, lambda c: Ngram(**c.options), True),
        DrafterSpec("suffix", N, lambda c: Suffix(**c.options), True), DrafterSpec("lookahead", N, lambda c: Lookahead(**c.options), True),
        DrafterSpec("prediction", N, lambda c: Prediction(**c.options), True),
        DrafterSpec("draft_model", WeightsNeeded.MODEL, lambda c: DraftModel(c.open_runner(c.draft_model), c.target.info.vocab_size)),
        DrafterSpec("eagle", WeightsNeeded.HEAD, lambda c: Eagle(load_eagle(shipped_head("eagle", "SmolLM2-135M-Instruct-hf"), dtype=c.head_dtype, device=c.device), c.target, **c.options)),
    ]}
def names() -> list[str]: return list(_s())
def spec(name: str) -> DrafterSpec:
    if name not in _s(): raise OptionError(f"method must be one of {', '.join(names())}; not {name!r}")
    return _s()[name]
def build_drafter(name: str, context: DrafterContext) -> Drafter: return spec(name).build(context)
def per_request_names() -> list[str]: return [s.name for s in _s().values() if s.per_request]
