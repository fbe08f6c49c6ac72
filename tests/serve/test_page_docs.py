"""The page of the routes in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.serve.config import NetworkConfig, ServerConfig
from tests.serve.running import NAME, RunningServer, serving
from tests.serve.toy_engine import ReversingEngine
from tests.support.browser import assert_fits, assert_legible, launched

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = [pytest.mark.browser, pytest.mark.slow]

KEY = "first-secret"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(ReversingEngine(), ServerConfig((NAME,), network=NetworkConfig(api_keys=(KEY,)))) as running_server:
        yield running_server


@pytest.mark.parametrize("width", [1280, 390])
def test_the_routes_are_shown_once_the_key_is_given(
    chromium: str, server: RunningServer, width: int, tmp_path: Path
) -> None:
    with launched(chromium) as browser:
        page = browser.new_page(viewport={"width": width, "height": 800})
        urls: list[str] = []
        page.on("request", lambda request: urls.append(request.url))
        page.goto(f"{server.url}/docs")
        playwright.expect(page.locator("#status")).to_contain_text("API key")
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        route = page.locator("details", has=page.locator(".path", has_text="/v1/messages")).first
        playwright.expect(route).to_be_visible()
        route.locator("summary").click()
        playwright.expect(route.locator("td", has_text="stop_sequences")).to_be_visible()
        assert page.locator("details").count() > 30
        assert_fits(page)
        assert_legible(page)
        assert all(url.startswith(server.url) for url in urls)
        page.screenshot(path=str(tmp_path / "docs.png"))
