"""The report page in a real Chromium: nothing is asked for, all is reached, and nothing runs off a phone."""

import json

import pytest
from _browser import browser_page, browser_path
from _pages import Document, files, page

__all__ = ["files", "page"]  # fixtures

CHROMIUM = browser_path()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install it with `apt-get install chromium`"),
]
PHONE, DESK = (390, 844), (1280, 900)


@pytest.fixture(scope="module")
def path(page, tmp_path_factory):
    path = tmp_path_factory.mktemp("browser") / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    with browser_page(CHROMIUM) as found:
        yield found


@pytest.fixture
def shown(browser, path):
    """The page on a desk, in light."""
    browser.size(*DESK)
    browser.media()
    browser.open(path)
    return browser


def tip(shown):
    return shown.run("document.getElementById('tip').textContent")


def place_of(shown, mark):
    """Return the middle of a mark on the screen, scrolled to, and what it says."""
    return shown.run(
        f"""(() => {{
            const mark = document.querySelectorAll("{mark}")[0];
            const svg = mark.ownerSVGElement;
            svg.scrollIntoView({{block: "center", behavior: "instant"}});
            const at = new DOMPoint(+mark.dataset.x, +mark.dataset.y).matrixTransform(svg.getScreenCTM());
            return [at.x, at.y, mark.dataset.said];
        }})()"""
    )


def settled(shown):
    """Wait until what was scrolled to is drawn: the event of scrolling comes then."""
    shown.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_the_page_complains_of_nothing_and_asks_for_nothing_but_itself(shown, path):
    assert shown.complaints() == []
    assert [address for address in shown.requests() if not address.startswith("data:")] == [path.resolve().as_uri()]
    assert shown.run("performance.getEntriesByType('resource').length") == 0


def test_the_browser_shows_the_figures_of_the_file(shown, page):
    script = """[...document.querySelectorAll("table")].map((table) => [table.caption.textContent,
        [...table.rows].slice(1).map((row) => [...row.cells].map((cell) =>
            [cell.textContent, cell.dataset.value === undefined ? null : +cell.dataset.value]))])"""
    found = {caption: [[tuple(entry) for entry in row] for row in rows] for caption, rows in shown.run(script)}
    written = Document(page).tables
    assert found == {caption: rows[1:] for caption, rows in written.items()}
    names = [given["data-x"] for _, given in Document(page).elements if "data-x" in given]
    assert shown.run("document.querySelectorAll('.m').length") == len(names) > 300


@pytest.mark.parametrize("mark", ["#map-16 .m", "#batches-256 .m", "#residuals-fast .m", "#coefficients-all .m"])
def test_the_mouse_a_finger_and_the_keyboard_name_a_cell(mark, shown):
    x, y, said = place_of(shown, mark)
    settled(shown)
    shown.move(x, y)
    assert tip(shown) == said != ""
    shown.press("Escape")
    assert tip(shown) == ""
    shown.move(1, 1)

    picture = mark.replace(" .m", " .picture")
    shown.press("Tab")  # so that focus is that of a keyboard
    shown.run(f"document.querySelector('{picture}').focus()")
    settled(shown)
    marks = shown.run(f"[...document.querySelectorAll('{mark}')].map((mark) => mark.dataset.said)")
    assert tip(shown) == marks[0]
    shown.press("ArrowRight")
    assert tip(shown) == marks[1]
    shown.press("End")
    assert tip(shown) == marks[-1]
    stride = int(shown.run(f"document.querySelector('{picture}').dataset.stride"))
    shown.press("Home")
    shown.press("ArrowDown")
    assert tip(shown) == marks[stride]
    outline = shown.run(f"getComputedStyle(document.querySelector('{picture}')).outlineStyle")
    assert outline == "solid"

    shown.size(*PHONE, is_phone=True)
    x, y, said = place_of(shown, mark)
    settled(shown)
    shown.tap(x, y)
    assert tip(shown) == said
    left, right = shown.run(
        "(() => { const b = document.getElementById('tip').getBoundingClientRect(); return [b.left, b.right] })()"
    )
    assert 0 <= left < right <= PHONE[0]


def test_a_tip_goes_when_a_finger_scrolls_and_stays_when_the_keyboard_does(shown):
    mark, picture = "#batches-256 .m", "#batches-256 .picture"
    shown.size(*PHONE, is_phone=True)
    x, y, said = place_of(shown, mark)
    settled(shown)
    shown.tap(x, y)
    assert (tip(shown), shown.run("document.activeElement.className")) == (said, "picture")
    shown.run("scrollBy(0, 40)")
    settled(shown)
    assert tip(shown) == ""

    shown.run("document.activeElement.blur()")
    shown.press("Tab")  # so that focus is that of a keyboard
    shown.run(f"document.querySelector('{picture}').focus()")
    settled(shown)
    assert tip(shown) == said
    shown.run("scrollBy(0, 40)")
    settled(shown)
    assert tip(shown) == said


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_runs_off_the_side_even_with_all_tables_open(width, shown):
    shown.size(width, 844, is_phone=True)
    shown.run("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert shown.run("document.documentElement.scrollWidth") <= width
    assert shown.run("[...document.querySelectorAll('.scroll')].some((one) => one.scrollWidth > one.clientWidth)")


def brightness(shown):
    """Return how bright the ground and the text of the page are, from 0 to 255."""
    script = "[getComputedStyle(document.body).{}, getComputedStyle(document.querySelector('h1')).color]"
    found = shown.run(script.format("backgroundColor"))
    return [sum(map(int, text[text.index("(") + 1 : -1].split(",")[:3])) / 3 for text in found]


def test_the_page_is_light_dark_and_printed(shown):
    ground, ink = brightness(shown)
    assert ground > 240
    assert ink < 60
    shown.media(scheme="dark")
    ground, ink = brightness(shown)
    assert ground < 40
    assert ink > 200
    # Paper is white, whatever the screen is; what explains itself to a pointer is gone, short tables are open.
    shown.media("print", "dark")
    ground, ink = brightness(shown)
    assert (ground, ink) == (255, 0)
    displays = shown.run(
        "['nav', '#tip', '.long'].map((name) => getComputedStyle(document.querySelector(name)).display)"
    )
    assert displays == ["none"] * 3
    heights = shown.run(
        "[...document.querySelectorAll('details:not(.long) table')].map((one) => one.getBoundingClientRect().height)"
    )
    assert min(heights) > 20
    shown.media()
    printed = shown.pdf()
    assert printed.startswith(b"%PDF-")
    assert len(printed) < 5e6  # a pattern in a picture would make it ten times as large


def test_without_its_script_the_page_still_reads(shown, path):
    shown.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        shown.open(path)
        assert shown.complaints() == []
        titles = shown.send("DOM.getDocument", depth=-1)
        said = json.dumps(titles)
        assert "Welch peaks: ready." in said
        assert said.count('"nodeName": "title"') > 300  # which the browser itself shows
    finally:
        shown.send("Emulation.setScriptExecutionDisabled", value=False)
