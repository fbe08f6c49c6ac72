"""Tool calls and reasoning on the page, in a real browser: folded, token by token, and sent back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.serve.config import ServerConfig
from tests.serve.running import NAME, RunningServer, serving
from tests.serve.scripted import OPEN_THINKING_TEMPLATE, ScriptedEngine, tokenizer_with

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = [pytest.mark.browser, pytest.mark.slow]

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
THOUGHT = "The user asks for the weather. I need the tool for that, with a city and a unit."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "São Paulo", "unit": "C"}}\n</tool_call>'
ANSWER = "It is 20 °C in São Paulo."
TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(tokenizer_with(OPEN_THINKING_TEMPLATE))


@pytest.fixture(scope="module")
def server(engine: ScriptedEngine) -> Iterator[RunningServer]:
    with serving(engine, ServerConfig((NAME,))) as running:
        yield running


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as tools:
        process = tools.chromium.launch(executable_path=chromium, args=FLAGS)
        yield process
        process.close()


@pytest.fixture(params=[(1280, 800), (390, 844)], ids=["desktop", "phone"])
def page(request: pytest.FixtureRequest, browser: playwright.Browser, server: RunningServer) -> Iterator[Any]:
    width, height = request.param
    tab = browser.new_page(viewport={"width": width, "height": height})
    problems: list[str] = []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    tab.goto(server.url)
    playwright.expect(tab.locator("#model")).to_have_text(NAME)
    yield tab
    assert not problems
    tab.close()


def open_settings(page: Any) -> None:
    if not page.locator("#settings").evaluate("element => element.open"):
        page.click("#settings summary")


def take_picture(page: Any, name: str) -> None:
    """For a person to look at, where PACELINE_SCREENSHOTS names a folder."""
    folder = os.environ.get("PACELINE_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}-{page.viewport_size['width']}.png")


def finish(page: Any) -> None:
    playwright.expect(page.locator("#stop")).to_be_hidden(timeout=60_000)


def test_reasoning_and_tool_calls_are_folded_and_results_go_back(page: Any, engine: ScriptedEngine) -> None:
    engine.requests = []
    engine.outputs = [f"{THOUGHT}\n</think>\n\nI look.\n{CALL}", f"Good.</think>{ANSWER}"]
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.post_data else None)
    open_settings(page)
    page.fill("#tools", json.dumps(TOOL))
    if page.viewport_size["width"] < 500:
        page.click("#settings summary")
    page.fill("#prompt", "How warm is it in São Paulo?")
    page.press("#prompt", "Enter")
    finish(page)

    reasoning, call = page.locator(".part.reasoning").first, page.locator(".part.call").first
    assert reasoning.evaluate("element => element.open") is False, "reasoning is folded"
    playwright.expect(reasoning.locator(".answer")).to_be_hidden()
    playwright.expect(call.locator("summary")).to_have_text("Tool call: get_weather")
    assert json.loads(call.locator("pre").first.inner_text()) == {"city": "São Paulo", "unit": "C"}
    assert page.locator(".message.assistant > .answer").first.inner_text() == "I look."
    take_picture(page, "folded")
    reasoning.locator("summary").click()
    playwright.expect(reasoning.locator(".answer")).to_be_visible()
    assert reasoning.locator(".answer").inner_text().strip() == THOUGHT
    assert reasoning.locator(".t.accepted").count() > 0 and "<" not in page.locator("#log").inner_text()
    take_picture(page, "unfolded")

    page.get_by_label("Result of get_weather").fill('{"degrees": 20}')
    page.get_by_role("button", name="Return").click()
    playwright.expect(page.locator(".message.assistant > .answer").nth(1)).to_have_text(ANSWER, timeout=60_000)
    finish(page)
    assert call.evaluate("element => element.open") is False, "a call that has its result is folded"
    sent = bodies[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[1]["reasoning_content"].strip() == THOUGHT and sent[1]["content"].strip() == "I look."
    assert sent[2]["tool_call_id"] == sent[1]["tool_calls"][0]["id"] and sent[2]["content"] == '{"degrees": 20}'
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page must not scroll sideways"
    take_picture(page, "answered")


def test_tools_that_are_no_json_are_said_to_be_none(page: Any, engine: ScriptedEngine) -> None:
    open_settings(page)
    page.fill("#tools", "{not json")
    page.fill("#prompt", "anything")
    page.press("#prompt", "Enter")
    finish(page)
    assert page.inner_text(".summary.error") == "the tools of the settings are no JSON"
