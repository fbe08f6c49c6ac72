"""The report: complete in one file, safe, and legible in a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.report import build_report, headline
from paceline.bench.sweep import grid
from tests.support.bench_toys import toy_candidates, toy_plan, toy_run
from tests.support.browser import SIZES, assert_fits, assert_legible, launched


@pytest.fixture(scope="module")
def run() -> dict:
    return toy_run(toy_candidates(), toy_plan(settings=grid(["draft_model", "ngram"], [1, 2, 4], [0.0])))


@pytest.mark.slow
def test_a_report_holds_every_plot_and_loads_nothing_from_outside(run: dict) -> None:
    page = build_report(run)
    assert page.count("<svg") == 7
    for title in (
        "Speed by k",
        "Acceptance by k",
        "by position",
        "over an output",
        "by domain",
        "Predicted",
        "time goes",
    ):
        assert title in page
    assert "<script" not in page
    links = set(re.findall(r"https?://[^\"' )<]+", page))
    assert {link.split("/")[2] for link in links} <= {"www.w3.org", "purl.org", "creativecommons.org", "matplotlib.org"}
    assert not re.search(r"(src|href)=\"https?:", page.replace('xlink:href="#', ""))


@pytest.mark.slow
def test_names_are_shown_as_text(run: dict) -> None:
    page = build_report({**run, "target": {**run["target"], "name": "<b>bold</b>"}})
    assert "<b>bold" not in page
    assert "&lt;b&gt;bold" in page


@pytest.mark.slow
def test_the_headline_does_not_hide_a_loss(run: dict) -> None:
    def scaled(by: float) -> dict:
        rows = []
        for setting in run["settings"]:
            gain = {"median": by, "low": by, "high": by} if setting["method"] != "none" else None
            rows.append({**setting, "speedup": gain})
        return {**run, "settings": rows}

    assert "Plain decoding is fastest" in headline(scaled(0.8))
    assert "1.70x plain" in headline(scaled(1.7))
    broken = scaled(1.7)
    broken["settings"][1]["lossless"] = {"outcome": "different", "passed": False, "detail": "bug"}
    assert "Different output, so without a speed-up" in headline(broken)
    assert "interrupted" in build_report({**run, "complete": False})


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    with launched(chromium) as process:
        yield process


# Legends that leave their plot, and the height of its smallest digits in pixels.
PLOT_FACTS = """() => {
  const inside = (box, frame) => box.left >= frame.left && box.right <= frame.right && box.bottom <= frame.bottom;
  const plots = [...document.querySelectorAll("figure svg")];
  const cut = plots.flatMap((plot) => [...plot.querySelectorAll("[id^=legend]")]
    .filter((legend) => !inside(legend.getBoundingClientRect(), plot.getBoundingClientRect())));
  const ticks = [...document.querySelectorAll("figure svg [id^=xtick] > g[id^=text]")];
  const heights = ticks.map((tick) => tick.getBoundingClientRect().height);
  return { plots: plots.length, cut: cut.length, digits: Math.min(...heights) };
}"""


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_a_browser_shows_it_without_sideways_scrolling(run: dict, browser: Any, tmp_path: Path, size: str) -> None:
    path = tmp_path / "report.html"
    path.write_text(build_report(run), encoding="utf-8")
    page = browser.new_page(viewport=SIZES[size])
    page.goto(path.as_uri())
    assert_fits(page)
    assert_legible(page)
    facts = page.evaluate(PLOT_FACTS)
    assert facts["plots"] == 7 and facts["cut"] == 0
    assert facts["digits"] >= 6.0, "the digits of a letter size of 8 pixels"
    page.get_by_role("region", name="Settings").focus()  # what scrolls is reached by keys
    page.close()
