"""The report: complete in one file, safe, and legible in a browser."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from paceline.bench.report import build_report, headline
from paceline.bench.sweep import grid
from tests.support.bench_toys import toy_candidates, toy_plan, toy_run


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


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it_without_sideways_scrolling(run: dict, chromium: str, tmp_path: Path, width: int) -> None:
    page = tmp_path / "report.html"
    page.write_text(build_report(run), encoding="utf-8")
    picture = tmp_path / "shot.png"
    subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},2400",
         f"--screenshot={picture}", page.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert picture.stat().st_size > 20_000
