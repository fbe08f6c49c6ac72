"""What the doctor reports: scenarios, their checks, and the faults with a request that shows each."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

EXIT_OK, EXIT_FAULT, EXIT_NOT_SHOWN = 0, 1, 3


class Status(Enum):
    """`not shown` is no soft pass: the server does not offer what a check needs, or the evidence is too thin."""

    OK = "ok"
    FAULT = "fault"
    NOT_SHOWN = "not shown"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong. curl: command lines to send one after another; expected and got: the two outputs."""

    message: str
    curl: tuple[str, ...] = ()
    expected: str = ""
    got: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"message": self.message, "expected": self.expected, "got": self.got, "curl": list(self.curl)}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check of a scenario. compared: how many answers or draws it rests on."""

    name: str
    status: Status
    detail: str
    compared: int = 0
    faults: tuple[Fault, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status.value,
            "detail": self.detail,
            "compared": self.compared,
            "faults": [fault.as_dict() for fault in self.faults],
        }


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """All checks of a scenario. error_probability: of a false alarm, in words."""

    name: str
    purpose: str
    error_probability: str
    checks: tuple[CheckResult, ...]
    seconds: float

    @property
    def status(self) -> Status:
        statuses = {check.status for check in self.checks}
        if Status.FAULT in statuses:
            return Status.FAULT
        return Status.OK if Status.OK in statuses else Status.NOT_SHOWN

    def as_dict(self) -> dict[str, Any]:
        return {
            "scenario": self.name,
            "purpose": self.purpose,
            "error_probability": self.error_probability,
            "status": self.status.value,
            "seconds": round(self.seconds, 2),
            "checks": [check.as_dict() for check in self.checks],
        }


@dataclass(slots=True)
class DoctorReport:
    """Everything one run found."""

    url: str
    model: str
    against: str | None
    effort: str
    seed: int
    alpha: float
    near_tie: float
    seconds: float = 0.0
    scenarios: list[ScenarioResult] = field(default_factory=list)

    @property
    def status(self) -> Status:
        statuses = {scenario.status for scenario in self.scenarios}
        if Status.FAULT in statuses:
            return Status.FAULT
        return Status.OK if Status.OK in statuses else Status.NOT_SHOWN

    @property
    def exit_status(self) -> int:
        return {Status.OK: EXIT_OK, Status.FAULT: EXIT_FAULT, Status.NOT_SHOWN: EXIT_NOT_SHOWN}[self.status]

    def as_dict(self) -> dict[str, Any]:
        settings = {
            "url": self.url,
            "model": self.model,
            "against": self.against,
            "effort": self.effort,
            "seed": self.seed,
            "false_alarm_probability": self.alpha,
            "near_tie_logprob": self.near_tie,
        }
        return {
            "status": self.status.value,
            **settings,
            "seconds": round(self.seconds, 2),
            "scenarios": [scenario.as_dict() for scenario in self.scenarios],
        }
