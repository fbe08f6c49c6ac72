"""An engine as a whole under the stopwatch: whatever runs behind `Engine`, with speculation and without.

Nothing is known of such an engine but what its outputs say. Most are configured when they start, so that each setting
needs an engine of its own; they are opened one after the other, since two of them may not fit into memory. An engine
that takes the method with the request serves all settings and is opened once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.bench.candidates import DecodeSetting
from paceline.bench.measure import BatchRun, OutputLength
from paceline.bench.sweep import WARM_UP, SettingRun, SweepPlan, rotated
from paceline.config import AUTO, NONE, EngineConfig
from paceline.core.protocols import Tokenizer
from paceline.core.stats import SpecStats
from paceline.core.types import ModelInfo
from paceline.errors import PacelineError

TOKEN_RULE = "token"


class OpenDecoder(Protocol):
    """An open engine: SpeculativeDecoder, which lies above this room."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def methods(self) -> tuple[str, ...]: ...
    def generate(self, prompt: Any, **settings: Any) -> Any: ...
    def close(self) -> None: ...


DecoderOpener = Callable[[EngineConfig], OpenDecoder]


@dataclass(slots=True, eq=False)
class EnginePool:
    """At most one open engine, that of the setting which had the last turn.

    configs       by method; plain decoding is among them
    max_num_seqs  sequences that an engine generates together
    unavailable   settings that could not be opened or run, and why
    """

    configs: Mapping[str, EngineConfig]
    open: DecoderOpener
    max_num_seqs: int = 1
    unavailable: dict[str, str] = field(default_factory=dict)
    _decoder: OpenDecoder | None = None
    _config: EngineConfig | None = None

    @property
    def drafting_methods(self) -> list[str]:
        return [method for method in self.configs if method != NONE]

    @property
    def by_request(self) -> bool:
        """Whether the open engine takes the method of each request."""
        methods = () if self._decoder is None else self._decoder.methods
        return len(methods) > 1 and NONE in methods

    @property
    def fixed_method(self) -> str | None:
        """The one method of an open engine that cannot be told to decode plainly: a server that is already running."""
        methods = (NONE,) if self._decoder is None else self._decoder.methods
        return None if NONE in methods or methods[0] in self.configs else methods[0]

    def decoder(self, setting: DecodeSetting) -> OpenDecoder:
        """The engine of a setting; another one that is open is closed first."""
        config = self.config_of(setting)
        if self._decoder is None or not (config == self._config or self._serves(setting)):
            self.close()
            self._decoder, self._config = self.open(config), config
        return self._decoder

    def _serves(self, setting: DecodeSetting) -> bool:
        return self.by_request and self._decoder is not None and setting.method in self._decoder.methods

    def config_of(self, setting: DecodeSetting) -> EngineConfig:
        """No prefix cache: each prompt counts in full. An engine verifies by its own rule unless another is named.

        A server that drafts as it was started has one configuration: that of plain decoding, which asks for nothing.
        """
        return self.configs.get(setting.method, self.configs[NONE]).with_options(
            num_draft_tokens=AUTO if setting.is_plain else setting.num_draft_tokens,
            acceptance=None if setting.acceptance == TOKEN_RULE else setting.acceptance,
            max_num_seqs=self.max_num_seqs,
            prefix_cache_tokens=0,
        )

    def generate(self, setting: DecodeSetting, prompts: list[list[int]], **settings: Any) -> list[Any]:
        """Results of these prompts, generated together by the engine of a setting."""
        decoder = self.decoder(setting)
        if self.by_request:
            settings["method"] = setting.method
            if isinstance(setting.num_draft_tokens, int) and not setting.is_plain:
                settings["num_draft_tokens"] = setting.num_draft_tokens
        results: list[Any] = decoder.generate(prompts, temperature=setting.temperature, **settings)
        return results

    def run(self, setting: DecodeSetting, prompts: list[list[int]], length: OutputLength, seed: int = 0) -> BatchRun:
        """Generate the outputs of these prompts together; prompt i has seed + i. Opening is not timed."""
        self.decoder(setting)
        limits = {"max_new_tokens": length.max_new_tokens, "ignore_eos": length.ignore_eos, "seed": seed}
        started = time.perf_counter()
        results = self.generate(setting, prompts, **limits)
        seconds = time.perf_counter() - started
        stats = SpecStats()
        for result in results:
            stats.add(result.stats)
        stats.seconds = seconds
        return BatchRun([result.token_ids for result in results], stats, [], [])

    def close(self) -> None:
        """Close the engine that is open, if any."""
        decoder, self._decoder, self._config = self._decoder, None, None
        if decoder is not None:
            decoder.close()


def possible_settings(pool: EnginePool, settings: list[DecodeSetting]) -> list[DecodeSetting]:
    """These, or the one way that a server decodes which is already running."""
    if pool.fixed_method is None:
        return settings
    temperatures = dict.fromkeys(setting.temperature for setting in settings)
    return [DecodeSetting(pool.fixed_method, AUTO, temperature) for temperature in temperatures]


def engine_sweep(pool: EnginePool, plan: SweepPlan) -> Iterator[SettingRun]:
    """Every setting on every batch. In turns where one engine serves all settings, else one setting after the other."""
    first = plan.settings[0]
    pool.run(first, [plan.shortest_prompt], WARM_UP, plan.seed)
    yield from _in_turns(pool, plan) if pool.by_request else _one_after_the_other(pool, plan)


def _in_turns(pool: EnginePool, plan: SweepPlan) -> Iterator[SettingRun]:
    settings = [setting for setting in plan.settings if _warmed_up(pool, setting, plan)]
    for repeat in range(plan.repeats):
        for number in range(len(plan.batches)):
            for setting in rotated(settings, number + repeat):
                yield measured_run(pool, setting, plan, repeat, number)


def _one_after_the_other(pool: EnginePool, plan: SweepPlan) -> Iterator[SettingRun]:
    for setting in plan.settings:
        if not _warmed_up(pool, setting, plan):
            continue
        for repeat in range(plan.repeats):
            for number in range(len(plan.batches)):
                yield measured_run(pool, setting, plan, repeat, number)


def _warmed_up(pool: EnginePool, setting: DecodeSetting, plan: SweepPlan) -> bool:
    """False: the engine does not decode this way, and `unavailable` says why. Plain decoding must work."""
    try:
        pool.run(setting, [plan.shortest_prompt], WARM_UP, plan.seed)
    except PacelineError as error:
        if setting.is_plain or setting.method == pool.fixed_method:
            raise
        pool.unavailable[str(setting)] = str(error)
        return False
    return True


def measured_run(pool: EnginePool, setting: DecodeSetting, plan: SweepPlan, repeat: int, number: int) -> SettingRun:
    run = pool.run(setting, plan.batches[number].prompts, plan.length, plan.seed + 1000 * number)
    return SettingRun(str(setting), setting, repeat, number, run)
