"""HTML pages as tests see them: tables by caption, elements with attributes; and the page of a made-up machine."""

import html.parser
import json

import pytest
from _campaigns import made_up
from _content import content, sealed

from calibrate.report.calibration import calibration_page
from calibrate.suites.welch import WelchSuite
from rlxjax.calibration import sha256_of
from rlxjax.models import WELCH

WORKLOAD = {"batch": 1024, "n_fft": 256, "k": 16, "n_segments": 2}
#: What a careless page would run, or lose.
NASTY = "<script>alert('x')</script> & \"co\" $x^$"


class Document(html.parser.HTMLParser):
    """A page that was read.

    Attributes:
        elements: every element in order, its tag and attributes.
        tables: rows of every table by its caption: texts, or numbers with all their digits, by heading.
        texts: what stands in elements of a tag.
    """

    def __init__(self, text):
        super().__init__()
        self.elements, self.tables, self.texts = [], {}, {}
        self._open, self._rows, self._caption = [], [], ""
        self.feed(text)
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img"):
            self._open.append((tag, dict(attrs), []))
        if tag == "tr":
            self._rows.append([])

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        for _, _, said in self._open:
            said.append(data)

    def handle_endtag(self, tag):
        opened, given, said = self._open.pop()
        assert opened == tag, (opened, tag)
        text = "".join(said)
        self.texts.setdefault(tag, []).append(text.replace("\u00a0", " "))
        if tag in ("td", "th"):
            self._rows[-1].append(float(given["data-value"]) if "data-value" in given else text)
        elif tag == "caption":
            self._caption = text
        elif tag == "table":
            headings, *rows = self._rows
            self.tables[self._caption] = [dict(zip(headings, row, strict=True)) for row in rows]
            self._rows = []

    def attributes(self, name):
        """Return the values of an attribute wherever it is."""
        return [given[name] for _, given in self.elements if name in given]


class FewCells(WelchSuite):
    """Some cells of the grid."""

    def cells(self):
        sizes = {"batch": (1, 9, 64, 256, 1024, 3000), "n_fft": (64, 128, 256)}
        return [cell for cell in super().cells() if all(cell.inputs[name] in own for name, own in sizes.items())]


def report_files(folder):
    """Write a calibration of this machine with its samples, and an earlier one; return the three paths."""
    path, earlier = folder / "calibration.json", folder / "earlier.json"
    samples = made_up(path, FewCells(), WELCH.prior.median)
    whole = content()
    welch = whole["models"]["welch"]
    welch["samples"] |= {"file": samples.name, "sha256": sha256_of(samples)}
    welch["command"] = f"rlxjax calibrate --out {NASTY}"
    path.write_text(json.dumps(sealed(whole)))
    changed = json.loads(json.dumps(whole))
    welch = changed["models"]["welch"]
    welch["coefficients"]["launch_ns"]["value"] *= 3.0
    welch["created"] = "2026-11-01T10:00:00+00:00"
    earlier.write_text(json.dumps(sealed(changed)))
    return path, earlier, samples


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A calibration file, an earlier one, and the samples beside the first."""
    return report_files(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def page(files):
    """The page of the calibration, as text."""
    return calibration_page(files[0], command=f"rlxjax report {NASTY}", workload=WORKLOAD, against=files[1])
