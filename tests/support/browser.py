"""A real browser for tests of pages, and what a page must be in it: no sideways scrolling, legible text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
SIZES = {"desktop": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}
LEGIBLE = 4.5  # contrast that WCAG 2 asks for, of normal text

# Every visible element with text of its own, against the nearest background that is not transparent.
FAINT_TEXT = """(least) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (color) => {
    const [red, green, blue] = rgba(color).map((value) => value / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const background = (element) => {
    for (let node = element; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (rgba(color)[3] === 255) return color;
    }
    return matchMedia("(prefers-color-scheme: dark)").matches ? "rgb(18, 18, 18)" : "white";
  };
  const contrast = (element) => {
    const values = [getComputedStyle(element).color, background(element)].map(luminance).sort((a, b) => b - a);
    return (values[0] + 0.05) / (values[1] + 0.05);
  };
  const hasText = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  return [...document.body.querySelectorAll("*")]
    .filter((element) => element.checkVisibility() && hasText(element) && !element.disabled)
    .filter((element) => contrast(element) < least)
    .map((element) => `${contrast(element).toFixed(2)}: ${element.outerHTML.slice(0, 120)}`);
}"""


@contextmanager
def launched(executable: str) -> Iterator[Any]:
    """A browser without a window. Skips the test where playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


def assert_fits(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page must not scroll sideways"


def assert_legible(page: Any) -> None:
    """In the colour scheme that the page has now."""
    assert page.evaluate(FAINT_TEXT, LEGIBLE) == []
