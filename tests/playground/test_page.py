"""The page in a real browser: what a visitor does, and what must never happen."""

import base64
import io
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from playwright.sync_api import Page, Route, expect

from capsnet import CapsNet, CapsNetConfig
from capsnet.playground.networks import TrainedNetwork

pytestmark = pytest.mark.page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
PATIENCE = 30_000  # milliseconds
expect.set_options(timeout=PATIENCE)
Serve = Callable[[list[TrainedNetwork]], AbstractContextManager[str]]


@pytest.fixture(scope="session")
def browser_type_launch_args() -> dict[str, object]:
    if CHROMIUM is None:
        sentence = "there is no chromium (tests/install-browser installs it)"
        if os.environ.get("CI") == "true":
            pytest.fail(sentence)
        pytest.skip(sentence)
    return {"executable_path": CHROMIUM, "args": FLAGS}


@pytest.fixture(scope="session")
def base_url() -> None:
    """Takes the place of pytest-playwright's own, which pytest 9 warns of."""


@pytest.fixture(scope="session")
def address(
    browser_type_launch_args: dict[str, object], trained: list[TrainedNetwork], background: Serve
) -> Iterator[str]:
    with background(trained) as address:
        yield address


@pytest.fixture
def visit(page: Page) -> Iterator[Callable[[str], Page]]:
    """Opens an address; at the end there must be no error and no request to elsewhere."""
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.set_default_timeout(PATIENCE)

    def open_page(address: str) -> Page:
        page.goto(address)
        settle(page)
        return page

    yield open_page
    assert complaints == []
    assert requests
    assert [url for url in requests if not url.startswith(("http://127.0.0.1:", "data:"))] == []


def settle(page: Page) -> None:
    """Waits until the page is built and every question it asked is answered and shown."""
    page.wait_for_selector("html[data-ready]:not([data-asking])")


def pixels(page: Page, canvas: str) -> np.ndarray:
    """Levels of a canvas, (H, W, 4)."""
    text = page.locator(canvas).first.evaluate("(canvas) => canvas.toDataURL()")
    content = base64.b64decode(text.partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGBA"))


def difference(page: Page, canvas: str, levels: np.ndarray) -> int:
    """Largest difference of a canvas from former levels; 256 if its size is another."""
    now = pixels(page, canvas).astype(int)
    return int(np.abs(now - levels).max()) if now.shape == levels.shape else 256


def eventually(page: Page, claim: Callable[[], bool]) -> None:
    """Waits until the claim holds."""
    for _ in range(PATIENCE // 50):
        if claim():
            return
        page.wait_for_timeout(50)
    raise AssertionError("it never came true")


def draw(page: Page, canvas: str, *strokes: list[tuple[float, float]], steps: int = 6) -> None:
    """Draws strokes, whose points are shares of the canvas's width and height.

    From one to the next the pen makes so many steps, each of which takes the browser a while.
    """
    box = page.locator(canvas).bounding_box()
    assert box is not None
    for stroke in strokes:
        points = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in stroke]
        page.mouse.move(*points[0])
        page.mouse.down()
        for point in points[1:]:
            page.mouse.move(*point, steps=steps)
        page.mouse.up()


def touch(page: Page, canvas: str, *events: tuple[str, int, float, float]) -> None:
    """Sends pointers down, move and up: which pointer, and its place as a share of the canvas."""
    page.locator(canvas).evaluate(
        """(canvas, events) => {
          canvas.setPointerCapture = () => {};
          const box = canvas.getBoundingClientRect();
          for (const [type, pointerId, x, y] of events) {
            const place = { clientX: box.left + x * box.width, clientY: box.top + y * box.height };
            canvas.dispatchEvent(new PointerEvent(`pointer${type}`, { pointerId, ...place }));
          }
        }""",
        [list(event) for event in events],
    )


def test_a_drawn_one_is_recognised(visit: Callable[[str], Page], address: str) -> None:
    page = visit(address)
    draw(page, "#pad canvas", [(0.56, 0.16), (0.5, 0.5), (0.44, 0.85)])
    expect(page.locator("#lengths .best .name")).to_have_text("1")
    expect(page.locator("#verdict")).to_contain_text("a 1.")
    assert float(page.locator("#lengths .best .value").inner_text()) > 0.5


def test_turning_a_number_redraws_the_digit_and_reset_brings_it_back(
    visit: Callable[[str], Page], address: str
) -> None:
    page = visit(f"{address}/#input=t0")
    expect(page.locator("#verdict")).to_contain_text("a 7")
    before = pixels(page, "#reconstruction")
    assert before[..., 0].max() > 100
    slider = page.get_by_label("3", exact=True).and_(page.locator("[type=range]"))
    with page.expect_response("**/api/reconstruct") as response:
        slider.fill("0.4")
    assert response.value.ok
    eventually(page, lambda: difference(page, "#reconstruction", before) > 8)
    page.locator("#reset").click()
    expect(slider).to_have_value("0")
    eventually(page, lambda: difference(page, "#reconstruction", before) <= 1)


def test_a_late_answer_does_not_undo_a_reset(visit: Callable[[str], Page], address: str) -> None:
    page = visit(f"{address}/#input=t0")
    before = pixels(page, "#reconstruction")
    held: list[Route] = []
    page.route("**/api/reconstruct", lambda route: held.append(route))
    page.locator("#dimension-3").fill("0.4")
    eventually(page, lambda: bool(held))
    page.locator("#dimension-3").fill("0.3")  # waits for the first
    page.locator("#reset").click()
    held[0].continue_()
    settle(page)
    assert len(held) == 1
    assert difference(page, "#reconstruction", before) == 0


def test_another_digit_in_another_view_is_not_turned_nor_of_the_chosen_class(
    visit: Callable[[str], Page], address: str
) -> None:
    page = visit(f"{address}/#input=t0")
    page.locator("#dimension-3").fill("0.4")
    page.locator("#tab-routing").click()
    expect(page.locator("#routing-class")).to_have_text("7")
    page.keyboard.press("n")
    expect(page.locator("#routing-class")).to_have_text("2")
    page.locator("#tab-digit").click()
    expect(page.locator("#verdict")).to_contain_text("a 2")
    expect(page.locator("#dimension-3")).to_have_value("0")
    expect(page.locator(".chosen-name").first).to_have_text("2")


def test_playing_sweeps_a_number_until_stopped(visit: Callable[[str], Page], address: str) -> None:
    page = visit(f"{address}/#input=t0")
    slider = page.locator("#dimension-4")
    play = page.get_by_role("button", name="Sweep number 4")
    play.click()
    page.wait_for_function("() => Math.abs(document.querySelector('#dimension-4').value) > 0.2")
    eventually(page, lambda: "offsets" in page.url)  # while it plays
    play.click()
    value = slider.input_value()
    page.wait_for_timeout(100)
    assert slider.input_value() == value
    play.click()
    page.locator("#tab-compare").click()
    expect(page.locator("#view-digit .playing")).to_have_count(0)


def test_another_address_stops_a_sweep_before_it_is_shown(
    visit: Callable[[str], Page], address: str
) -> None:
    page = visit(f"{address}/#input=t0")
    held: list[Route] = []
    page.route("**/api/digits/1", lambda route: held.append(route))
    page.get_by_role("button", name="Sweep number 4").click()
    page.wait_for_function("() => Math.abs(document.querySelector('#dimension-4').value) > 0.1")
    # What the page itself writes in the meantime does not undo it.
    page.evaluate("() => { location.hash = 'input=t1'; dispatchEvent(new Event('beforeunload')); }")
    eventually(page, lambda: bool(held))
    page.wait_for_timeout(200)
    held[0].continue_()
    expect(page.locator("#verdict")).to_contain_text("a 2")
    expect(page.locator("#lengths .chosen .name")).to_have_text("2")
    expect(page.locator("#dimension-4")).to_have_value("0")


def test_another_class_can_be_reconstructed(visit: Callable[[str], Page], address: str) -> None:
    page = visit(f"{address}/#input=t0")
    before = pixels(page, "#reconstruction")
    with page.expect_response("**/api/reconstruct"):
        page.locator("#lengths input[value='2']").check()
    expect(page.locator(".pictures-card h2")).to_have_text("What capsule 2 describes")
    eventually(page, lambda: difference(page, "#reconstruction", before) > 20)
    page.locator("#all-dimensions").click()
    expect(page.locator("#glance canvas")).to_have_count(16 * 11)
    expect(page.locator("#glance span").first).to_have_text("0")  # numbered as fig4 does
    eventually(page, lambda: "glance" in page.url)
    page.reload()
    expect(page.locator("#glance canvas")).to_have_count(16 * 11)


def test_routing_is_shown_iteration_by_iteration(
    visit: Callable[[str], Page], address: str
) -> None:
    page = visit(f"{address}/#view=routing&input=t0")
    expect(page.locator("#maps canvas")).to_have_count(3 * 10)
    expect(page.locator("#routing-class")).to_have_text("7")
    expect(page.locator("#parts li")).to_have_count(8)
    first = pixels(page, "#maps .cell:nth-of-type(18) canvas")
    assert len(np.unique(first.reshape(-1, 4), axis=0)) == 1  # the shares are even at first
    before = pixels(page, "#overlay")
    page.locator("#parts button").first.hover()
    eventually(page, lambda: difference(page, "#overlay", before) > 0)
    page.get_by_text("Agreement").click()
    page.locator("#iterations").select_option("5")
    expect(page.locator("#maps canvas")).to_have_count(5 * 10)


def test_a_chosen_map_ends_the_play_of_iterations(
    visit: Callable[[str], Page], address: str
) -> None:
    page = visit(f"{address}/#view=routing&input=t0")
    page.locator("#play-routing").click()
    last = page.get_by_label("coupling with 4 in iteration 3")
    last.click()
    expect(last).to_have_attribute("aria-pressed", "true")
    page.wait_for_timeout(1000)  # the next iteration would have come
    assert last.get_attribute("aria-pressed") == "true"


def test_two_digits_are_dragged_and_taken_apart(visit: Callable[[str], Page], address: str) -> None:
    page = visit(f"{address}/#view=pair&a=t3&b=t0")
    expect(page.locator("#pair-verdict")).to_contain_text("0 (red) and a 7 (green)")
    found = pixels(page, "#pair-found").astype(int)
    assert ((found[..., 0] - found[..., 1]) > 60).any()  # red somewhere
    assert ((found[..., 1] - found[..., 0]) > 60).any()  # green elsewhere
    truth = pixels(page, "#pair-truth")
    box = page.locator("#stage").bounding_box()
    assert box is not None
    pixel = box["width"] / 36
    page.mouse.move(box["x"] + 24 * pixel, box["y"] + 29 * pixel)  # the foot of the 7
    page.mouse.down()
    with page.expect_response("**/api/segment"):
        page.mouse.move(box["x"] + 22 * pixel, box["y"] + 27 * pixel, steps=2)
    page.mouse.up()
    page.locator("#stage").press("ArrowLeft")
    page.wait_for_function("() => decodeURIComponent(location.hash).includes('shifts=-3,-2,0,0')")
    eventually(page, lambda: difference(page, "#pair-truth", truth) > 0)


def test_drawn_digits_are_taken_apart_too(visit: Callable[[str], Page], address: str) -> None:
    page = visit(f"{address}/#view=pair&a=s&b=t3&shifts=0,0,0,0")
    with page.expect_response("**/api/segment"):
        draw(page, "#pad-a canvas", [(0.55, 0.15), (0.45, 0.85)])
    expect(page.locator("#pair-verdict")).to_contain_text("It found a")


def test_two_sets_of_weights_are_compared(visit: Callable[[str], Page], address: str) -> None:
    page = visit(f"{address}/#view=compare&input=t0")
    expect(page.locator("#compare-verdict")).to_contain_text("7")
    page.get_by_label("Weights 2").select_option("multimnist")
    expect(page.locator("#compare-b .hint")).to_contain_text("parameters")
    expect(page.locator("#compare-b .bar")).to_have_count(10)


def test_no_verdict_is_given_on_answers_to_two_digits(page: Page, address: str) -> None:
    page.goto(f"{address}/#view=compare&input=t0")
    expect(page.locator("#compare-verdict")).to_contain_text("7")

    def refuse_the_second(route: Route) -> None:
        if (route.request.post_data_json or {})["num_iterations"] is None:
            route.fulfill(status=429, json={"error": "Later."})
        else:
            route.continue_()

    page.route("**/api/predict", refuse_the_second)
    page.keyboard.press("n")
    expect(page.locator("#message")).to_have_text("Later.")
    expect(page.locator("#compare-a .best .name")).to_have_text("2")
    expect(page.locator("#compare-verdict")).to_have_text("")


@pytest.mark.parametrize("view", ["compare", "digit"])
def test_no_late_answer_brings_back_the_verdict_on_the_digit_before(
    page: Page, address: str, view: str
) -> None:
    waiting: list[Route] = []
    page.route("**/api/predict", lambda route: waiting.append(route))
    verdict = page.locator("#verdict" if view == "digit" else "#compare-verdict")

    def wait_for(count: int) -> list[Route]:
        while len(waiting) < count:
            page.wait_for_timeout(20)
        asked = waiting[:]
        waiting.clear()
        return asked

    count = 1 if view == "digit" else 2
    page.goto(f"{address}/#view={view}&input=t0")
    first = wait_for(count)
    page.keyboard.press("n")
    expect(page).to_have_url(re.compile("input=t1"))
    for route in first:
        route.continue_()
    for route in wait_for(count):
        route.fulfill(status=429, json={"error": "Later."})
    expect(page.locator("#message")).to_have_text("Later.")
    expect(verdict).to_have_text("")


def test_reloading_the_address_shows_the_same_view(
    visit: Callable[[str], Page], address: str
) -> None:
    page = visit(address)
    draw(page, "#pad canvas", [(0.3, 0.2), (0.7, 0.2), (0.45, 0.85)])
    settle(page)
    expect(page.locator("#verdict")).to_contain_text("a 7")
    plain = pixels(page, "#reconstruction")
    page.locator("#dimension-6").fill("0.3")
    eventually(page, lambda: difference(page, "#reconstruction", plain) > 5)
    eventually(page, lambda: "offsets" in page.url)
    settle(page)
    names = ("#seen", "#reconstruction", "#pad canvas")
    before = [pixels(page, name) for name in names]
    verdict = page.locator("#verdict").inner_text()
    page.reload()
    settle(page)
    expect(page.locator("#verdict")).to_have_text(verdict)
    expect(page.locator("#dimension-6")).to_have_value("0.3")
    pairs = list(zip(names, before, strict=True))
    eventually(page, lambda: all(difference(page, name, levels) <= 1 for name, levels in pairs))


def test_an_opened_image_is_turned_light_on_dark_and_shared(
    visit: Callable[[str], Page], address: str, tmp_path: Path
) -> None:
    image = Image.new("RGB", (400, 300), "white")
    ImageDraw.Draw(image).line([(220, 60), (190, 250)], fill="navy", width=26)
    image.save(tmp_path / "one.png")
    page = visit(address)
    page.locator("#pad [type=file]").set_input_files(tmp_path / "one.png")
    expect(page.locator("#lengths .best .name")).to_have_text("1")
    expect(page.locator("#pad .label")).to_contain_text("dark on light: turned light on dark")
    # Another network sees the file, not what this one made of it.
    with page.expect_request("**/api/predict") as asked:
        page.locator("#weights").select_option("multimnist")
    assert list((asked.value.post_data_json or {})["image"]) == ["file"]
    eventually(page, lambda: "input=p" in page.url)
    page.reload()
    expect(page.locator("#lengths .best .name")).to_have_text("1")


def test_an_image_without_ink_gets_no_verdict(
    visit: Callable[[str], Page], address: str, tmp_path: Path
) -> None:
    Image.new("L", (40, 40), 255).save(tmp_path / "white.png")
    page = visit(f"{address}/#input=t0")
    expect(page.locator("#verdict")).to_contain_text("a 7")
    page.locator("#pad [type=file]").set_input_files(tmp_path / "white.png")
    expect(page.locator("#pad .label")).to_have_text("your image: there is no ink in it")
    expect(page.locator("#verdict")).to_have_text("")


def test_the_keyboard_reaches_everything(visit: Callable[[str], Page], address: str) -> None:
    page = visit(f"{address}/#input=t0")
    page.keyboard.press("n")
    expect(page.locator("#verdict")).to_contain_text("a 2")
    page.keyboard.press("p")
    expect(page.locator("#verdict")).to_contain_text("a 7")
    page.locator("#tab-digit").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#view-routing")).to_be_visible()
    expect(page.locator("#tab-routing")).to_be_focused()
    page.keyboard.press("ArrowLeft")
    page.locator("#dimension-0").focus()
    with page.expect_response("**/api/reconstruct"):
        page.keyboard.press("ArrowRight")
    page.locator("#tab-digit").focus()
    page.keyboard.press("c")
    expect(page.locator("#verdict")).to_have_text("")


@pytest.mark.parametrize("view", ["digit", "routing", "pair", "compare"])
def test_a_phone_shows_every_view_without_scrolling_sideways(
    visit: Callable[[str], Page], address: str, page: Page, view: str
) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    visit(f"{address}/#view={view}&input=t4")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    tabs = page.locator(".tabs")  # which scroll by themselves, so that the last might be cut
    assert tabs.evaluate("tabs => tabs.scrollWidth - tabs.clientWidth") == 0


def test_a_spoilt_address_still_opens_the_page(visit: Callable[[str], Page], address: str) -> None:
    page = visit(
        f"{address}/#view=__proto__&weights=none&input=t99999&class=77&offsets=a,,NaN&map=1"
    )
    expect(page.locator("#lengths .bar")).to_have_count(10)
    page = visit(f"{address}/?again#view=pair&a=p%00&b=t0&shifts=9,9,9,9,9&iterations=-1")
    expect(page.locator("#pair-verdict")).to_have_text(
        "A digit is missing: draw one, or step to a test digit."
    )
    page.locator("#pad-a").get_by_role("button", name="Next test digit").click()
    expect(page.locator("#pair-verdict")).to_contain_text("It found")


@pytest.mark.parametrize("number", ["-1", "1.5", "1e1", "10", "x"])
@pytest.mark.parametrize("view", ["digit", "routing"])
def test_a_class_or_step_that_is_none_is_left_out(
    visit: Callable[[str], Page], address: str, view: str, number: str
) -> None:
    offsets = "1e999,-1e999"
    page = visit(f"{address}/#view={view}&class={number}&step={number}&offsets={offsets}")
    chosen = {"digit": ".pictures-card h2", "routing": "#routing-class"}[view]
    expect(page.locator(chosen)).to_contain_text("7")
    expect(page.locator("#message")).to_be_hidden()
    if view == "routing":
        expect(page.locator(".chosen-cell")).to_have_attribute("title", re.compile("iteration 3"))


@pytest.mark.parametrize("picture", ["p", "pAQ", "pAQEB", "pAQICAA", "pAAAA"])
def test_a_picture_that_is_none_leaves_the_pad_empty(
    visit: Callable[[str], Page], address: str, picture: str
) -> None:
    page = visit(f"{address}/#input={picture}&a={picture}&iterations=7&rightIterations=x")
    expect(page.locator("#verdict")).to_have_text("")
    expect(page.locator("#iterations")).to_have_value("7")
    page.locator("#tab-compare").click()
    expect(page.locator("#compare-verdict")).to_contain_text("Draw a digit")
    expect(page.get_by_label("Routing 2")).to_have_value("")
    assert page.get_by_label("Routing 2").evaluate("(select) => select.selectedIndex") == 0


def test_a_slow_test_digit_does_not_hide_what_was_drawn_meanwhile(
    visit: Callable[[str], Page], address: str
) -> None:
    page = visit(f"{address}/#input=s")
    held: list[Route] = []
    page.route("**/api/digits/5", lambda route: held.append(route))
    page.locator("#pad .index").fill("5")
    page.locator("#pad .index").press("Enter")
    eventually(page, lambda: bool(held))
    draw(page, "#pad canvas", [(0.3, 0.2), (0.7, 0.2), (0.45, 0.85)])
    before = pixels(page, "#pad canvas")
    with page.expect_response("**/api/digits/5"):
        held[0].continue_()
    page.wait_for_timeout(200)
    assert difference(page, "#pad canvas", before) == 0
    expect(page.locator("#pad .label")).to_have_text("")


def test_an_error_stays_until_the_same_question_is_answered(page: Page, address: str) -> None:
    page.route("**/api/reconstruct", lambda route: route.fulfill(status=422, json={"error": "No."}))
    page.goto(f"{address}/#input=t0")
    expect(page.locator("#verdict")).to_contain_text("a 7")
    page.locator("#dimension-3").fill("0.3")
    expect(page.locator("#message")).to_have_text("No.")
    page.evaluate(
        """async () => {
          const { Latest } = await import("/api.js");
          await new Latest("/api/predict").ask({ weights: "mnist", image: { test: 0 } }, () => {});
        }"""
    )
    expect(page.locator("#message")).to_have_text("No.")
    page.unroute("**/api/reconstruct")
    page.locator("#dimension-3").fill("0.2")
    expect(page.locator("#message")).to_be_hidden()
    page.route("**/api/reconstruct", lambda route: route.abort())
    page.locator("#dimension-3").fill("0.1")
    expect(page.locator("#message")).to_contain_text("The server does not answer")


def test_a_digit_along_the_edge_is_light_on_dark(
    visit: Callable[[str], Page], address: str
) -> None:
    page = visit(f"{address}/#input=s")
    with page.expect_response("**/api/predict"):
        edge = [(0.02, 0.02), (0.98, 0.02), (0.98, 0.98), (0.02, 0.98), (0.02, 0.02)]
        draw(page, "#pad canvas", edge)
    settle(page)
    seen = pixels(page, "#seen")[..., 0]
    assert seen[14, 14] == 0 < seen.max()


def test_a_second_finger_draws_nothing(visit: Callable[[str], Page], address: str) -> None:
    page = visit(f"{address}/#input=s")
    touch(
        page,
        "#pad canvas",
        ("down", 1, 0.2, 0.2),
        ("down", 2, 0.8, 0.8),
        ("move", 2, 0.8, 0.5),
        ("up", 2, 0.8, 0.5),
        ("move", 1, 0.2, 0.5),
        ("up", 1, 0.2, 0.5),
    )
    settle(page)
    drawn = pixels(page, "#pad canvas")[..., 0]
    side = len(drawn)
    assert drawn[side // 2, side // 5] == 255
    assert drawn[:, side // 2 :].max() == 0


def test_a_test_digit_ends_the_stroke_that_is_being_drawn(
    visit: Callable[[str], Page], address: str
) -> None:
    page = visit(f"{address}/#input=s")
    box = page.locator("#pad canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 40, box["y"] + 40)
    page.mouse.down()
    page.keyboard.press("n")
    expect(page.locator("#pad .label")).to_have_text("labelled 7")
    page.mouse.move(box["x"] + 90, box["y"] + 90, steps=3)
    page.mouse.up()
    expect(page.locator("#pad .label")).to_have_text("labelled 7")


def test_a_second_finger_moves_no_digit(visit: Callable[[str], Page], address: str) -> None:
    page = visit(f"{address}/#view=pair&a=t3&b=t0")
    foot = 24 / 36, 29 / 36  # of the 7
    touch(
        page,
        "#stage",
        ("down", 1, *foot),
        ("down", 2, 5 / 36, 5 / 36),
        ("move", 2, 9 / 36, 9 / 36),
        ("up", 2, 9 / 36, 9 / 36),
        ("move", 1, 23 / 36, 28 / 36),
        ("up", 1, 23 / 36, 28 / 36),
    )
    page.wait_for_function("() => decodeURIComponent(location.hash).includes('shifts=-3,-2,2,1')")


def test_a_long_stroke_goes_on_to_its_end(visit: Callable[[str], Page], address: str) -> None:
    page = visit(f"{address}/#input=s")
    zigzag = [(0.1 + 0.8 * (turn % 2), 0.1 + 0.02 * turn) for turn in range(40)]
    draw(page, "#pad canvas", zigzag, steps=7)  # 273 points, more than one stroke holds
    drawn = pixels(page, "#pad canvas")
    x, y = (round(share * side) for share, side in zip(zigzag[-1], drawn.shape[1::-1], strict=True))
    assert drawn[y, x, 0] == 255
    page.wait_for_timeout(500)  # until the address has followed
    page.reload()
    settle(page)
    eventually(page, lambda: difference(page, "#pad canvas", drawn) <= 1)


def test_routing_keeps_the_focus_and_two_digits_name_the_moved_one(
    visit: Callable[[str], Page], address: str
) -> None:
    page = visit(f"{address}/#view=routing&input=t0")
    cell = page.get_by_role("button", name=re.compile("coupling with 4 in iteration 2"))
    cell.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#routing-class")).to_have_text("4")
    expect(cell).to_be_focused()
    expect(cell).to_have_attribute("aria-pressed", "true")
    page.locator("#tab-pair").click()
    expect(page.locator("#iterations")).to_be_disabled()
    expect(page.locator("#weights")).to_be_disabled()
    expect(page.locator("#pair-weights")).to_contain_text("multimnist takes them apart: trained")
    expect(page.locator("h3.active")).to_have_text("First")
    page.locator("#stage").press(" ")
    expect(page.locator("h3.active")).to_have_text("Second")
    expect(page.locator("#stage")).to_have_attribute("aria-label", re.compile("move the second"))
    page.locator("#tab-digit").click()
    expect(page.locator("#weights")).to_be_enabled()


def test_maps_follow_the_theme_of_the_system(
    visit: Callable[[str], Page], page: Page, address: str
) -> None:
    page.emulate_media(color_scheme="light")
    visit(f"{address}/#view=routing&input=t0")
    expect(page.locator("#maps canvas")).to_have_count(30)
    before = pixels(page, "#maps canvas")
    page.emulate_media(color_scheme="dark")
    eventually(page, lambda: difference(page, "#maps canvas", before) > 50)


def test_light_and_dark_can_be_chosen(visit: Callable[[str], Page], address: str) -> None:
    page = visit(address)
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(colour)
    page.locator("#theme").click()
    assert page.evaluate(colour) != before
    page.reload()
    settle(page)
    assert (chosen := page.evaluate(colour)) != before
    page.goto(f"{address}/docs")
    expect(page.locator("#operations section").first).to_be_visible()
    assert page.evaluate(colour) == chosen


def test_without_weights_for_two_digits_the_page_says_so(
    visit: Callable[[str], Page],
    browser_type_launch_args: dict[str, object],
    small: list[TrainedNetwork],
    background: Serve,
) -> None:
    with background([small[2]]) as address:
        page = visit(f"{address}/#view=pair")
        expect(page.locator("#pair-missing")).to_contain_text("capsnet train multimnist")
        page.locator("#tab-digit").click()
        expect(page.locator("#digit-note")).to_contain_text("no decoder")
        expect(page.locator("#dimension-0")).to_be_disabled()


def test_networks_of_many_long_named_classes_and_odd_sizes_are_shown(
    visit: Callable[[str], Page],
    browser_type_launch_args: dict[str, object],
    page: Page,
    background: Serve,
) -> None:
    config = CapsNetConfig(
        image_height=24, image_width=40, conv_channels=2, primary_types=1, num_classes=60
    )
    names = [f"a very long name of class {number}" for number in range(60)]
    record: dict[str, object] = {"class_names": names, "config": {"data": {"name": "folder"}}}
    with background([TrainedNetwork("wide", CapsNet(config).eval(), record)]) as address:
        visit(f"{address}/#input=t0")
        expect(page.locator("#verdict")).to_contain_text("“a very long name of class")
        expect(page.locator("#verdict")).not_to_contain_text("labelled")
        for view in ("digit", "routing", "compare"):
            page.locator(f"#tab-{view}").click()
            settle(page)
            width = page.evaluate("innerWidth")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        page.locator("#tab-routing").click()
        settle(page)
        overlay = pixels(page, "#overlay")
        assert overlay.shape[0] / overlay.shape[1] == pytest.approx(24 / 40, abs=0.01)


def test_an_image_of_many_pixels_is_scaled_down_before_it_is_sent(
    visit: Callable[[str], Page], address: str, tmp_path: Path
) -> None:
    image = Image.new("L", (4200, 300), 255)
    ImageDraw.Draw(image).line([(2110, 40), (2090, 260)], fill=0, width=26)
    image.save(tmp_path / "one.png")
    page = visit(address)
    page.locator("#pad [type=file]").set_input_files(tmp_path / "one.png")
    expect(page.locator("#pad .label")).to_contain_text("your image")
    expect(page.locator("#lengths .best .name")).to_have_text("1")


def test_the_api_is_documented(visit: Callable[[str], Page], page: Page, address: str) -> None:
    page.goto(f"{address}/docs")
    expect(page.get_by_role("heading", name="POST /api/segment")).to_be_visible()
    visit(address)


def test_two_large_photographs_fit_into_one_request(
    visit: Callable[[str], Page], address: str, tmp_path: Path
) -> None:
    page = visit(f"{address}/#view=pair&a=t3&b=t0")
    noise = np.random.default_rng(8).integers(0, 256, size=(1350, 1350), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    assert (tmp_path / "noise.png").stat().st_size > 1_600_000
    for name in ("a", "b"):
        with page.expect_response("**/api/segment") as answer:
            page.locator(f"#pad-{name} [type=file]").set_input_files(tmp_path / "noise.png")
        assert answer.value.status == 200


def test_networks_of_other_images_take_no_digits_apart(
    visit: Callable[[str], Page],
    browser_type_launch_args: dict[str, object],
    trained: list[TrainedNetwork],
    background: Serve,
) -> None:
    config = CapsNetConfig(
        image_height=36, image_width=36, conv_channels=4, primary_types=2, num_classes=2
    )
    record: dict[str, object] = {"config": {"data": {"name": "folder"}}}
    with background([TrainedNetwork("pets", CapsNet(config).eval(), record), *trained]) as address:
        page = visit(f"{address}/#view=pair&weights=pets")
        expect(page.locator("#pair-weights")).to_contain_text("multimnist takes them apart")


def test_many_bytes_are_packed_and_weak_disagreement_looks_weak(
    visit: Callable[[str], Page], address: str
) -> None:
    page = visit(address)
    length = page.evaluate(
        """async () => {
            const { packBytes, unpackBytes } = await import("./state.js");
            return unpackBytes(packBytes(new Uint8Array(300_000).fill(200))).length;
        }"""
    )
    assert length == 300_000
    weak, strong, none = page.evaluate(
        """async () => {
            const { showMap } = await import("./draw.js");
            const canvas = document.createElement("canvas");
            showMap(canvas, [[-0.0005, -0.5, 0]], 0, 0.5);
            const { data } = canvas.getContext("2d").getImageData(0, 0, 3, 1);
            return [0, 1, 2].map((place) => [...data.slice(4 * place, 4 * place + 3)]);
        }"""
    )
    assert np.abs(np.subtract(weak, none)).max() <= 1
    assert np.abs(np.subtract(strong, none)).max() > 20


def test_undo_takes_a_long_stroke_back_whole(visit: Callable[[str], Page], address: str) -> None:
    page = visit(f"{address}/#input=s")
    circle = [
        (0.5 + 0.4 * math.cos(turn / 20), 0.5 + 0.4 * math.sin(turn / 20)) for turn in range(300)
    ]  # more points than one stroke holds
    draw(page, "#pad canvas", [(0.1, 0.1), (0.2, 0.1)], circle, steps=1)
    settle(page)
    page.get_by_role("button", name="Take the last stroke back").first.click()

    def first_is_left() -> bool:
        address = "new URLSearchParams(location.hash.slice(1))"
        text = page.evaluate(f"() => {address}.get('input').slice(1)")
        strokes = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        return len(strokes) > 0 and len(strokes) == 1 + 2 * strokes[0]

    eventually(page, first_is_left)
