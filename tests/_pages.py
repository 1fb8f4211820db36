"""HTML pages as tests see them: tables by caption, elements with attributes; and the page of a made-up machine."""

import html.parser
import json

import pytest
from _campaigns import made_up
from _content import content, sealed

from calibrate.page import calibration_page
from rlxjax.calibration import sha256_of

WORKLOAD = {"batch": 1024, "n_fft": 256, "k": 16}
#: What a careless page would run, or lose.
NASTY = "<script>alert('x')</script> & \"co\""


class Document(html.parser.HTMLParser):
    """A page that was read.

    Attributes:
        elements: every element in order, its tag and attributes.
        tables: rows of every table by its caption; an entry is its text and what it holds in full, if it is a number.
        texts: what stands in elements of a tag.
    """

    def __init__(self, text):
        super().__init__()
        self.elements, self.tables, self.texts = [], {}, {}
        self._open, self._rows, self._value = [], [], None
        self.feed(text)
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.elements.append((tag, given))
        if tag not in ("meta", "link"):
            self._open.append((tag, []))
        if tag == "tr":
            self._rows.append([])
        if tag in ("td", "th"):
            self._value = given.get("data-value")

    def handle_data(self, data):
        for _, said in self._open:
            said.append(data)

    def handle_endtag(self, tag):
        opened, said = self._open.pop()
        assert opened == tag, (opened, tag)
        text = "".join(said)
        self.texts.setdefault(tag, []).append(text)
        if tag == "caption":
            self._caption = text
        if tag in ("td", "th"):
            self._rows[-1].append((text, None if self._value is None else float(self._value)))
        if tag == "table":
            self.tables[self._caption] = self._rows
            self._rows = []

    def table(self, caption):
        """Return the rows of a table whose caption begins so, without its headings."""
        (rows,) = [rows for name, rows in self.tables.items() if name.startswith(caption)]
        return rows[1:]

    def attributes(self, name):
        """Return the values of an attribute wherever it is."""
        return [given[name] for _, given in self.elements if name in given]


def report_files(folder):
    """Write a calibration of this machine with its samples, and an earlier one; return their paths."""
    path, earlier = folder / "calibration.json", folder / "earlier.json"
    made_up(path)
    samples = folder / "calibration.samples.jsonl"
    whole = content()
    welch = whole["models"]["welch"]
    welch["samples"] |= {"file": samples.name, "sha256": sha256_of(samples)}
    welch["command"] = f"rlxjax calibrate --out {NASTY}"
    path.write_text(json.dumps(sealed(whole)))
    changed = json.loads(json.dumps(whole))
    welch = changed["models"]["welch"]
    welch["coefficients"]["launch_ns"]["value"] *= 3.0
    welch["created"] = "2026-11-01T10:00:00+00:00"
    welch["fingerprint"]["jax"] = "0.10.0"
    earlier.write_text(json.dumps(sealed(changed)))
    return path, earlier


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A calibration file with samples beside it, and an earlier one."""
    return report_files(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def page(files):
    """The page of the calibration, as text."""
    return calibration_page(files[0], command=f"rlxjax report {NASTY}", workload=WORKLOAD, against=files[1])
