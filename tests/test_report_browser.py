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
def browser():
    with browser_page(CHROMIUM) as found:
        yield found


@pytest.fixture
def path(page, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


@pytest.fixture
def shown(browser, path):
    """The page on a desk, in light."""
    browser.size(*DESK)
    browser.media()
    browser.open(path)
    return browser


def tip(shown):
    return shown.run("document.getElementById('tip').textContent")


def place_of(shown, picture):
    """Return the middle of the first mark of a picture on the screen, scrolled to, and what it says."""
    found = shown.run(
        f"""(() => {{
            const mark = document.querySelector("#{picture} .m");
            mark.ownerSVGElement.scrollIntoView({{block: "center", behavior: "instant"}});
            const box = mark.getBoundingClientRect();
            return [(box.left + box.right) / 2, (box.top + box.bottom) / 2, mark.dataset.said];
        }})()"""
    )
    settled(shown)
    return found


def settled(shown):
    """Wait until what was scrolled to is drawn: the event of scrolling comes then."""
    shown.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def focus(shown, picture):
    """Reach a picture as a keyboard does."""
    shown.press("Tab")
    shown.run(f"document.querySelector('#{picture} .picture').focus()")
    settled(shown)


def test_the_page_complains_of_nothing_and_asks_for_nothing_but_itself(shown, path):
    assert shown.told("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled") == []
    asked = [told["request"]["url"] for told in shown.told("Network.requestWillBeSent")]
    assert [address for address in asked if not address.startswith("data:")] == [path.resolve().as_uri()]
    assert shown.run("performance.getEntriesByType('resource').length") == 0


def test_the_browser_shows_the_figures_of_the_file(shown, page):
    script = """[...document.querySelectorAll("table")].map((table) => [table.caption.textContent,
        [...table.rows].slice(1).map((row) => [...row.cells].map((cell) =>
            cell.dataset.value === undefined ? cell.textContent : +cell.dataset.value))])"""
    written = Document(page)
    assert dict(shown.run(script)) == {
        caption: [list(row.values()) for row in rows] for caption, rows in written.tables.items()
    }
    marks = [given for _, given in written.elements if given.get("class") == "m"]
    assert shown.run("document.querySelectorAll('.m').length") == len(marks) > 300


def test_the_mouse_a_finger_and_the_keyboard_name_a_cell(shown):
    for picture in ("welch-picks-0", "welch-times-1", "welch-residuals-0", "welch-coefficients-0"):
        shown.size(*DESK)
        x, y, said = place_of(shown, picture)
        shown.move(x, y)
        assert tip(shown) == said != ""
        shown.press("Escape")
        assert tip(shown) == ""
        shown.move(1, 1)
        focus(shown, picture)
        marks = shown.run(f"[...document.querySelectorAll('#{picture} .m')].map((mark) => mark.dataset.said)")
        assert tip(shown) == marks[0]
        for key, place in (("ArrowRight", 1), ("End", -1), ("Home", 0)):
            shown.press(key)
            assert tip(shown) == marks[place], key
        shown.press("ArrowDown")
        assert tip(shown) in marks[1:]
        if picture == "welch-picks-0":  # the cell above: of the same batch, of another n_fft
            assert tip(shown).split("\n")[0] == marks[0].split("\n")[0]
        assert shown.run(f"getComputedStyle(document.querySelector('#{picture} .picture')).outlineStyle") == "solid"
        shown.size(*PHONE, is_phone=True)
        x, y, said = place_of(shown, picture)
        shown.tap(x, y)
        assert tip(shown) == said
        left, width = shown.run(
            "(({left, width}) => [left, width])(document.querySelector('#tip').getBoundingClientRect())"
        )
        assert 0 <= left < left + width <= PHONE[0]


def test_a_tip_goes_when_a_finger_scrolls_and_stays_when_the_keyboard_does(shown):
    shown.size(*PHONE, is_phone=True)
    x, y, said = place_of(shown, "welch-times-1")
    shown.tap(x, y)
    assert (tip(shown), shown.run("document.activeElement.className")) == (said, "picture")
    shown.run("scrollBy(0, 40)")
    settled(shown)
    assert tip(shown) == ""
    shown.run("document.activeElement.blur()")
    focus(shown, "welch-times-1")
    shown.run("scrollBy(0, 40)")
    settled(shown)
    assert tip(shown) == said


def test_nothing_runs_off_the_side_even_with_all_tables_open(shown):
    for width in (320, 390, 768):
        shown.size(width, 844, is_phone=True)
        shown.run("document.querySelectorAll('details').forEach((one) => { one.open = true })")
        assert shown.run("document.documentElement.scrollWidth") <= width
        assert shown.run("[...document.querySelectorAll('.scroll')].some((one) => one.scrollWidth > one.clientWidth)")


def brightness(shown):
    """Return how bright the ground, the text of the page and that of a picture are, from 0 to 255."""
    found = shown.run(
        """[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector("h1")).color,
            getComputedStyle(document.querySelector("svg text")).fill]"""
    )
    return [sum(map(int, text[text.index("(") + 1 : -1].split(",")[:3])) / 3 for text in found]


def test_the_page_is_light_dark_and_printed(shown):
    ground, *inks = brightness(shown)
    assert ground > 240
    assert max(inks) < 60
    shown.media(scheme="dark")
    ground, *inks = brightness(shown)
    assert ground < 40
    assert min(inks) > 200
    # Paper is white, whatever the screen is; what explains itself to a pointer is gone, short tables are open.
    shown.media("print", "dark")
    assert brightness(shown) == [255, 0, 0]
    hidden = "['nav', '#tip', '.long'].map((name) => getComputedStyle(document.querySelector(name)).display)"
    assert shown.run(hidden) == ["none"] * 3
    open_ones = "[...document.querySelectorAll('details:not(.long) table')]"
    assert shown.run(f"Math.min(...{open_ones}.map((one) => one.getBoundingClientRect().height))") > 20
    shown.media()
    printed = shown.pdf()
    assert printed.startswith(b"%PDF-")
    assert len(printed) < 5e6


def test_without_its_script_the_page_still_reads(shown, path):
    shown.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        shown.open(path)
        assert shown.told("Log.entryAdded", "Runtime.exceptionThrown") == []
        said = json.dumps(shown.send("DOM.getDocument", depth=-1))
        assert "welch: ready." in said
        assert said.count('"nodeName": "title"') > 300  # which the browser itself shows
    finally:
        shown.send("Emulation.setScriptExecutionDisabled", value=False)
