"""What the registries can run, for the commands that plan and recommend. Nothing here imports torch."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from paceline.config import EngineConfig
from paceline.drafting import registry as drafters
from paceline.engines import registry as engines
from paceline.heads.shipped import shipped_heads
from paceline.models import registry as models
from paceline.plan.support import EngineSupport, Support
from paceline.quantization import registry as formats


def support() -> Support:
    """Everything that is installed now."""
    heads: dict[str, set[str]] = defaultdict(set)
    for name in shipped_heads():
        method, _, model = name.partition("-")
        heads[method].add(model)
    return Support(
        engines=tuple(_engine(name) for name in _own_first() if engines.spec(name).installed),
        methods=frozenset(drafters.names()),
        native_types=frozenset(models.model_types()),
        transformers_types=transformers_types(),
        weight_formats=formats.names(),
        shipped_heads={method: frozenset(names) for method, names in heads.items()},
    )


def _own_first() -> list[str]:
    """Engines in the order in which they are recommended: others where paceline's own cannot do it."""
    return sorted(engines.names(), key=lambda name: (name != EngineConfig().engine, name))


def _engine(name: str) -> EngineSupport:
    spec = engines.spec(name)
    packing = (spec.packs_gguf, spec.bounds_windows, spec.gguf_kinds, spec.gguf_types)
    return EngineSupport(name, spec.max_gpus, *packing)


@cache
def transformers_types() -> frozenset[str]:
    """Architectures that transformers has a causal model for, read from its source: importing it takes seconds."""
    package = find_spec("transformers")
    folder = Path(package.origin).parent if package and package.origin else Path()
    text = (folder / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    _, _, table = text.partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    return frozenset(re.findall(r'\("([\w-]+)", "', table.partition("\n)\n")[0]))
