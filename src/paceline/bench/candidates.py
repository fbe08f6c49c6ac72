"""What is measured: a loaded target, the methods that can draft for it, and one setting of them at a time.

Engines are assembled by build.py, which lies above this room, so the function that builds them is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.config import NONE, EngineConfig
from paceline.core.protocols import Drafter, Runner
from paceline.engines.local.engine import LocalEngine
from paceline.errors import OptionError, PacelineError
from paceline.hub.tokenizer import Tokenizer


class EngineBuilder(Protocol):
    """build.build_engine over a target that is loaded already."""

    def __call__(self, config: EngineConfig, target: Runner) -> LocalEngine: ...


@dataclass(frozen=True, slots=True)
class DecodeSetting:
    """One way to decode."""

    method: str
    num_draft_tokens: int | str = 0
    temperature: float = 0.0
    acceptance: str = "token"

    @property
    def is_plain(self) -> bool:
        return self.method == NONE

    @property
    def plain(self) -> DecodeSetting:
        """Plain decoding at the same temperature: what a speed-up is measured against."""
        return DecodeSetting(NONE, 0, self.temperature)

    def __str__(self) -> str:
        parts = ["plain"] if self.is_plain else [self.method, f"k={self.num_draft_tokens}"]
        parts += [f"T={self.temperature:g}"] if self.temperature else []
        parts += [self.acceptance] if self.acceptance != "token" else []
        return " ".join(parts)

    def applied_to(self, config: EngineConfig, max_num_seqs: int) -> EngineConfig:
        """The configuration of an engine that decodes this way. No prefix cache: each prompt counts in full."""
        return config.with_options(
            num_draft_tokens=self.num_draft_tokens,
            acceptance=self.acceptance,
            max_num_seqs=max_num_seqs,
            prefix_cache_tokens=0,
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method that can draft for the target. Its drafter is built once and serves every engine of the method.

    config  as the user gave it: an engine of this configuration builds a drafter of its own, unless it names one
    """

    config: EngineConfig
    drafter: Drafter

    def engine_config(self, setting: DecodeSetting, max_num_seqs: int = 1) -> EngineConfig:
        return setting.applied_to(self.config.with_options(drafter=self.drafter), max_num_seqs)


def no_hf_model(role: str) -> None:
    """Neither the target nor the draft model is a model of transformers."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The methods under test, over one target.

    by_method    plain decoding is among them
    build        makes an engine of a configuration over a target
    unavailable  methods that cannot be tried here, and why
    hf_model     the "target" or the "draft" as a model of transformers; None where it has no such form
    """

    target: Runner
    tokenizer: Tokenizer
    by_method: Mapping[str, Candidate]
    build: EngineBuilder
    unavailable: Mapping[str, str] = field(default_factory=dict)
    hf_model: Callable[[str], Any | None] = no_hf_model

    @property
    def drafting_methods(self) -> list[str]:
        return [method for method in self.by_method if method != NONE]

    @property
    def draft_runner(self) -> Runner | None:
        """The draft model, where one of the methods has one."""
        runners = (candidate.drafter.draft_runner for candidate in self.by_method.values())
        return next((runner for runner in runners if runner is not None), None)

    def candidate(self, method: str) -> Candidate:
        """Raises OptionError for a method that cannot be used here."""
        if method in self.unavailable:
            raise OptionError(f"method {method} cannot be used here: {self.unavailable[method]}")
        if method not in self.by_method:
            raise OptionError(f"there is no method {method!r} here; the methods are {', '.join(self.by_method)}")
        return self.by_method[method]

    def engine(self, setting: DecodeSetting, max_num_seqs: int = 1) -> LocalEngine:
        """A new engine of one setting; its draft-length policy has learned nothing yet."""
        return self.build(self.candidate(setting.method).engine_config(setting, max_num_seqs), self.target)


def open_candidates(
    target: Runner,
    tokenizer: Tokenizer,
    configs: Mapping[str, EngineConfig],
    build: EngineBuilder,
    hf_model: Callable[[str], Any | None] = no_hf_model,
) -> Candidates:
    """Build the drafter of every method; methods that cannot work with this target are listed with the reason."""
    by_method: dict[str, Candidate] = {}
    unavailable: dict[str, str] = {}
    for method, config in configs.items():
        try:
            engine = build(DecodeSetting(method, 1).applied_to(config, 1), target)
            by_method[method] = Candidate(config, engine.parts.drafter)
        except PacelineError as error:
            unavailable[method] = str(error)
    return Candidates(target, tokenizer, by_method, build, unavailable, hf_model)
