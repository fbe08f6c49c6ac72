"""Reports: lines for the terminal, JUnit for CI. JSON is DoctorReport.as_dict."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

from paceline.doctor.result import CheckResult, DoctorReport, ScenarioResult, Status

NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def terminal_lines(result: ScenarioResult) -> Iterator[str]:
    """A scenario with its checks; below a fault, how to see it again."""
    yield f"{result.status.value:10}{result.name}: {result.purpose} ({result.seconds:.1f} s)"
    for check in result.checks:
        yield f"    {check.status.value:10}{check.name}: {check.detail}"
        for fault in check.faults[:1]:
            yield from (f"        {line}" for line in fault.curl)


def summary(report: DoctorReport) -> str:
    """The last line: what was found, and how sure it is."""
    number = sum(len(scenario.checks) for scenario in report.scenarios)
    shown = [
        check for scenario in report.scenarios for check in scenario.checks if check.status is not Status.NOT_SHOWN
    ]
    took = f"{len(shown)} of {number} checks shown, {report.seconds:.0f} s, seed {report.seed}"
    if report.status is Status.FAULT:
        names = [scenario.name for scenario in report.scenarios if scenario.status is Status.FAULT]
        return f"fault: {', '.join(names)} ({took})"
    if report.status is Status.NOT_SHOWN:
        return f"not shown: the server offers nothing that a scenario needs ({took})"
    return f"ok: no fault found; false alarm probability {report.alpha:g} in all ({took})"


def junit(report: DoctorReport) -> str:
    """One test case a check; checks that were not shown are skipped."""
    cases = [check for scenario in report.scenarios for check in scenario.checks]
    counts = {
        "tests": len(cases),
        "failures": sum(check.status is Status.FAULT for check in cases),
        "skipped": sum(check.status is Status.NOT_SHOWN for check in cases),
    }
    attributes = {name: str(count) for name, count in counts.items()}
    root = ElementTree.Element("testsuites", attributes)
    for scenario in report.scenarios:
        suite = ElementTree.SubElement(root, "testsuite", _suite_attributes(scenario))
        for check in scenario.checks:
            _add_case(suite, scenario, check)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _suite_attributes(scenario: ScenarioResult) -> dict[str, str]:
    statuses = [check.status for check in scenario.checks]
    return {
        "name": f"doctor.{scenario.name}",
        "tests": str(len(statuses)),
        "failures": str(statuses.count(Status.FAULT)),
        "skipped": str(statuses.count(Status.NOT_SHOWN)),
        "time": f"{scenario.seconds:.3f}",
    }


def _add_case(suite: ElementTree.Element, scenario: ScenarioResult, check: CheckResult) -> None:
    attributes = {"classname": f"doctor.{scenario.name}", "name": check.name}
    case = ElementTree.SubElement(suite, "testcase", attributes)
    if check.status is Status.NOT_SHOWN:
        ElementTree.SubElement(case, "skipped", {"message": _xml(check.detail)})
    elif check.status is Status.FAULT:
        failure = ElementTree.SubElement(case, "failure", {"message": _xml(check.detail)})
        failure.text = _xml("\n\n".join(_fault_text(check)))


def _fault_text(check: CheckResult) -> Iterator[str]:
    for fault in check.faults:
        yield "\n".join([fault.message, *fault.curl, f"expected: {fault.expected}", f"got: {fault.got}"])


def _xml(text: str) -> str:
    """Answers of a broken server hold characters that XML does not."""
    return NOT_IN_XML.sub("\ufffd", text)
