"""The HTML report: what it shows of a fault, and that a browser shows it well at two widths in both colour schemes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.doctor.html import html_page
from paceline.doctor.result import CheckResult, DoctorReport, Fault, ScenarioResult, Status
from tests.support.browser import SIZES, assert_fits, assert_legible, launched

CURL = 'curl -sS http://localhost:8000/v1/completions -d \'{"prompt": "' + "x" * 300 + "\"}'"


def report_with(*faults: Fault) -> DoctorReport:
    """A report with all three statuses."""
    checks = (
        CheckResult("texts are equal", Status.FAULT, "2 of 6 differ", 6, faults),
        CheckResult("streams are equal", Status.OK, "6 compared", 6),
        CheckResult("the same with reasoning", Status.NOT_SHOWN, "no answer had reasoning"),
    )
    report = DoctorReport("http://localhost:8000/v1", "some/model", None, "quick", 1, 0.001, 0.25, 12.0)
    report.scenarios = [
        ScenarioResult("streaming", "a stream adds up", "1e-4", checks, 3.0),
        ScenarioResult("seeds", "a seed decides", "1e-4", checks[1:2], 2.0),
    ]
    return report


def test_only_the_first_fault_of_a_check_is_unfolded() -> None:
    text = html_page(report_with(Fault("first", (CURL,), "a", "b"), Fault("second", (CURL,)), Fault("third")))
    assert text.count("<details open>") == 1 and text.count("<details>") == 2
    assert text.index("<details open><summary>first") < text.index("<details><summary>second")


def test_parts_that_a_fault_does_not_have_are_left_out() -> None:
    bare = html_page(report_with(Fault("sums to 1.3", (CURL,))))
    assert "expected" not in bare and "<p>got</p>" not in bare and "to see it again" in bare
    assert "<pre></pre>" not in bare
    whole = html_page(report_with(Fault("differs", (CURL,), "<b>right", "wrong")))
    assert "<p>expected</p><pre>&lt;b&gt;right</pre><p>got</p><pre>wrong</pre>" in whole


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    with launched(chromium) as process:
        yield process


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_a_browser_shows_it_without_sideways_scrolling(browser: Any, tmp_path: Path, size: str) -> None:
    path = tmp_path / "report.html"
    path.write_text(html_page(report_with(Fault("f" * 200, (CURL,), "e" * 900, "g" * 900))), encoding="utf-8")
    page = browser.new_page(viewport=SIZES[size])
    page.goto(path.as_uri())
    assert_fits(page)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert_legible(page)
    page.get_by_role("link", name="seeds").click()
    assert page.url.endswith("#seeds")
    page.close()
