"""The report as one HTML page that needs nothing else: no script, no file beside it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from paceline.doctor.report import summary
from paceline.doctor.result import CheckResult, DoctorReport, Fault, ScenarioResult, Status

STYLE = """
:root { color-scheme: light dark; --ok: #18794e; --fault: #c62a2f; --not: #8a6d00; --line: #8884 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.05rem; margin: 1.6rem 0 .2rem }
p { margin: .2rem 0 } .quiet { opacity: .7; font-size: .9em }
table { border-collapse: collapse; width: 100%; margin: .4rem 0 }
td { border-top: 1px solid var(--line); padding: .35rem .5rem; vertical-align: top }
td:first-child { white-space: nowrap; font-weight: 600; width: 6rem }
.ok { color: var(--ok) } .fault { color: var(--fault) } .not { color: var(--not) }
pre { padding: .6rem; border: 1px solid var(--line); border-radius: 6px }
pre { overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere }
summary { cursor: pointer }
"""
CLASSES = {Status.OK: "ok", Status.FAULT: "fault", Status.NOT_SHOWN: "not"}


def html_page(report: DoctorReport) -> str:
    """The whole page. Everything that came from a server is escaped."""
    body = "\n".join(_body(report))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>paceline doctor</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n'


def _body(report: DoctorReport) -> Iterator[str]:
    against = f" against {escape(report.against)}" if report.against else ""
    yield f"<h1>paceline doctor: {escape(report.model)}</h1>"
    yield f"<p>{escape(report.url)}{against}, {escape(report.effort)}</p>"
    yield f'<p class="{CLASSES[report.status]}"><strong>{escape(summary(report))}</strong></p>'
    near_tie = f"Greedy answers may part where two tokens are within {report.near_tie:g} of log-probability."
    yield f'<p class="quiet">{near_tie}</p>'
    for scenario in report.scenarios:
        yield from _scenario(scenario)


def _scenario(scenario: ScenarioResult) -> Iterator[str]:
    name, purpose = escape(scenario.name), escape(scenario.purpose)
    yield f'<h2 id="{name}"><span class="{CLASSES[scenario.status]}">{scenario.status.value}</span> {name}</h2>'
    yield f"<p>{purpose} ({scenario.seconds:.1f} s)</p>"
    yield f'<p class="quiet">False alarms: {escape(scenario.error_probability)}</p>'
    yield "<table>"
    for check in scenario.checks:
        yield from _check(check)
    yield "</table>"


def _check(check: CheckResult) -> Iterator[str]:
    faults = "".join(_fault(fault) for fault in check.faults)
    status = f'<td class="{CLASSES[check.status]}">{check.status.value}</td>'
    yield f'<tr>{status}<td>{escape(check.name)}<p class="quiet">{escape(check.detail)}</p>{faults}</td></tr>'


def _fault(fault: Fault) -> str:
    commands = escape("\n".join(fault.curl))
    outputs = f"<p>expected</p><pre>{escape(fault.expected)}</pre><p>got</p><pre>{escape(fault.got)}</pre>"
    again = f"<p>to see it again</p><pre>{commands}</pre>" if commands else ""
    return f"<details open><summary>{escape(fault.message)}</summary>{outputs}{again}</details>"
