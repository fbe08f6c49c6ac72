"""Run scenarios against a server, one after another."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.doctor.effort import Effort
from paceline.doctor.examination import Examination
from paceline.doctor.result import DoctorReport, ScenarioResult
from paceline.doctor.scenario import Scenario
from paceline.doctor.server import ServerOptions, TestedServer, connect

ALPHA = 0.001  # the probability of a false alarm in all scenarios together

OnResult = Callable[[ScenarioResult], None]


@dataclass(frozen=True, slots=True)
class DoctorPlan:
    """What to run. seed: of all prompts; a server must not have been asked with it before."""

    scenarios: list[Scenario]
    effort: Effort
    seed: int
    alpha: float = ALPHA

    @property
    def level(self) -> float:
        """Each scenario's share of alpha."""
        return self.alpha / max(1, len(self.scenarios))


async def examine(options: ServerOptions, plan: DoctorPlan, on_result: OnResult) -> DoctorReport:
    """Connect and run every scenario; each result is handed on as it comes. Raises EngineClosed or OptionError."""
    started = time.perf_counter()
    server = await connect(options)
    against = None if server.against is None else server.against.url
    report = DoctorReport(
        server.client.url, server.client.model, against, plan.effort.name, plan.seed, plan.alpha, server.near_tie
    )
    try:
        for scenario in plan.scenarios:
            report.scenarios.append(await _run(scenario, server, plan))
            on_result(report.scenarios[-1])
    finally:
        for client in (server.client, server.against):
            if client is not None:
                await client.close()
    report.seconds = time.perf_counter() - started
    return report


async def _run(scenario: Scenario, server: TestedServer, plan: DoctorPlan) -> ScenarioResult:
    started = time.perf_counter()
    # A scenario makes the same prompts whichever others run beside it.
    rng = random.Random(f"{plan.seed} {scenario.name}")
    exam = Examination(server, plan.effort, rng, plan.level)
    await scenario.run(exam)
    error = scenario.error_probability.format(level=plan.level)
    checks = await exam.results()
    return ScenarioResult(scenario.name, scenario.purpose, error, checks, time.perf_counter() - started)
