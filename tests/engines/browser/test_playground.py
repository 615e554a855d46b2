"""The playground in a real browser, on answers of the pair that ships.

Every page that is opened is also watched: nothing may be said on the console, nobody but the server may be asked.
"""

import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from conftest import MANY, PATIENCE_MS, Service
from playwright.sync_api import Locator, Page, expect

expect.set_options(timeout=PATIENCE_MS)
WIDTHS = (360, 820, 1280)
PROMPT = "Ann has 3 bags of 12 apples. How many apples does she have?"
KINDS = {"accepted": "solid", "correction": "wavy", "bonus": "dotted"}


def told(url: str, *, policy: str | None, prompt: str = PROMPT, path: str = "chat/completions", **asked: Any) -> dict[str, Any]:
    """What the API itself says to the request that the page makes: the text, and the block with every step."""
    given = {"messages": [{"role": "user", "content": prompt}]} if path.startswith("chat") else {"prompt": prompt}
    speculative = {"details": True} | ({} if policy is None else {"policy": policy})
    body = {**given, "max_tokens": 48, "temperature": 1, "seed": 1, "speculative": speculative} | asked
    reply = httpx2.post(f"{url}/v1/{path}", json=body, timeout=PATIENCE_MS / 1000).raise_for_status().json()
    choice = reply["choices"][0]
    return reply["speculative"] | {"text": choice["message"]["content"] if "message" in choice else choice["text"]}


def pieces_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [piece for r in answer["rounds"][0] for piece in r["pieces"]]


def fill(page: Page, *, policies: tuple[str, ...] = ("cumulative:0.2",), prompt: str = PROMPT, **numbers: float) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    for name, value in ({"max_tokens": 48, "temperature": 1, "top_p": 1} | numbers).items():
        page.locator(f"#{name}").fill(str(value))
    page.get_by_label("compare two rules").set_checked(len(policies) == 2)
    for i, policy in enumerate(policies):
        page.locator(".policy").nth(i).select_option(policy)


def finished(page: Page) -> None:
    expect(page.locator("#status")).to_contain_text(re.compile("token|failed"))
    expect(page.locator("#run")).to_have_text("Generate")


def generated(page: Page, **form: Any) -> None:
    fill(page, **form)
    page.get_by_role("button", name="Generate", exact=True).click()
    finished(page)


def lane(page: Page, i: int = 0) -> Locator:
    return page.locator(".lane").nth(i)


def chance(value: float) -> str:
    """A probability as the page writes it."""
    return f"{value:.3f}" if value >= 0.001 else f"{value:.4f}" if value >= 0.0001 else f"{value:.0e}".replace("e-0", "e-")


def span(text: str) -> tuple[float, float]:
    """The least and the most that a rounded figure may stand for."""
    half = 0.5 * 0.1 ** len(text.partition(".")[2])
    return float(text) - half, float(text) + half


def visible(text: str) -> str:
    return text.replace(" ", "\u2423").replace("\n", "\u21b5") or "no text of its own"


def texts(places: Locator) -> list[str]:
    return [text or "" for text in (place.text_content() for place in places.all())]


def test_the_page_says_what_the_server_says(opened: Callable[..., Page], url: str) -> None:
    """Catches a piece that is lost, doubled or in the wrong lane, an origin in another's style, a bar too few or too high."""
    page = opened(url)
    for kind, path in (("chat", "chat/completions"), ("text", "completions")):
        page.locator("#kind").select_option(kind)
        generated(page, policies=("cumulative:0.2", "fixed:4"), seed=3, temperature=0.8)
        for i, policy in enumerate(("cumulative:0.2", "fixed:4")):
            expected = told(url, policy=policy, path=path, seed=3, temperature=0.8)
            (steps,) = expected["rounds"]
            pieces = pieces_of(expected)
            answer = lane(page, i).locator(".answer")
            assert answer.text_content() == expected["text"]
            assert texts(answer.locator(":scope > span")) == [piece["text"] for piece in pieces]
            kinds = [(span.get_attribute("class") or "").split()[0] for span in answer.locator(":scope > span").all()]
            assert kinds == [piece["origin"] for piece in pieces]
            bars = lane(page, i).locator(".strip button").all()
            assert [int(bar.get_attribute("data-drafted") or -1) for bar in bars] == [r["num_drafted"] for r in steps]
            names = [bar.get_attribute("aria-label") or "" for bar in bars]
            for number, (name, r) in enumerate(zip(names, steps, strict=True), 1):
                assert name.startswith(f"Step {number}: {r['num_drafted']} drafted, {r['num_accepted']} accepted;")
                assert name.endswith(r["stop_reason"])


def test_figures_are_those_of_the_reply(opened: Callable[..., Page], url: str) -> None:
    """Catches a mean over something else, and a speed-up that is not over the target beside it, or not of the shown rates."""
    page = opened(url)
    generated(page, policies=("fixed:4", "none"))
    expected = told(url, policy="fixed:4")
    figures = {name: lane(page).locator(f"[data-figure={name}]").inner_text() for name in ("length", "accepted", "tokens")}
    assert figures["length"] == f"{expected['mean_acceptance_length']:.2f}"
    assert figures["accepted"] == f"{100 * expected['draft_acceptance_rate']:.0f} %"
    assert figures["tokens"] == f"{expected['num_tokens']} in {expected['num_spec_steps']}"
    rates = [span(lane(page, i).locator("[data-figure=rate]").inner_text()) for i in (0, 1)]
    speedups = [lane(page, i).locator("[data-figure=speedup]").inner_text().removesuffix("\u00d7") for i in (0, 1)]
    low, high = span(speedups[0])
    assert low <= rates[0][1] / rates[1][0]
    assert rates[0][0] / rates[1][1] <= high
    assert speedups[1] == "1.00"
    assert "as measured beside it" in lane(page).locator(".baseline").inner_text()
    page.get_by_label("compare two rules").uncheck()
    page.get_by_role("button", name="Generate", exact=True).click()
    finished(page)
    assert "as measured before" in lane(page).locator(".baseline").inner_text()
    alone = opened(url)
    generated(alone, policies=("fixed:4",))
    assert "which costs" in lane(alone).locator(".baseline").inner_text()


def test_bars_are_as_high_as_candidates_were_drafted_and_accepted(opened: Callable[..., Page], url: str) -> None:
    """Catches heights that do not follow the counts, where the eye does not read the label."""
    page = opened(url)
    generated(page, policies=("cumulative:0.2",))
    (steps,) = told(url, policy="cumulative:0.2")["rounds"]
    heights = [
        [float(bar.evaluate(f"bar => parseFloat(getComputedStyle(bar, '{part}').height)")) for part in ("::before", "::after")]
        for bar in lane(page).locator(".strip button").all()
    ]
    most = max(r["num_drafted"] for r in steps)
    unit = max(height for height, _ in heights) / most
    assert unit > 2
    expected = [[unit * r["num_drafted"], unit * r["num_accepted"]] for r in steps]
    for found, wanted in zip(heights, expected, strict=True):
        assert found == pytest.approx(wanted, abs=3.1), "an empty outline has its border's height"


def test_a_token_tells_p_q_estimate_and_outcome(opened: Callable[..., Page], url: str) -> None:
    """Catches figures of another token, and a correction that does not name the draft token it replaced."""
    page = opened(url)
    generated(page, policies=("specdecpp",))
    (steps,) = told(url, policy="specdecpp")["rounds"]
    pieces = [(piece, r) for r in steps for piece in r["pieces"]]
    met: list[str] = []
    for span, (piece, r) in zip(lane(page).locator(".answer > span").all(), pieces, strict=True):
        if piece["origin"] != "correction" and met.count(piece["origin"]) > 2:
            continue
        met.append(piece["origin"])
        span.hover()
        card = page.get_by_role("tooltip")
        expect(card.locator(".fate")).to_contain_text(f"{piece['origin']}:")
        assert span.get_attribute("aria-describedby") == "card"
        rows = dict(zip(texts(card.locator("dt")), texts(card.locator("dd")), strict=True))
        assert card.locator("p").first.text_content() == visible(piece["text"])
        assert rows["p, the target's"] == chance(piece["p"])
        if piece["origin"] == "bonus":
            assert rows["q, the draft's"].startswith("none")
        else:
            assert rows["q, the draft's"] == chance(piece["q"])
        if piece["origin"] == "accepted":
            assert rows["the head's estimate"] == chance(piece["estimate"])
        if piece["origin"] == "correction":
            lost = r["candidates"][r["num_accepted"]]
            assert rows["replaces"] == visible(lost["text"])
            assert rows["which had"] == f"p {chance(lost['p'])}, q {chance(lost['q'])}, estimate {chance(lost['estimate'])}"
    assert set(met) == set(KINDS)
    assert any(0 < r["num_accepted"] < r["num_drafted"] for r in steps), "one whose first draft token is not the replaced one"
    page.mouse.move(1, 1)
    expect(page.get_by_role("tooltip")).to_be_hidden()


def test_the_curve_is_the_survival_of_the_round_in_hand(opened: Callable[..., Page], url: str) -> None:
    """Catches a curve of another step, a threshold at another height, and marks that do not say what became of a draft
    token."""
    page = opened(url)
    generated(page, policies=("cumulative:0.2",))
    (steps,) = told(url, policy="cumulative:0.2")["rounds"]
    number = max(range(len(steps)), key=lambda i: steps[i]["num_drafted"])
    lane(page).locator(".strip button").nth(number).hover()
    figure = lane(page).locator("figure")
    expect(figure.locator("figcaption")).to_contain_text(
        f"Step {number + 1}: survival, the product of q; dashed: the threshold, 0.20."
    )
    points = (figure.locator(".line").get_attribute("points") or "").split()
    heights = [float(point.split(",")[1]) for point in points]
    zero, one = (
        float((figure.locator(kind).first.get_attribute("points") or "").split(",")[1].split()[0])
        for kind in (".axis", ".grid >> nth=1")
    )
    assert [(zero - height) / (zero - one) for height in heights] == pytest.approx([1.0, *steps[number]["survival"]], abs=1e-6)
    dashed = float((figure.locator(".floor").get_attribute("points") or "").split(",")[1].split()[0])
    assert (zero - dashed) / (zero - one) == pytest.approx(0.2)
    marks = [(mark.get_attribute("class") or "").split()[1] for mark in figure.locator(".mark").all()]
    assert marks == [candidate["outcome"] for candidate in steps[number]["candidates"]]
    card = page.get_by_role("tooltip")
    assert f"{steps[number]['num_drafted']} drafted" in (card.text_content() or "")
    assert steps[number]["stop_reason"] in (card.text_content() or "")
    assert lane(page).locator(".answer .shown").count() == len(steps[number]["pieces"])


def test_a_rule_without_a_constant_threshold_shows_that_of_every_step(opened: Callable[..., Page], url: str) -> None:
    """Catches a default rule whose curve has nothing to be compared with."""
    page = opened(url)
    generated(page, policies=("cost-aware",))
    lane(page).locator('.strip button:not([data-drafted="0"])').first.hover()
    expect(lane(page).locator("figure .floor")).to_have_count(1)
    expect(lane(page).locator("figcaption")).to_contain_text("dashed: the threshold")
    generated(page, policies=("fixed:4",))
    expect(lane(page).locator("figure .floor")).to_have_count(0)


def test_the_tree_of_a_round_is_drawn_with_the_branch_that_was_accepted(opened: Callable[..., Page], url: str) -> None:
    """Catches the tree of another step, children beside another parent, and a branch that is not the accepted one."""
    page = opened(url)
    generated(page, policies=("tree:4x2",))
    (steps,) = told(url, policy="tree:4x2")["rounds"]
    number = max(range(len(steps)), key=lambda i: steps[i]["num_accepted"])
    tree = steps[number]["tree"]
    lane(page).locator(".strip button").nth(number).hover()
    figure = lane(page).locator("figure")
    expect(figure.locator("figcaption")).to_contain_text(f"Step {number + 1}: a tree of {len(tree)} draft tokens")
    marks = figure.locator(".mark").all()
    assert [(mark.get_attribute("class") or "").split()[1] for mark in marks] == [node["outcome"] for node in tree]
    accepted = [visible(node["text"]) for node in tree if node["outcome"] == "accepted"]
    assert len(accepted) == steps[number]["num_accepted"] > 0
    expect(figure.locator("svg")).to_have_attribute("aria-label", re.compile(re.escape(f"accepted: {', '.join(accepted)}.")))
    boxes = [mark.bounding_box() for mark in marks]
    for node, box in zip(tree, boxes, strict=True):
        before = boxes[node["parent"]] if node["parent"] >= 0 else None
        assert box is not None
        assert before is None or box["x"] > before["x"]
    columns = {round(box["x"] + box["width"] / 2) for box in boxes if box is not None}
    assert len(columns) == 1 + max(depths(tree))
    assert figure.locator(".line").count() == len(accepted)


def depths(tree: list[dict[str, Any]]) -> list[int]:
    found: list[int] = []
    for node in tree:
        found.append(0 if node["parent"] < 0 else found[node["parent"]] + 1)
    return found


def test_kinds_of_tokens_differ_by_more_than_colour(opened: Callable[..., Page], url: str) -> None:
    """Catches a legend that shows something else than the text, and two kinds with one shape."""
    page = opened(url)
    generated(page, policies=("fixed:4",))
    for kind, line in KINDS.items():
        for place in (page.locator(f".legend .{kind}"), lane(page).locator(f".answer .{kind}").first):
            assert place.evaluate("place => getComputedStyle(place).textDecorationStyle") == line


def test_it_is_live(opened: Callable[..., Page], endless_url: str) -> None:
    """Catches a page that waits for the whole answer: the beginning is there, with figures, while the rest is being made."""
    page = opened(endless_url)
    fill(page, policies=("fixed:2", "none"), max_tokens=MANY)
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(lane(page).locator(".strip button").nth(10)).to_be_attached()
    expect(lane(page).locator("[data-figure=rate]")).to_have_text(re.compile(r"\d"))
    assert lane(page).locator(".answer").text_content()
    assert page.locator("#run").inner_text() == "Stop"
    page.get_by_role("button", name="Stop", exact=True).click()
    finished(page)


def test_stop_frees_the_request(opened: Callable[..., Page], endless_url: str, counter: Callable[[str], float]) -> None:
    """Catches a button that only hides what goes on, and work that is left behind."""
    before = counter('specdecpp_requests_total{outcome="cancelled"}')
    page = opened(endless_url)
    fill(page, policies=("fixed:2", "none"), max_tokens=MANY)
    page.get_by_role("button", name="Generate", exact=True).click()
    for i in (0, 1):
        expect(lane(page, i).locator(".strip button").nth(4)).to_be_attached()
    assert counter("specdecpp_requests_running") == 2
    page.get_by_role("button", name="Stop", exact=True).click()
    finished(page)
    expect(page.locator("#status")).to_contain_text("stopped")
    until = time.monotonic() + PATIENCE_MS / 1000
    while counter("specdecpp_requests_running") and time.monotonic() < until:
        time.sleep(0.02)
    assert counter("specdecpp_requests_running") == counter("specdecpp_requests_waiting") == 0
    assert counter('specdecpp_requests_total{outcome="cancelled"}') == before + 2
    num = lane(page).locator(".answer > span").count()
    assert 0 < num < MANY
    generated(page, policies=("fixed:2",), max_tokens=4)
    assert lane(page).locator(".answer > span").count() == 4


def test_it_can_be_used_with_the_keyboard_alone(opened: Callable[..., Page], url: str) -> None:
    """Catches a control without a tab stop, one that takes the focus and keeps it, and focus that cannot be seen."""
    page = opened(url)
    page.locator("#model:not(:empty)").wait_for()
    focus = page.locator(":focus")
    stops = []
    for _ in range(14):
        page.keyboard.press("Tab")
        stops.append(focus.evaluate("e => e.id || e.className || e.textContent"))
        assert focus.evaluate("e => getComputedStyle(e).outlineStyle") == "solid", stops[-1]
    assert {"theme", "prompt", "kind", "max_tokens", "temperature", "seed", "run", "compare", "policy"} <= set(stops)
    page.locator("#prompt").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type(PROMPT)
    page.keyboard.press("Control+Enter")
    finished(page)
    while focus.evaluate("e => e.parentElement.className") != "answer":
        page.keyboard.press("Tab")
    for key, expected in (("ArrowRight", 1), ("ArrowDown", 2), ("ArrowLeft", 1), ("Home", 0)):
        page.keyboard.press(key)
        assert focus.evaluate("e => [...e.parentElement.children].indexOf(e)") == expected
    expect(page.get_by_role("tooltip")).to_contain_text("p, the target's")
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_be_hidden()
    page.keyboard.press("Tab")
    page.keyboard.press("End")
    num = lane(page).locator(".strip button").count()
    expect(page.get_by_role("tooltip")).to_contain_text(f"Step {num}:")
    page.keyboard.press("Tab")
    assert focus.evaluate("e => e.className") == "policy", "one tab stop for all tokens and one for all steps"
    expect(page.get_by_role("tooltip")).to_be_hidden()


def test_errors_are_shown_as_the_server_says_them(opened: Callable[..., Page], url: str) -> None:
    """Catches an error that is swallowed, rephrased, or shown elsewhere, and one that stays when all is well."""
    page = opened(url, expects=("status of 400",))
    generated(page, temperature=5)
    problem = page.locator("#problem")
    assert problem.get_attribute("role") == "alert"
    expect(problem).to_have_text(refusal(url, temperature=5))
    assert page.locator("[aria-invalid]").evaluate_all("all => all.map(e => e.id)") == ["temperature"]
    generated(page, temperature=1, max_tokens=5000)
    expect(problem).to_contain_text("do not fit the context of 1024")
    fill(page, policies=("fixed:2", "other"))
    lane(page, 1).locator(".spec").fill("cumulativ:0.3")
    page.get_by_role("button", name="Generate", exact=True).click()
    finished(page)
    expect(problem).to_be_hidden()
    expect(lane(page, 1).locator(".problem")).to_have_text(refusal(url, speculative={"policy": "cumulativ:0.3"}))
    assert lane(page, 0).locator(".answer").text_content() == told(url, policy="fixed:2")["text"], "the other answers on"
    lane(page, 1).locator(".spec").fill("cumulative:0.3")
    page.get_by_role("button", name="Generate", exact=True).click()
    finished(page)
    expect(page.locator(".problem:visible")).to_have_count(0)
    assert lane(page, 1).locator(".answer").text_content() == told(url, policy="cumulative:0.3")["text"]


def refusal(url: str, **asked: Any) -> str:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 48} | asked
    reply = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_MS / 1000)
    return reply.json()["error"]["message"]


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
    generated(page)
    expect(page.locator("#problem")).to_contain_text("this server needs its key")
    field.fill("sesame")
    generated(page, max_tokens=4)
    expect(page.locator(".problem:visible")).to_have_count(0)
    expect(page.locator("#model")).to_contain_text("reference")
    assert lane(page).locator(".answer > span").count() == 4


def test_a_server_that_goes_away_is_told_of(
    opened: Callable[..., Page], serve: Callable[..., Service], endless: tuple[str, ...]
) -> None:
    """Catches a page that waits forever, and half an answer that is shown as a whole one."""
    service = serve(*endless)
    page = opened(service.url, expects=("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING"))
    fill(page, policies=("none",), max_tokens=MANY)
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(lane(page).locator(".strip button").nth(4)).to_be_attached()
    service.process.kill()
    finished(page)
    expect(lane(page).locator(".problem")).to_contain_text("broke off")
    assert lane(page).locator(".answer").text_content(), "what has come stays"
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(lane(page).locator(".problem")).to_contain_text("cannot be reached")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("policies", [("cumulative:0.2",), ("cumulative:0.2", "none")], ids=["one", "two"])
def test_nothing_is_wider_than_the_window(opened: Callable[..., Page], url: str, width: int, policies: tuple[str, ...]) -> None:
    """Catches a table, a bar or a long word that pushes the page wide; two answers stand side by side where there is room."""
    page = opened(url, viewport={"width": width, "height": 800}, has_touch=width == 360)
    generated(page, policies=policies, prompt="x" * 300)
    lane(page).locator(".answer > span").first.evaluate("span => span.append('x'.repeat(300))")
    lane(page).locator(".strip button").first.hover()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    card = page.get_by_role("tooltip").bounding_box()
    assert card is not None
    assert card["x"] >= 0
    assert card["x"] + card["width"] <= width
    for place in page.locator("button:visible, select:visible, input:visible, dd, h2, figure, .answer").all():
        box = place.bounding_box()
        if box is not None and not place.evaluate("e => Boolean(e.closest('.strip'))"):
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width + 0.5
    if len(policies) == 2:
        first, second = (lane(page, i).bounding_box() for i in (0, 1))
        assert first
        assert second
        assert (first["y"] == second["y"]) == (width >= 820)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out(opened: Callable[..., Page], url: str, theme: str) -> None:
    """Catches colours below 4.5 to 1 (WCAG 2.2, AA), in either theme and by either way to it."""
    page = opened(url, color_scheme=theme)
    generated(page, policies=("fixed:4", "none"))
    assert weak(page) == []
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    other = {"light": "dark", "dark": "light"}[theme]
    page.get_by_label("Theme").select_option(other)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert weak(page) == []
    page.reload()
    assert page.get_by_label("Theme").input_value() == other, "it is kept"
    page.get_by_label("Theme").select_option("")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == before


def weak(page: Page) -> list[str]:
    """What is written in a colour too near to that behind it."""
    return page.evaluate(
        """() => {
          const parse = (text) => text.match(/[\\d.]+/g).map(Number);
          const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
            .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
          const behind = (e) => {
            for (; e; e = e.parentElement) {
              const colour = parse(getComputedStyle(e).backgroundColor);
              if (colour.length === 3 || colour[3] > 0) return colour;
            }
          };
          const found = [];
          const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
          while (walker.nextNode()) {
            const e = walker.currentNode.parentElement;
            if (!walker.currentNode.data.trim() || !e.checkVisibility() || ["SCRIPT", "STYLE"].includes(e.tagName)) continue;
            const style = getComputedStyle(e);
            const [a, b] = [light(parse(e instanceof SVGElement ? style.fill : style.color)), light(behind(e))];
            const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            if (ratio < 4.5) found.push(`${walker.currentNode.data.trim()}: ${ratio.toFixed(2)}`);
          }
          return found;
        }"""
    )


def test_everything_has_a_name(opened: Callable[..., Page], url: str) -> None:
    """Catches a control or picture without a name, an id that is there twice, a label for nothing, and a heading that skips."""
    page = opened(url)
    generated(page, policies=("fixed:4", "none"))
    nameless = page.locator("button, select, input, textarea, [role=group], [role=img], section").evaluate_all(
        "all => all.filter((e) => e.checkVisibility() && !(e.getAttribute('aria-label') || e.labels?.length || "
        "(e.tagName === 'BUTTON' && e.textContent.trim()))).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert nameless == []
    ids = page.locator("[id]").evaluate_all("all => all.map((e) => e.id)")
    assert len(ids) == len(set(ids))
    for target in page.locator("label[for], [aria-describedby]").evaluate_all(
        "all => all.map((e) => e.htmlFor ?? e.getAttribute('aria-describedby'))"
    ):
        assert target in ids
    levels = page.locator("h1, h2, h3").evaluate_all("all => all.map((e) => Number(e.tagName[1]))")
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    assert page.locator("html").get_attribute("lang") == "en"
    live = page.locator("[aria-live], [role=status], [role=alert]").evaluate_all("all => all.map((e) => e.className)")
    assert sorted(live) == ["problem", "problem", "problem", "unseen"], "a stream of tokens is not read out"
    controls = page.locator("form button, form select, form input:not([type=checkbox]), .policy")
    sizes = controls.evaluate_all("all => all.filter((e) => e.checkVisibility()).map((e) => [e.offsetWidth, e.offsetHeight])")
    assert all(min(size) >= 24 for size in sizes), "WCAG 2.2, 2.5.8"


def test_who_wants_less_motion_gets_none(opened: Callable[..., Page], url: str) -> None:
    """Catches motion that does not ask."""
    moving = "e => [getComputedStyle(e).animationName, getComputedStyle(e, '::after').transitionDuration]"
    for motion, expected in (("reduce", [["none", "0s"]] * 2), ("no-preference", [["come", "0s"], ["none", "0.15s"]])):
        page = opened(url, reduced_motion=motion)
        generated(page, max_tokens=8)
        places = (lane(page).locator(".answer > span").first, lane(page).locator(".strip button").first)
        assert [place.evaluate(moving) for place in places] == expected


def test_tokens_without_text_and_breaks_can_be_met(opened: Callable[..., Page], url: str) -> None:
    """Catches bytes of a character, or the end of the text, that nobody can point at, and marks that get into the text."""
    prompt, hot = "\u3053\u3093\u306b\u3061\u306f\n", {"temperature": 2, "max_tokens": 96}
    asked = ({"seed": seed, **hot} for seed in range(50))
    answers = ((options, told(url, policy="fixed:4", prompt=prompt, path="completions", **options)) for options in asked)
    options, expected = next((o, a) for o, a in answers if "\n" in a["text"] and any(not p["text"] for p in pieces_of(a)))
    page = opened(url)
    page.locator("#kind").select_option("text")
    generated(page, policies=("fixed:4",), prompt=prompt, **options)
    assert lane(page).locator(".answer").text_content() == expected["text"]
    silent = [piece for piece in pieces_of(expected) if not piece["text"]]
    places = lane(page).locator(".answer > .silent")
    assert places.count() == len(silent) > 0
    for place in places.all()[:3]:
        assert place.evaluate("e => e.getBoundingClientRect().width") > 2
    assert lane(page).locator(".answer .break").count() == expected["text"].count("\n") > 0
    places.first.hover()
    expect(page.get_by_role("tooltip")).to_contain_text("no text of its own")


def test_both_answers_have_the_seed_that_is_shown(opened: Callable[..., Page], url: str) -> None:
    """Catches two answers that differ by luck where no seed is given: the same rule must say the same."""
    page = opened(url)
    fill(page, policies=("fixed:4", "fixed:4"))
    page.locator("#seed").fill("")
    page.get_by_role("button", name="Generate", exact=True).click()
    finished(page)
    seed = int(page.locator("#seed").input_value())
    first, second = (lane(page, i).locator(".answer").text_content() for i in (0, 1))
    assert first == second == told(url, policy="fixed:4", seed=seed)["text"]


def test_examples_fill_the_prompt(opened: Callable[..., Page], url: str) -> None:
    """Catches a button that does nothing, and one that sends the form."""
    page = opened(url)
    buttons = page.get_by_role("group", name="Example prompts").get_by_role("button").all()
    assert len(buttons) >= 3
    found = set()
    for button in buttons:
        button.click()
        found.add(page.locator("#prompt").input_value())
    assert len(found) == len(buttons)
    assert page.locator("#run").inner_text() == "Generate"
    assert lane(page).locator(".answer").text_content() == ""
