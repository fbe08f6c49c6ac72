"""Many settings on many prompts, interleaved, so that a machine that gets slower gets slower for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.bench.baselines import Peer
from paceline.bench.candidates import PLAIN, Setting, Subject
from paceline.bench.measure import Length, Written, write
from paceline.config import AUTO, checked_k
from paceline.errors import OptionError

WARM_UP = Length(8)
MOST_SETTINGS = 200


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts of one domain that are answered together."""

    domain: str
    prompts: list[list[int]]


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What to measure. Plain decoding at every temperature is always among the settings, and comes first."""

    settings: list[Setting]
    tasks: list[Task]
    length: Length = field(default_factory=Length)
    repeats: int = 3
    peers: list[Peer] = field(default_factory=list)
    seed: int = 0

    @property
    def total(self) -> int:
        return self.repeats * len(self.tasks) * (len(self.settings) + len(self.peers) * len(self.temperatures))

    @property
    def temperatures(self) -> list[float]:
        return sorted({setting.temperature for setting in self.settings})


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting, one task, one repeat."""

    name: str
    setting: Setting
    repeat: int
    task: int
    written: Written
    peer: bool = False


def sweep(subject: Subject, plan: SweepPlan) -> Iterator[Measured]:
    """Warm up, then measure; every setting gets a turn on a task before the next task, and the order rotates."""
    budgets = {setting: subject.make_draft_length(setting.method, setting.num_draft_tokens) for setting in plan.settings}
    shortest = min((prompt for task in plan.tasks for prompt in task.prompts), key=len)
    for setting in plan.settings:
        write(subject, setting, [shortest], WARM_UP, budget=budgets[setting], seed=plan.seed)
    for repeat in range(plan.repeats):
        for number, task in enumerate(plan.tasks):
            seed = plan.seed + 1000 * number
            for setting in rotated(plan.settings, number + repeat):
                written = write(subject, setting, task.prompts, plan.length, budget=budgets[setting], seed=seed)
                yield Measured(str(setting), setting, repeat, number, written)
            yield from _peers(plan, task, repeat, number)


def _peers(plan: SweepPlan, task: Task, repeat: int, number: int) -> Iterator[Measured]:
    for peer in plan.peers:
        for temperature in plan.temperatures:
            written = peer.write(task.prompts, plan.length, temperature, plan.seed)
            setting = Setting(peer.name, 0, temperature)
            name = f"{peer.name} T={temperature:g}" if temperature else peer.name
            yield Measured(name, setting, repeat, number, written, peer=True)


def rotated(settings: list[Setting], by: int) -> list[Setting]:
    by %= len(settings)
    return settings[by:] + settings[:by]


def grid(
    methods: list[str], ks: list[int | str], temperatures: list[float], acceptance: str = "token"
) -> list[Setting]:
    """Every combination, each temperature's plain decoding first."""
    found: list[Setting] = []
    for temperature in temperatures:
        found.append(Setting(PLAIN, 0, temperature))
        for method in methods:
            if method != PLAIN:
                found += [Setting(method, k, temperature, acceptance) for k in ks]
    if len(found) > MOST_SETTINGS:
        raise OptionError(f"that would be {len(found)} settings; choose fewer methods, draft tokens or temperatures")
    return found


def parse_draft_tokens(text: str) -> list[int | str]:
    """`4`, `2,4,8`, `2..8`, `auto`, or several of these separated by commas."""
    found: list[int | str] = []
    for part in text.split(","):
        part = part.strip()
        if part == AUTO:
            found.append(AUTO)
            continue
        low, dots, high = part.partition("..")
        try:
            first, last = checked_k(int(low)), checked_k(int(high) if dots else int(low))
        except ValueError:
            raise OptionError(f"--draft-tokens takes 4, 2,4,8, 2..8 or auto, not {text!r}") from None
        if last < first:
            raise OptionError(f"--draft-tokens {part}: the range runs backwards")
        found += range(first, last + 1)
    return list(dict.fromkeys(found))


def parse_numbers(text: str, name: str) -> list[float]:
    """Numbers separated by commas, none below 0."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"{name} takes numbers separated by commas, not {text!r}") from None
    if any(not 0 <= number < float("inf") for number in found):
        raise OptionError(f"{name} takes numbers of 0 or more, not {text!r}")
    return list(dict.fromkeys(found))


def tasks_of(domains: list[str], prompts: list[list[int]], batch: int) -> list[Task]:
    """Prompts in tasks of at most `batch`, never of two domains."""
    if batch < 1:
        raise OptionError(f"--batch must be 1 or more, not {batch}")
    by_domain: dict[str, list[list[int]]] = {}
    for domain, ids in zip(domains, prompts):
        by_domain.setdefault(domain, []).append(ids)
    return [
        Task(domain, group[start : start + batch])
        for domain, group in by_domain.items()
        for start in range(0, len(group), batch)
    ]
