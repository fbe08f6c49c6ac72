"""The page in a real browser, against the running server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.running import Running, slowed

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.browser

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
REPEAT = "again and again and again and again and again and again"
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as tools:
        opened = tools.chromium.launch(executable_path=chromium, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: playwright.Browser, tiny: Running) -> Iterator[playwright.Page]:
    """The page, opened; it may ask for nothing outside, and say nothing in the console."""
    opened = browser.new_page(viewport=DESKTOP)
    asked: list[str] = []
    complaints: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    # A status of 400 is also written to the console by the browser itself; that one is asked for.
    wrong = ("error", "warning")
    opened.on(
        "console", lambda line: complaints.append(line.text) if line.type in wrong and "400" not in line.text else None
    )
    opened.goto(tiny.url)
    playwright.expect(opened.locator("#model")).to_have_text("model")
    yield opened
    assert not [url for url in asked if not url.startswith(tiny.url)]
    assert not complaints
    opened.close()


def send(page: playwright.Page, words: str, tokens: int) -> None:
    page.fill("#max-tokens", str(tokens))
    page.fill("#prompt", words)
    page.press("#prompt", "Enter")


def finished(page: playwright.Page) -> None:
    playwright.expect(page.locator("#stop")).to_be_hidden(timeout=60_000)


def test_typing_shows_coloured_tokens_and_figures(page: playwright.Page) -> None:
    page.select_option("#method", "lookahead")
    page.select_option("#draft-tokens", "4")
    send(page, REPEAT, 120)
    finished(page)
    tokens = page.locator(".answer .t")
    assert 60 < tokens.count() <= 120
    guessed = page.locator(".answer .t.guessed")
    assert 0 < guessed.count() < tokens.count()
    ground = "one => getComputedStyle(one).backgroundColor"
    assert guessed.first.evaluate(ground) != page.locator(".answer .t.own").first.evaluate(ground)
    assert float(page.inner_text("#tau")) > 1 and float(page.inner_text("#speed")) > 0
    assert page.inner_text("#acceptance").endswith("%") and float(page.inner_text("#k")) > 0
    guessed.first.hover()
    assert "guessed and accepted, probability" in page.inner_text("#tip")


def test_speculation_can_be_switched_off(page: playwright.Page) -> None:
    page.uncheck("#speculation")
    send(page, REPEAT, 40)
    finished(page)
    assert page.locator(".answer .t").count() > 20 and page.locator(".answer .t.guessed").count() == 0
    assert page.inner_text("#k") == "0" and page.inner_text("#tau") == "1.00"


def test_a_generation_can_be_stopped(page: playwright.Page, tiny: Running) -> None:
    with slowed(tiny, 0.05):
        send(page, "a long one", 400)
        playwright.expect(page.locator(".answer .t").nth(3)).to_be_attached(timeout=30_000)
        page.click("#stop")
        finished(page)
    playwright.expect(page.locator(".figures")).to_have_text("stopped")
    assert page.locator(".answer .t").count() < 400
    tiny.quiet()


def test_the_keyboard_is_enough(page: playwright.Page) -> None:
    send(page, "keys", 12)
    finished(page)
    page.focus(".answer")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.locator(".answer .t.marked").get_attribute("data-position") == "3"
    assert "token 3" in page.inner_text("#tip") and "token 3" in page.inner_text("#said")
    page.keyboard.press("Escape")
    playwright.expect(page.locator("#tip")).to_be_hidden()
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    playwright.expect(page.locator("#race")).to_be_visible()


def test_a_race_shows_both_and_the_same_text(page: playwright.Page) -> None:
    page.click("#tab-race")
    page.select_option("#method", "lookahead")
    page.select_option("#draft-tokens", "4")
    send(page, REPEAT, 60)
    playwright.expect(page.locator("#verdict")).to_contain_text("the same text", timeout=60_000)
    assert page.inner_text("#lane-off") == page.inner_text("#lane-on")
    assert page.locator("#lane-off .t.guessed").count() == 0 < page.locator("#lane-on .t.guessed").count()
    assert "tokens a pass" in page.inner_text("#lane-on-figures")


def test_an_error_is_said(page: playwright.Page) -> None:
    send(page, "long " * 400, 4)
    finished(page)
    assert "reads at most" in page.inner_text(".figures.error")


def test_it_fits_a_phone_and_the_dark(browser: playwright.Browser, tiny: Running) -> None:
    context = browser.new_context(viewport=PHONE, color_scheme="dark", has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(tiny.url)
    playwright.expect(page.locator("#max-tokens")).to_be_hidden()
    page.click("summary")
    send(page, REPEAT, 40)
    page.click("summary")
    finished(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing may stick out sideways"
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(19, 22, 21)"
    page.locator(".answer .t").first.tap()
    playwright.expect(page.locator("#tip")).to_be_visible()
    box = page.locator("#tip").bounding_box()
    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]
    context.close()


def test_everything_has_a_name_for_those_who_listen(page: playwright.Page) -> None:
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, [role=tab], [role=log]")]
            .filter((one) => !(one.labels?.length || one.getAttribute("aria-label") || one.textContent.trim()))
            .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    assert page.get_attribute("html", "lang") == "en" and page.locator("h1").count() == 1
