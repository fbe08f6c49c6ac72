"""The report as one HTML page that needs nothing else: no script, no file beside it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from paceline.doctor.report import summary
from paceline.doctor.result import CheckResult, DoctorReport, Fault, ScenarioResult, Status

STYLE = """
:root { color-scheme: light dark; --background: #fff; --text: #1c1f1e; --quiet: #5a625f; --line: #d9dedb;
  --code: #f5f7f6; --ok: #18794e; --fault: #b8232a; --not: #7a5c00 }
@media (prefers-color-scheme: dark) { :root { --background: #131615; --text: #e7ebe9; --quiet: #a0aaa6; --line: #343b38;
  --code: #1b1f1e; --ok: #5cc8ac; --fault: #ff8f86; --not: #e0bd4d } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  background: var(--background); color: var(--text); overflow-wrap: anywhere }
h1 { font-size: 1.4rem } h2 { font-size: 1.05rem; margin: 1.8rem 0 .2rem }
p { margin: .2rem 0 } a { color: inherit } .quiet { color: var(--quiet); font-size: .9em }
ul { list-style: none; margin: .4rem 0; padding: 0 }
nav ul { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: .2rem 1rem; margin: 1rem 0 }
.status { display: inline-block; min-width: 6rem; font-weight: 600 } nav .status { min-width: 5rem }
.check { border-top: 1px solid var(--line); padding: .4rem 0 }
.check { display: grid; grid-template-columns: 6.3rem minmax(0, 1fr) }
.ok { color: var(--ok) } .fault { color: var(--fault) } .not { color: var(--not) }
pre { margin: .2rem 0 .6rem; padding: .6rem; border: 1px solid var(--line); border-radius: 6px; background: var(--code);
  font: .85rem/1.5 ui-monospace, monospace; white-space: pre-wrap }
summary { cursor: pointer; padding: .2rem 0 } :focus-visible { outline: 3px solid var(--ok); outline-offset: 2px }
@media (max-width: 40rem) { body { margin-top: 1rem } .check { display: block } }
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
    yield f'<nav aria-label="Scenarios"><ul>{"".join(_link(scenario) for scenario in report.scenarios)}</ul></nav>'
    for scenario in report.scenarios:
        yield from _scenario(scenario)


def _status(status: Status) -> str:
    return f'<span class="status {CLASSES[status]}">{status.value}</span>'


def _link(scenario: ScenarioResult) -> str:
    name = escape(scenario.name)
    return f'<li>{_status(scenario.status)} <a href="#{name}">{name}</a></li>'


def _scenario(scenario: ScenarioResult) -> Iterator[str]:
    name, purpose = escape(scenario.name), escape(scenario.purpose)
    yield f'<h2 id="{name}">{_status(scenario.status)} {name}</h2>'
    yield f"<p>{purpose} ({scenario.seconds:.1f} s)</p>"
    yield f'<p class="quiet">False alarms: {escape(scenario.error_probability)}</p>'
    yield f"<ul>{''.join(_check(check) for check in scenario.checks)}</ul>"


def _check(check: CheckResult) -> str:
    """The first fault of a check is unfolded: the others show the same with other prompts."""
    faults = "".join(_fault(fault, is_open=number == 0) for number, fault in enumerate(check.faults))
    text = f'{escape(check.name)}<p class="quiet">{escape(check.detail)}</p>{faults}'
    return f'<li class="check">{_status(check.status)}<div>{text}</div></li>'


def _fault(fault: Fault, *, is_open: bool) -> str:
    parts = {"expected": fault.expected, "got": fault.got, "to see it again": "\n".join(fault.curl)}
    shown = "".join(f"<p>{title}</p><pre>{escape(text)}</pre>" for title, text in parts.items() if text)
    return f"<details{' open' if is_open else ''}><summary>{escape(fault.message)}</summary>{shown}</details>"
