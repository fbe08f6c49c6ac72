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
from tests.support.browser import SIZES, assert_fits, assert_legible, launched

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = [pytest.mark.browser, pytest.mark.slow]

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
    with launched(chromium) as process:
        yield process


@pytest.fixture(params=SIZES)
def page(request: pytest.FixtureRequest, browser: playwright.Browser, server: RunningServer) -> Iterator[Any]:
    tab = browser.new_page(viewport=SIZES[request.param])
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
    playwright.expect(call.locator("summary")).to_contain_text('Tool call: get_weather {"city": "São Paulo"')
    playwright.expect(call.locator("pre")).to_be_hidden()
    playwright.expect(page.get_by_label("Result of get_weather")).to_be_visible()
    assert page.locator(".message.assistant > .answer").first.inner_text() == "I look."
    take_picture(page, "folded")
    reasoning.locator("summary").click()
    playwright.expect(reasoning.locator(".answer")).to_be_visible()
    assert reasoning.locator(".answer").inner_text().strip() == THOUGHT
    assert reasoning.locator(".t.accepted").count() > 0 and "<" not in page.locator("#log").inner_text()
    call.locator("summary").click()
    assert json.loads(call.locator("pre").inner_text()) == {"city": "São Paulo", "unit": "C"}
    assert call.locator("summary").inner_text().strip() == "Tool call: get_weather", "the arguments are shown once"
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        assert_legible(page)
    take_picture(page, "unfolded")

    page.get_by_label("Result of get_weather").fill('{"degrees": 20}')
    page.get_by_role("button", name="Return").click()
    playwright.expect(page.locator(".message.assistant > .answer").nth(1)).to_have_text(ANSWER, timeout=60_000)
    finish(page)
    playwright.expect(call.locator("pre").first).to_be_hidden()
    call.locator("summary").click()
    assert json.loads(call.locator("pre").nth(1).inner_text()) == {"degrees": 20}
    sent = bodies[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[1]["reasoning_content"].strip() == THOUGHT and sent[1]["content"].strip() == "I look."
    assert sent[2]["tool_call_id"] == sent[1]["tool_calls"][0]["id"] and sent[2]["content"] == '{"degrees": 20}'
    assert_fits(page)
    take_picture(page, "answered")


def test_results_go_back_once_every_call_has_one(page: Any, engine: ScriptedEngine) -> None:
    engine.outputs = [f"Two cities.</think>{CALL}\n{CALL.replace('São Paulo', 'L' * 200)}", f"Good.</think>{ANSWER}"]
    page.fill("#prompt", "Where is it warmer?")
    open_settings(page)
    page.fill("#tools", json.dumps(TOOL))
    page.press("#prompt", "Enter")
    finish(page)
    fields = page.get_by_label("Result of get_weather")
    assert fields.count() == 2
    assert_fits(page)
    fields.first.fill("20")
    page.get_by_role("button", name="Return").first.click()
    playwright.expect(fields.nth(1)).to_be_focused()
    fields.nth(1).fill("30")
    fields.nth(1).press("Enter")
    playwright.expect(page.locator(".message.assistant > .answer").nth(1)).to_have_text(ANSWER, timeout=60_000)


def test_steps_that_an_engine_does_not_report_are_not_made_up(page: Any, engine: ScriptedEngine) -> None:
    engine.outputs = [f"Good.</think>{ANSWER}"]
    page.fill("#prompt", "anything")
    page.press("#prompt", "Enter")
    finish(page)
    summary = page.inner_text(".summary")
    assert "tokens/s" in summary and "step" not in summary and "no draft" not in summary
    assert [page.inner_text(f"#{name}") for name in ("acceptance", "tau", "k")] == ["–", "–", "–"]


def test_tools_that_are_no_json_are_said_to_be_none(page: Any, engine: ScriptedEngine) -> None:
    open_settings(page)
    page.fill("#tools", "{not json")
    page.fill("#prompt", "anything")
    page.press("#prompt", "Enter")
    finish(page)
    assert page.inner_text(".summary.error") == "the tools of the settings are no JSON"
