"""Many settings on many prompts, interleaved, so that a machine that gets slower gets slower for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.bench.baselines import Baseline
from paceline.bench.candidates import Candidates, DecodeSetting
from paceline.bench.measure import BatchRun, MeasuredEngine, OutputLength
from paceline.config import AUTO, NONE, checked_k
from paceline.errors import OptionError

WARM_UP = OutputLength(8)
MAX_SETTINGS = 200


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts of one domain whose outputs are generated together."""

    domain: str
    prompts: list[list[int]]


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What to measure. Plain decoding at every temperature is always among the settings, and comes first."""

    settings: list[DecodeSetting]
    batches: list[PromptBatch]
    length: OutputLength = field(default_factory=OutputLength)
    repeats: int = 3
    baselines: list[Baseline] = field(default_factory=list)
    seed: int = 0

    @property
    def total(self) -> int:
        runs_per_batch = len(self.settings) + len(self.baselines) * len(self.temperatures)
        return self.repeats * len(self.batches) * runs_per_batch

    @property
    def temperatures(self) -> list[float]:
        return sorted({setting.temperature for setting in self.settings})

    @property
    def max_num_seqs(self) -> int:
        return max(len(batch.prompts) for batch in self.batches)

    @property
    def shortest_prompt(self) -> list[int]:
        return min((prompt for batch in self.batches for prompt in batch.prompts), key=len)


@dataclass(frozen=True, slots=True)
class SettingRun:
    """One setting, one batch, one repeat. batch: its index in the plan."""

    name: str
    setting: DecodeSetting
    repeat: int
    batch: int
    run: BatchRun
    is_baseline: bool = False


def sweep(candidates: Candidates, plan: SweepPlan) -> Iterator[SettingRun]:
    """Warm up, then measure; every setting has its turn on a batch before the next batch, and the order rotates."""
    engines = {setting: MeasuredEngine(candidates.engine(setting, plan.max_num_seqs)) for setting in plan.settings}
    for setting, engine in engines.items():
        engine.run([plan.shortest_prompt], WARM_UP, setting.temperature, plan.seed)
    for repeat in range(plan.repeats):
        for number, batch in enumerate(plan.batches):
            for setting in rotated(plan.settings, number + repeat):
                seed = plan.seed + 1000 * number
                run = engines[setting].run(batch.prompts, plan.length, setting.temperature, seed)
                yield SettingRun(str(setting), setting, repeat, number, run)
            yield from _baseline_runs(plan, batch, repeat, number)


def _baseline_runs(plan: SweepPlan, batch: PromptBatch, repeat: int, number: int) -> Iterator[SettingRun]:
    for baseline in plan.baselines:
        for temperature in plan.temperatures:
            run = baseline.run(batch.prompts, plan.length, temperature, plan.seed)
            setting = DecodeSetting(baseline.name, 0, temperature)
            name = f"{baseline.name} T={temperature:g}" if temperature else baseline.name
            yield SettingRun(name, setting, repeat, number, run, is_baseline=True)


def rotated(settings: list[DecodeSetting], by: int) -> list[DecodeSetting]:
    by %= len(settings)
    return settings[by:] + settings[:by]


def grid(
    methods: list[str], ks: list[int | str], temperatures: list[float], acceptance: str = "token"
) -> list[DecodeSetting]:
    """Every combination, each temperature's plain decoding first."""
    settings: list[DecodeSetting] = []
    for temperature in temperatures:
        settings.append(DecodeSetting(NONE, 0, temperature))
        for method in methods:
            if method != NONE:
                settings += [DecodeSetting(method, k, temperature, acceptance) for k in ks]
    if len(settings) > MAX_SETTINGS:
        raise OptionError(f"these are {len(settings)} settings; choose fewer methods, draft tokens or temperatures")
    return settings


def parse_num_draft_tokens(text: str) -> list[int | str]:
    """`4`, `2,4,8`, `2..8`, `auto`, or several of these separated by commas."""
    values: list[int | str] = []
    for part in text.split(","):
        values += [AUTO] if part.strip() == AUTO else _range(part.strip(), text)
    return list(dict.fromkeys(values))


def _range(part: str, text: str) -> range:
    low, dots, high = part.partition("..")
    try:
        first, last = checked_k(int(low)), checked_k(int(high) if dots else int(low))
    except ValueError:
        raise OptionError(f"--num-draft-tokens takes 4, 2,4,8, 2..8 or auto, not {text!r}") from None
    if last < first:
        raise OptionError(f"--num-draft-tokens {part}: the range runs backwards")
    return range(first, last + 1)


def parse_numbers(text: str, name: str) -> list[float]:
    """Numbers separated by commas, none below 0."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"{name} takes numbers separated by commas, not {text!r}") from None
    if any(not 0 <= number < float("inf") for number in numbers):
        raise OptionError(f"{name} takes numbers of 0 or more, not {text!r}")
    return list(dict.fromkeys(numbers))


def prompt_batches(domains: list[str], prompts: list[list[int]], max_num_seqs: int) -> list[PromptBatch]:
    """Prompts in batches of at most `max_num_seqs`, never of two domains."""
    if max_num_seqs < 1:
        raise OptionError(f"--max-num-seqs must be 1 or more, not {max_num_seqs}")
    by_domain: dict[str, list[list[int]]] = {}
    for domain, prompt in zip(domains, prompts):
        by_domain.setdefault(domain, []).append(prompt)
    return [
        PromptBatch(domain, group[start : start + max_num_seqs])
        for domain, group in by_domain.items()
        for start in range(0, len(group), max_num_seqs)
    ]
