"""The report page in a real Chromium: nothing is asked for, all is reached, and nothing runs off a phone."""

import shutil

import pytest
from _pages import Document, files, page

__all__ = ["files", "page"]  # fixtures

try:
    from playwright.sync_api import sync_playwright
except ModuleNotFoundError:
    sync_playwright = None

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install it with `apt-get install chromium`"),
    pytest.mark.skipif(sync_playwright is None, reason="no playwright here: `pip install 'rlxjax[browser]'`"),
]
DESK = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser, page, tmp_path):
    """A function that shows the page on a desk or a phone; what the browser told of it is in `told`."""
    path, told = tmp_path / "report.html", []
    path.write_text(page, encoding="utf-8")

    def open_on(device, **options):
        shown = browser.new_context(**device, **options).new_page()
        shown.on("request", lambda request: told.append(request.url))
        shown.on("console", lambda message: told.append(message.text))
        shown.on("pageerror", lambda error: told.append(str(error)))
        shown.goto(path.resolve().as_uri())
        return shown

    open_on.told, open_on.address = told, path.resolve().as_uri()
    yield open_on
    for context in browser.contexts:
        context.close()


def tip(shown):
    """Return what the page names, once what was scrolled to is drawn."""
    shown.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return shown.locator("#tip").text_content()


def test_the_page_complains_of_nothing_asks_for_nothing_and_shows_the_figures_of_the_file(opened, page):
    shown, written = opened(DESK), Document(page)
    assert [told for told in opened.told if not told.startswith("data:")] == [opened.address]
    assert shown.evaluate("performance.getEntriesByType('resource').length") == 0
    script = """[...document.querySelectorAll("table")].map((table) => [table.caption.textContent,
        [...table.rows].slice(1).map((row) => [...row.cells].map((cell) =>
            cell.dataset.value === undefined ? cell.textContent : +cell.dataset.value))])"""
    expected = {caption: [list(row.values()) for row in rows] for caption, rows in written.tables.items()}
    assert dict(shown.evaluate(script)) == expected
    marks = [given for _, given in written.elements if given.get("class") == "m"]
    assert shown.locator(".m").count() == len(marks) > 300


@pytest.mark.parametrize("name", ["welch-picks-0", "welch-times-1", "welch-residuals-0", "welch-coefficients-0"])
def test_the_mouse_a_finger_and_the_keyboard_name_a_cell(name, opened):
    shown = opened(DESK)
    picture, marks = shown.locator(f"#{name} .picture"), shown.locator(f"#{name} .m")
    said = marks.evaluate_all("(marks) => marks.map((mark) => mark.dataset.said)")
    marks.first.hover(force=True)
    assert tip(shown) == said[0] != ""
    shown.keyboard.press("Escape")
    assert tip(shown) == ""
    shown.mouse.move(1, 1)
    shown.keyboard.press("Tab")  # so that focus is that of a keyboard
    picture.focus()
    assert tip(shown) == said[0]
    for key, place in (("ArrowRight", 1), ("End", -1), ("Home", 0)):
        shown.keyboard.press(key)
        assert tip(shown) == said[place], key
    shown.keyboard.press("ArrowDown")
    assert tip(shown) in said[1:]
    if name == "welch-picks-0":  # the cell above: of the same batch, of another n_fft
        assert tip(shown).split("\n")[0] == said[0].split("\n")[0]
    assert picture.evaluate("(picture) => getComputedStyle(picture).outlineStyle") == "solid"
    shown.evaluate("scrollBy(0, 40)")
    assert tip(shown) != ""  # which the keyboard reached
    held = opened(PHONE)
    held.locator(f"#{name} .m").first.tap(force=True)
    assert tip(held) == said[0]
    box = held.locator("#tip").bounding_box()
    assert 0 <= box["x"] < box["x"] + box["width"] <= PHONE["viewport"]["width"]
    held.evaluate("scrollBy(0, 40)")
    assert tip(held) == ""


def test_nothing_runs_off_the_side_even_with_all_tables_open(opened):
    shown = opened(PHONE)
    shown.locator("details").evaluate_all("(all) => all.forEach((one) => { one.open = true })")
    for width in (320, 390, 768):
        shown.set_viewport_size({"width": width, "height": 844})
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.evaluate("[...document.querySelectorAll('.scroll')].some((one) => one.scrollWidth > one.clientWidth)")


def brightness(shown):
    """Return how bright the ground, the text of the page and that of a picture are, from 0 to 255."""
    found = shown.evaluate(
        """[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector("h1")).color,
            getComputedStyle(document.querySelector("svg text")).fill]"""
    )
    return [sum(map(int, text[text.index("(") + 1 : -1].split(",")[:3])) / 3 for text in found]


def test_the_page_is_light_dark_and_printed(opened):
    shown = opened(DESK)
    ground, *inks = brightness(shown)
    assert ground > 240
    assert max(inks) < 60
    shown.emulate_media(color_scheme="dark")
    ground, *inks = brightness(shown)
    assert ground < 40
    assert min(inks) > 200
    # Paper is white, whatever the screen is; what explains itself to a pointer is gone, short tables are open.
    shown.emulate_media(media="print")
    assert brightness(shown) == [255, 0, 0]
    for hidden in ("nav", "#tip", ".long"):
        assert not shown.locator(hidden).first.is_visible()
    short = shown.locator("details:not(.long) table")
    heights = short.evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().height)")
    assert min(heights) > 20
    assert 1e4 < len(shown.pdf()) < 5e6


def test_without_its_script_the_page_still_reads(opened):
    shown = opened(DESK, java_script_enabled=False)
    assert "welch: ready." in shown.locator("#verdict").text_content()
    assert shown.locator(".m > title").count() > 300  # which the browser itself shows
    assert [told for told in opened.told if not told.startswith("data:")] == [opened.address]
