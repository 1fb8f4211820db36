"""HTML pages as tests see them: tables by caption, elements with attributes; and the page of a made-up machine."""

import html.parser
import json

from _campaigns import SUITE, made_up
from _content import content, sealed
from _models import file_content, line_fit

from calibrate.samples import quantile_ns, read_samples
from calibrate.suites.welch import WelchSuite
from rlxjax.calibration import sha256_of
from rlxjax.fit import Timings, cell_runs, fit_posterior

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
    return _files(folder, content(), made_up(folder / "calibration.json", FewCells(), rounds=0))


def toy_files(folder):
    """Write the same of the toy model and of a line, of which no samples are kept; the toy launched at three times."""
    samples, toy = made_up(folder / "calibration.json"), SUITE.model
    cells, visits = read_samples(samples).timed()
    runs = cell_runs(toy, cells)
    timings = Timings.checked(toy, variant=runs.variant, **runs.inputs, time_ns=quantile_ns(visits))
    whole = file_content(fits=(fit_posterior(timings), line_fit()))
    whole["models"]["line"]["cautions"] = [f"Careful {NASTY}."]
    return _files(folder, whole, samples)


def _files(folder, whole, samples):
    path, earlier = folder / "calibration.json", folder / "earlier.json"
    section = next(iter(whole["models"].values()))
    section["samples"] |= {"file": samples.name, "sha256": sha256_of(samples)}
    section["command"] = f"rlxjax calibrate --out {NASTY}"
    path.write_text(json.dumps(sealed(whole)))
    section["coefficients"]["launch_ns"]["value"] *= 3.0
    section["created"] = "2026-11-01T10:00:00+00:00"
    earlier.write_text(json.dumps(sealed(whole)))
    return path, earlier, samples
