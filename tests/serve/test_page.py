"""The page in a real browser, against the running server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.running import RunningServer, slowed
from tests.support.browser import SIZES, assert_fits, assert_legible, launched

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = [pytest.mark.browser, pytest.mark.slow]

REPEAT = "again and again and again and again and again and again"
DESKTOP, PHONE = SIZES["desktop"], SIZES["phone"]


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[playwright.Browser]:
    with launched(chromium) as process:
        yield process


@pytest.fixture
def page(browser: playwright.Browser, tiny_server: RunningServer) -> Iterator[playwright.Page]:
    """The opened page. It must load nothing from other sites, and log no error in the console."""
    tab = browser.new_page(viewport=DESKTOP)
    urls: list[str] = []
    problems: list[str] = []

    def on_console(message: playwright.ConsoleMessage) -> None:
        # The browser itself logs a status of 400, which one test provokes.
        if message.type in ("error", "warning") and "400" not in message.text:
            problems.append(message.text)

    tab.on("request", lambda request: urls.append(request.url))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", on_console)
    tab.goto(tiny_server.url)
    playwright.expect(tab.locator("#model")).to_have_text("model")
    yield tab
    assert not [url for url in urls if not url.startswith(tiny_server.url)]
    assert not problems
    tab.close()


# The ring of the focused element, and the room that what clips it leaves for it on its tightest side.
RING = """() => {
  const element = document.activeElement, style = getComputedStyle(element), box = element.getBoundingClientRect();
  const reach = parseFloat(style.outlineWidth) + parseFloat(style.outlineOffset);
  let room = Math.min(box.left, box.top, innerWidth - box.right, innerHeight - box.bottom);
  for (let node = element.parentElement; node; node = node.parentElement) {
    if (getComputedStyle(node).overflow === "visible" || node === document.body) continue;
    const clip = node.getBoundingClientRect();
    room = Math.min(room, box.left - clip.left, clip.right - box.right);
  }
  const name = element.id || element.className;
  return { name, style: style.outlineStyle, width: parseFloat(style.outlineWidth), room: room - reach };
}"""


def send(page: playwright.Page, prompt: str, max_tokens: int) -> None:
    page.fill("#max-tokens", str(max_tokens))
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")


def wait_until_finished(page: playwright.Page) -> None:
    playwright.expect(page.locator("#stop")).to_be_hidden(timeout=60_000)


def test_a_chat_shows_coloured_tokens_and_statistics(page: playwright.Page) -> None:
    page.select_option("#method", "lookahead")
    page.select_option("#num-draft-tokens", "4")
    send(page, REPEAT, 120)
    wait_until_finished(page)
    tokens = page.locator(".answer .t")
    assert 60 < tokens.count() <= 120
    accepted = page.locator(".answer .t.accepted")
    assert 0 < accepted.count() < tokens.count()
    background = "element => getComputedStyle(element).backgroundColor"
    target = page.locator(".answer .t.target")
    assert accepted.first.evaluate(background) != target.first.evaluate(background)
    assert float(page.inner_text("#tau")) > 1 and float(page.inner_text("#speed")) > 0
    assert page.inner_text("#acceptance").endswith("%") and float(page.inner_text("#k")) > 0
    accepted.first.hover()
    assert "accepted draft token, probability" in page.inner_text("#tip")


def test_speculation_can_be_switched_off(page: playwright.Page) -> None:
    page.uncheck("#speculation")
    send(page, REPEAT, 40)
    wait_until_finished(page)
    assert page.locator(".answer .t").count() > 20 and page.locator(".answer .t.accepted").count() == 0
    assert page.inner_text("#k") == "0" and page.inner_text("#tau") == "1.00"


def test_a_generation_can_be_stopped(page: playwright.Page, tiny_server: RunningServer) -> None:
    with slowed(tiny_server, 0.05):
        send(page, "a long one", 400)
        playwright.expect(page.locator(".answer .t").nth(3)).to_be_attached(timeout=30_000)
        page.click("#stop")
        wait_until_finished(page)
    playwright.expect(page.locator(".summary")).to_have_text("stopped")
    assert page.locator(".answer .t").count() < 400
    tiny_server.wait_until_idle()


def test_the_keyboard_reaches_every_token_and_view(page: playwright.Page) -> None:
    send(page, "keys", 12)
    wait_until_finished(page)
    page.focus(".answer")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.locator(".answer .t.marked").get_attribute("data-position") == "3"
    assert "token 3" in page.inner_text("#tip") and "token 3" in page.inner_text("#announcement")
    page.keyboard.press("Escape")
    playwright.expect(page.locator("#tip")).to_be_hidden()
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    playwright.expect(page.locator("#race")).to_be_visible()


def test_a_race_shows_both_outputs_and_that_they_are_equal(page: playwright.Page) -> None:
    page.click("#tab-race")
    page.select_option("#method", "lookahead")
    page.select_option("#num-draft-tokens", "4")
    send(page, REPEAT, 60)
    playwright.expect(page.locator("#result")).to_contain_text("the same output", timeout=60_000)
    assert page.inner_text("#lane-off") == page.inner_text("#lane-on")
    assert page.locator("#lane-off .t.accepted").count() == 0 < page.locator("#lane-on .t.accepted").count()
    assert "tokens per step" in page.inner_text("#lane-on-summary")


def test_an_error_is_shown(page: playwright.Page) -> None:
    send(page, "long " * 400, 4)
    wait_until_finished(page)
    assert "reads at most" in page.inner_text(".summary.error")


def test_the_page_fits_a_phone_and_dark_mode(browser: playwright.Browser, tiny_server: RunningServer) -> None:
    context = browser.new_context(viewport=PHONE, color_scheme="dark", has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(tiny_server.url)
    playwright.expect(page.locator("#max-tokens")).to_be_hidden()
    page.click("summary")
    send(page, REPEAT, 40)
    page.click("summary")
    wait_until_finished(page)
    assert_fits(page)
    assert_legible(page)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(19, 22, 21)"
    page.locator(".answer .t").first.tap()
    playwright.expect(page.locator("#tip")).to_be_visible()
    box = page.locator("#tip").bounding_box()
    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]
    context.close()


def test_every_control_has_an_accessible_name(page: playwright.Page) -> None:
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, [role=tab], [role=log]")]
            .filter((element) => !element.labels?.length)
            .filter((element) => !element.getAttribute("aria-label") && !element.textContent.trim())
            .map((element) => element.outerHTML)"""
    )
    assert nameless == []
    assert page.get_attribute("html", "lang") == "en" and page.locator("h1").count() == 1
    assert_legible(page)


def test_the_keyboard_shows_where_it_is(page: playwright.Page) -> None:
    """Every stop of the tab key has a ring, and nothing that scrolls cuts it off."""
    send(page, "rings", 8)
    wait_until_finished(page)
    page.focus("#tab-chat")
    stops = set()
    for _ in range(14):
        ring = page.evaluate(RING)
        assert ring["style"] != "none" and ring["width"] >= 2, ring
        assert ring["room"] >= 0, ring
        stops.add(ring["name"])
        page.keyboard.press("Tab")
    assert {"tab-chat", "log", "answer", "prompt", "send", "method", "tools"} <= stops


# --- what must not be said or sent ------------------------------------------------------------------------------------


@pytest.fixture
def bodies(page: playwright.Page) -> list[dict[str, Any]]:
    """The chat requests that the page sends, as they come."""
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.post_data else None)
    return sent


def test_a_new_chat_during_an_answer_forgets_the_old_one(
    page: playwright.Page, tiny_server: RunningServer, bodies: list[dict[str, Any]]
) -> None:
    with slowed(tiny_server, 0.05):
        send(page, "the old question", 400)
        playwright.expect(page.locator(".answer .t").nth(3)).to_be_attached(timeout=30_000)
        page.click("#clear")
        wait_until_finished(page)
    assert page.locator(".message").count() == 0
    tiny_server.wait_until_idle()
    send(page, "the new question", 8)
    wait_until_finished(page)
    assert bodies[-1]["messages"] == [{"role": "user", "content": "the new question"}]
    assert page.locator(".message").count() == 2, "nothing of the old chat is shown"


def test_a_refused_question_is_not_part_of_the_next_request(
    page: playwright.Page, bodies: list[dict[str, Any]]
) -> None:
    send(page, "long " * 400, 4)
    wait_until_finished(page)
    send(page, "short", 4)
    wait_until_finished(page)
    assert bodies[-1]["messages"] == [{"role": "user", "content": "short"}]


def entry(text: str, logprob: float, rival: str, rival_logprob: float) -> dict[str, Any]:
    """A token of a chunk, with its two likeliest alternatives."""
    top = [{"token": name, "logprob": value, "bytes": list(name.encode())} for name, value in
           ((text, logprob), (rival, rival_logprob))]
    return {**top[0], "top_logprobs": top}


def answer_with(page: playwright.Page, off: dict[str, Any], on: dict[str, Any]) -> None:
    """Instead of the model's tokens a race gets `a`, then `off` without speculation and `on` with it."""

    def fulfill(route: playwright.Route) -> None:
        method = route.request.post_data_json["speculative"]["method"]
        tokens = [entry("a", -0.1, "b", -3.0), off if method == "none" else on]
        events = [
            {"choices": [{"index": 0, "logprobs": {"content": [token]}, "x_paceline": {"num_draft_tokens": 0}}]}
            for token in tokens
        ]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", fulfill)


@pytest.mark.parametrize(("gap", "words"), [(0.0001, "near-tie"), (0.4, "A different output from token 2")])
def test_a_race_calls_a_difference_a_near_tie_only_where_it_is_one(
    page: playwright.Page, gap: float, words: str
) -> None:
    answer_with(page, entry("x", -0.7, "y", -0.7 - gap), entry("y", -0.7, "x", -0.7 - gap))
    page.click("#tab-race")
    send(page, "anything", 8)
    playwright.expect(page.locator("#result")).to_contain_text(words, timeout=30_000)
    assert page.inner_text("#lane-off .differs") == "x" and page.inner_text("#lane-on .differs") == "y"
    assert ("please report" in page.inner_text("#result")) == (gap > 0.1)


def test_the_lanes_of_a_race_take_turns_after_one_read_of_the_prompt(
    page: playwright.Page, bodies: list[dict[str, Any]]
) -> None:
    page.click("#tab-race")
    page.select_option("#method", "ngram")
    page.select_option("#num-draft-tokens", "2")
    send(page, REPEAT, 24)
    playwright.expect(page.locator("#result")).to_contain_text("the same output", timeout=60_000)
    methods = [body["speculative"]["method"] for body in bodies]
    assert methods == ["none", "none", "ngram", "ngram", "none"], "the first one only reads the prompt"
    assert [body["max_tokens"] for body in bodies] == [1, 24, 24, 24, 24]
    summaries = [page.inner_text(f"#lane-{name}-summary") for name in ("off", "on")]
    speeds = [float(speed) for summary in summaries for speed in re.findall(r"([\d.]+) tokens/s", summary)]
    measured = float(page.inner_text("#result").split("×")[0])
    assert measured == pytest.approx(speeds[1] / speeds[0], abs=0.03), "the lanes show the speeds that are compared"
