"""A scenario: one way in which engines are known to break. Each is one file in scenarios/ that ends in its SCENARIO."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache

from paceline.doctor import scenarios
from paceline.doctor.examination import Examination
from paceline.errors import OptionError

GREEDY_ERROR = (
    "a difference counts only where the two tokens are further apart than rounding puts them; more near-ties than the "
    "model has count with probability {level:.1g}"
)
SAMPLED_ERROR = "{level:.1g}, by the exact tests of draws and seeds"
EXACT_ERROR = "0: what is checked holds for every right server"


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a scenario checks, its probability of a false alarm in words, and the work.

    order: of the report; those that others build on come first
    """

    name: str
    purpose: str
    error_probability: str
    run: Callable[[Examination], Awaitable[None]]
    order: int = 100


@cache
def all_scenarios() -> dict[str, Scenario]:
    """Every scenario by its name, in the order of the report."""
    modules = [
        importlib.import_module(f"{scenarios.__name__}.{module.name}")
        for module in pkgutil.iter_modules(scenarios.__path__)
    ]
    found: list[Scenario] = [module.SCENARIO for module in modules]
    return {scenario.name: scenario for scenario in sorted(found, key=lambda item: (item.order, item.name))}


def chosen_scenarios(names: str | None) -> list[Scenario]:
    """Scenarios by their names, separated by commas; all without names. Raises OptionError for one that is not."""
    available = all_scenarios()
    if names is None:
        return list(available.values())
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in available]
    if unknown or not chosen:
        listed = ", ".join(available)
        raise OptionError(f"there is no scenario {', '.join(unknown) or names!r}; the scenarios are {listed}")
    return [available[name] for name in chosen]
