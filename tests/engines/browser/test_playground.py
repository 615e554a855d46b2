"""The playground in a real browser, which may say nothing on its console and ask nobody but the server."""

import re
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from conftest import MANY, PATIENCE_MS, Service
from playwright.sync_api import Locator, Page, expect

expect.set_options(timeout=PATIENCE_MS)
PROMPT = "Ann has 3 bags of 12 apples. How many apples does she have?"


def answered(url: str, *, policy: str, path: str = "chat/completions", **asked: Any) -> dict[str, Any]:
    """The API's own reply to the request that the page makes: the block with every step, and the text."""
    given = {"messages": [{"role": "user", "content": PROMPT}]} if path.startswith("chat") else {"prompt": PROMPT}
    speculative = {"details": True, "policy": policy}
    body = {**given, "max_tokens": 48, "temperature": 1, "seed": 1, "speculative": speculative} | asked
    reply = httpx2.post(f"{url}/v1/{path}", json=body, timeout=PATIENCE_MS / 1000).raise_for_status().json()
    choice = reply["choices"][0]
    return reply["speculative"] | {"text": choice["message"]["content"] if "message" in choice else choice["text"]}


def refusal(url: str, **asked: Any) -> str:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 48} | asked
    return httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_MS / 1000).json()["error"]["message"]


def fill(page: Page, policies: tuple[str, str], **numbers: float) -> None:
    page.locator("#prompt").fill(PROMPT)
    for name, value in ({"max_tokens": 48, "temperature": 1, "top_p": 1} | numbers).items():
        page.locator(f"#{name}").fill(str(value))
    for i, policy in enumerate(policies):
        lane(page, i).locator(".policy").fill(policy)


def generated(page: Page, policies: tuple[str, str] = ("cumulative:0.2", "none"), **numbers: float) -> None:
    fill(page, policies, **numbers)
    page.locator("#run").click()
    finished(page)


def finished(page: Page) -> None:
    expect(page.locator("#run")).to_have_text("Generate")
    expect(page.locator("#status")).to_have_text(re.compile("ended|reached|stopped|failed"))


def lane(page: Page, i: int = 0) -> Locator:
    return page.locator(".lane").nth(i)


@pytest.mark.parametrize(("kind", "path"), [("chat", "chat/completions"), ("text", "completions")])
def test_the_page_says_what_the_server_says(opened: Callable[..., Page], url: str, kind: str, path: str) -> None:
    """Catches a piece that is lost, doubled or in the wrong lane, an origin in another's style, other bars and figures."""
    page, policies = opened(url), ("specdecpp", "fixed:4")
    page.locator("#kind").select_option(kind)
    generated(page, policies, seed=3, temperature=0.8)
    for i, policy in enumerate(policies):
        expected = answered(url, policy=policy, path=path, seed=3, temperature=0.8)
        (steps,) = expected["steps"]
        pieces = [(piece, step) for step in steps for piece in step["pieces"]]
        spans = lane(page, i).locator(".answer > span").all()
        assert lane(page, i).locator(".answer").text_content() == expected["text"]
        for span, (piece, step) in zip(spans, pieces, strict=True):
            assert (span.text_content(), span.get_attribute("class")) == (piece["text"], piece["outcome"])
            is_correction = piece["outcome"] == "correction"
            shown = step["draft_tokens"][step["num_accepted"]] if is_correction else piece
            assert span.get_attribute("data-rejected") == (shown["text"] if is_correction else None)
            title = span.get_attribute("title") or ""
            assert float(title.split(" p ")[1].split()[0]) == pytest.approx(shown["p"], rel=0.01)
        bars = lane(page, i).locator(".steps i").all()
        assert len(bars) == len(steps)
        for bar, step in zip(bars, steps, strict=True):
            counts = f"{step['num_drafted']} drafted, {step['num_accepted']} accepted"
            assert bar.get_attribute("title") == f"{counts}; drafting stopped: {step['stop_reason']}"
            height = bar.evaluate("bar => bar.offsetHeight")
            assert height == pytest.approx(3 + 6 * step["num_drafted"], abs=1)
        figures = {
            name: lane(page, i).locator(f"[data-figure={name}]").inner_text() for name in ("length", "accepted", "tokens")
        }
        assert figures["length"] == f"{expected['mean_acceptance_length']:.2f}"
        assert figures["accepted"] == f"{100 * expected['draft_acceptance_rate']:.0f} %"
        assert figures["tokens"] == f"{expected['num_tokens']} in {expected['num_spec_steps']}"


def test_an_answer_can_be_stopped(opened: Callable[..., Page], endless_url: str, counter: Callable[[str], float]) -> None:
    """Catches a button that stops the page alone, an answer that goes on, and work that is left behind."""
    before = counter('specdecpp_requests_total{outcome="cancelled"}')
    page = opened(endless_url)
    fill(page, ("fixed:2", "none"), max_tokens=MANY)
    page.locator("#run").click()
    for i in (0, 1):
        expect(lane(page, i).locator(".steps i").nth(4)).to_be_attached()
    page.locator("#run").click()
    finished(page)
    expect(page.locator("#status")).to_contain_text("stopped")
    until = time.monotonic() + PATIENCE_MS / 1000
    while counter("specdecpp_requests_running") and time.monotonic() < until:
        time.sleep(0.02)
    assert counter('specdecpp_requests_total{outcome="cancelled"}') == before + 2
    generated(page, ("fixed:2", "none"), max_tokens=4)
    assert lane(page).locator(".answer > span").count() == 4


def test_errors_are_shown_as_the_server_says_them(opened: Callable[..., Page], url: str) -> None:
    """Catches an error that is swallowed, rephrased, or shown elsewhere, and one that stays when all is well."""
    page = opened(url, expects=("status of 400",))
    generated(page, temperature=5)
    expect(page.locator("#problem")).to_have_text(refusal(url, temperature=5))
    assert page.locator("[aria-invalid]").evaluate_all("all => all.map(e => e.id)") == ["temperature"]
    generated(page, ("fixed:2", "cumulativ:0.3"))
    expect(page.locator("#problem")).to_be_hidden()
    expect(lane(page, 1).locator(".problem")).to_have_text(refusal(url, speculative={"policy": "cumulativ:0.3"}))
    assert lane(page).locator(".answer").text_content() == answered(url, policy="fixed:2")["text"], "the other answers on"
    generated(page)
    expect(page.locator(".problem:visible")).to_have_count(0)


def test_the_key_is_asked_for_only_where_the_server_wants_one(
    opened: Callable[..., Page], serve: Callable[..., Service], url: str
) -> None:
    """Catches a field that is always there, and a key that is not sent."""
    free = opened(url)
    free.locator("#model:not(:empty)").wait_for()
    assert free.get_by_label("Key of this server").is_hidden()
    page = opened(serve("--api-key", "sesame").url, expects=("status of 401",))
    field = page.get_by_label("Key of this server")
    expect(field).to_be_visible()
    field.fill("sesame")
    generated(page, max_tokens=4)
    expect(page.locator(".problem:visible")).to_have_count(0)
    expect(page.locator("#model")).to_contain_text("reference")


def test_a_server_that_goes_away_is_reported(
    opened: Callable[..., Page], serve: Callable[..., Service], endless: tuple[str, ...]
) -> None:
    """Catches a page that waits forever, and half an answer that is shown as a whole one."""
    service = serve(*endless)
    page = opened(service.url, expects=("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING"))
    fill(page, ("none", "fixed:2"), max_tokens=MANY)
    page.locator("#run").click()
    expect(lane(page).locator(".steps i").nth(4)).to_be_attached()
    service.process.kill()
    finished(page)
    expect(lane(page).locator(".problem")).to_contain_text("broke off")
    assert lane(page).locator(".answer").text_content(), "what has come stays"


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_window(opened: Callable[..., Page], url: str, width: int) -> None:
    """Catches a bar or a long word that pushes the page wide; two answers stand side by side where there is room."""
    page = opened(url, viewport={"width": width, "height": 800})
    generated(page)
    lane(page).locator(".answer > span").first.evaluate("span => span.append('x'.repeat(300))")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    first, second = (lane(page, i).bounding_box() for i in (0, 1))
    assert first
    assert second
    assert (first["y"] == second["y"]) == (width == 1280)
