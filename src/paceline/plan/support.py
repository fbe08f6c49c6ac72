"""What can be run here, as plain data: recommendations are made of nothing else.

The registries lie above this room, so the command line reads them and fills in a `Support`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.plan.model_sizes import ModelSizes
from paceline.plan.precision import Precision

FLOAT_DTYPES = ("fp32", "bf16", "fp16")
DRAFT_MODEL = "draft_model"
NATIVE, TRANSFORMERS = "native", "transformers"
# A vocabulary that only adds tokens at the end of another: every id that both have means the same.
EXTENDS = {"codellama": "llama-2"}


@dataclass(frozen=True, slots=True)
class EngineSupport:
    """One engine: the GPUs it can divide a model over, whether GGUF weights stay packed, and windows are bounded."""

    name: str
    max_gpus: int = 1
    packs_gguf: bool = False
    bounds_windows: bool = False
    gguf_kinds: frozenset[str] = frozenset()
    gguf_types: frozenset[str] = frozenset()

    def packs(self, precision: Precision, sizes: ModelSizes, *, on_cpu: bool) -> bool:
        """Whether weights of a GGUF type stay as they are. True of other precisions: they have no such question."""
        if self.packs_gguf or not precision.gguf:
            return True
        return not on_cpu and sizes.architecture in self.gguf_types and precision.kinds <= self.gguf_kinds


@dataclass(frozen=True, slots=True)
class Support:
    """Engines, methods, architectures and weight formats that are installed.

    native_types        architectures that paceline runs itself; only they take weight formats
    transformers_types  architectures that transformers runs
    shipped_heads       heads that come with paceline, as METHOD-MODEL
    """

    engines: tuple[EngineSupport, ...]
    methods: frozenset[str]
    native_types: frozenset[str]
    transformers_types: frozenset[str]
    weight_formats: tuple[str, ...]
    shipped_heads: Mapping[str, frozenset[str]]

    @property
    def max_gpus(self) -> int:
        return max(engine.max_gpus for engine in self.engines)

    @property
    def packs_gguf(self) -> bool:
        return any(engine.packs_gguf for engine in self.engines)

    def packs(self, precision: Precision, sizes: ModelSizes, *, on_cpu: bool) -> bool:
        """Whether an engine keeps weights of this precision as they are."""
        return any(engine.packs(precision, sizes, on_cpu=on_cpu) for engine in self.engines)

    def engine(
        self, *, num_gpus: int = 1, packs: Callable[[EngineSupport], bool] = lambda engine: True
    ) -> EngineSupport | None:
        """The first engine that can do it; None: there is none. packs: whether it keeps the weights as they are."""
        return next((engine for engine in self.engines if engine.max_gpus >= num_gpus and packs(engine)), None)

    def runner_of(self, sizes: ModelSizes) -> str | None:
        """Which code runs a model; None: none does."""
        if sizes.architecture in self.native_types:
            return NATIVE
        return TRANSFORMERS if sizes.architecture in self.transformers_types else None

    def dtypes(self, sizes: ModelSizes) -> tuple[str, ...]:
        """What --dtype takes for a model."""
        return (*FLOAT_DTYPES, *(self.weight_formats if self.runner_of(sizes) == NATIVE else ()))

    def has_head(self, method: str, model: str) -> bool:
        """Whether a head of this method comes with paceline for a model."""
        return model in self.shipped_heads.get(method, frozenset())

    def pair_refusal(self, target: ModelSizes, draft: ModelSizes | None, method: str) -> str | None:
        """Why a pair cannot run; None: it can."""
        if method not in self.methods:
            return f"there is no method {method!r}; there are {', '.join(sorted(self.methods))}"
        if draft is not None and method == DRAFT_MODEL and not same_vocabulary(target, draft):
            return (
                f"{draft.name} cannot draft for {target.name}: their vocabularies differ; --method cross_vocab "
                "translates its draft tokens"
            )
        return next((why for sizes in (target, draft) if sizes and (why := self.model_refusal(sizes))), None)

    def model_refusal(self, sizes: ModelSizes) -> str | None:
        """Why a model cannot run; None: it can."""
        if self.runner_of(sizes) is not None:
            return None
        return f"{sizes.name} has architecture {sizes.architecture}, which neither paceline nor transformers runs"


def same_vocabulary(target: ModelSizes, draft: ModelSizes) -> bool:
    """Whether no id means two tokens, as far as the tokenizers are known; `paceline check` compares them."""
    names = {target.tokenizer, draft.tokenizer}
    if None in names or len(names) == 1:
        return True
    return len({EXTENDS.get(name, name) for name in names if name is not None}) == 1
