"""The report: its figures are the calibration's, nothing is asked of a network."""

import json
import re
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from _campaigns import SUITE
from _content import content, sealed
from _models import LINE
from _pages import NASTY, Document, report_files, toy_files
from typer.testing import CliRunner

import rlxjax as rx
from calibrate.cli import app
from calibrate.report import _place
from calibrate.report.calibration import calibration_page
from calibrate.report.page import mark_of
from calibrate.samples import quantile_ns, read_samples
from rlxjax.calibration import default_calibration_path
from rlxjax.extras import install_command

MODELS = (SUITE.model, LINE)
WORKLOAD = {"rows": 16, "width": 64}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A calibration of both models, an earlier one, and the samples of the first model."""
    return toy_files(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def page(files):
    command = f"rlxjax report {NASTY}"
    return calibration_page(files[0], command=command, workload=WORKLOAD, against=files[1], models=MODELS)


@pytest.fixture(scope="module")
def document(page):
    return Document(page)


def invoke(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def made(out, *arguments):
    """Return the page that the command writes."""
    result = invoke(*arguments, "-o", out)
    assert result.exit_code == 0, result.stderr
    return Document(out.read_text(encoding="utf-8"))


def refused(*arguments):
    """Return the one line that is said."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    line = result.stderr.strip().splitlines()[-1]
    assert [text for text in result.stderr.splitlines() if "error" in text] == [line]
    assert line.startswith("error: ")
    assert "Traceback" not in result.output
    return line


def test_tables_hold_what_the_calibration_says_of_the_sizes_and_what_was_timed(document, files):
    """That a picture, whose figures a table repeats, is right in each of them is tested where it is drawn."""
    toy = rx.load_calibration(files[0], MODELS).of("toy")
    cells, visits = read_samples(files[2]).timed()
    timed = {cell.name: time_ns for cell, time_ns in zip(cells, quantile_ns(visits), strict=True)}
    rows = document.tables["Time by rows of every strategy"]
    assert {row["strategy"] for row in rows} == set(toy.strategies)
    for name in toy.strategies:
        own = [row for row in rows if row["strategy"] == name]
        sizes = {size: np.array([row[size] for row in own]) for size in WORKLOAD}
        np.testing.assert_allclose([row["predicted"] for row in own], toy.predict_ns(name, **sizes))
        at = {(cell.inputs["rows"], cell.inputs["width"]): timed[cell.name] for cell in cells if cell.variant == name}
        found = {(row["rows"], row["width"]): row["measured"] for row in own if row["measured"] != ""}
        assert found
        assert found == pytest.approx({size: time_ns for size, time_ns in at.items() if size in found})
    rows = document.tables["The fastest strategy, by rows and width"][::7]
    assert [row["fastest"] for row in rows] == [toy.pick(row["rows"], row["width"]) for row in rows]
    (rows,) = (own for of, own in document.tables.items() if of.startswith("Parts of the time, ") and "width" in of)
    totals = {row["strategy"]: row["time"] for row in rows if row["part"] == "total"}
    explained = rx.calibration.explain(toy, **WORKLOAD)
    assert totals == pytest.approx({one.strategy: one.time_ns for one in explained.strategies})
    rows = document.tables["Every cell of toy, the furthest off first"]
    assert {row["run"]: row["measured"] for row in rows} == pytest.approx(timed)
    assert {row["run"] for row in rows if row["held out"] == "yes"} == {one.name for one in cells if one.held_out}
    assert np.all(np.diff(np.abs(np.log([row["predicted / measured"] for row in rows]))) <= 0)
    for name, section in json.loads(files[0].read_text())["models"].items():
        entries = {
            row["coefficient"]: (row["value"], row["unit"]) for row in document.tables[f"Coefficients of {name}"]
        }
        assert entries == {key: (entry["value"], entry["unit"]) for key, entry in section["coefficients"].items()}
        for row in document.tables[f"Errors of {name}"]:
            known = {value for value in section["held_out"][row["of"]].values() if value is not None}
            assert {value for value in row.values() if isinstance(value, float)} == known


def test_changes_are_sorted_by_their_joint_standard_deviations(document, files):
    first, last = (json.loads(file.read_text())["models"]["toy"]["coefficients"] for file in (files[1], files[0]))
    rows = document.tables["Changes of toy, the surest first"]
    headings = ("earlier", "later", "later / earlier", "joint standard deviation", "change in these", "verdict", "kind")
    before, after, ratio, log_sd, sds, verdict, kind = (np.array([row[name] for row in rows]) for name in headings)
    np.testing.assert_allclose(ratio, after / before)
    np.testing.assert_allclose(sds, np.log(ratio) / log_sd, atol=1e-12)
    assert np.all(np.abs(sds[:-1]) >= np.abs(sds[1:]))
    of = {row["what"]: row for row in rows}
    for name in first:
        joint = np.hypot(first[name]["log_sd"], last[name]["log_sd"])
        assert of[name]["joint standard deviation"] == pytest.approx(joint, rel=1e-4)
        assert of[name]["later / earlier"] == pytest.approx(last[name]["value"] / first[name]["value"])
    assert (rows[0]["what"], rows[0]["verdict"]) == ("launch_ns", "smaller")
    # A launch that costs a third takes no path longer.
    assert set(verdict[kind == "prediction"]) == {"faster", "within chance"}
    assert np.all((np.abs(sds) > 2.0) == (verdict != "within chance"))


def test_the_verdict_comes_first_and_cautions_make_it_not_ready(document, page):
    assert page.index('id="verdict"') < page.index('id="next"') < page.index('id="measured"')
    assert page.index('id="measured"') < page.index('id="toy-changes"')
    assert any("rlxjax validate" in text for text in document.texts["code"])
    assert {"toy: ready.", "line: not ready."} <= set(document.texts["p"])
    assert f"Caution: Careful {NASTY}." in document.texts["li"]
    assert any("is faster from rows" in text for text in document.texts["li"])
    # A model of one input, and without its samples, has every other picture.
    assert any("is not beside the calibration" in text for text in document.texts["p"])
    assert "line-terms" in document.attributes("id")
    assert not any(re.match("Every cell of line|The fastest strategy, by n", name) for name in document.tables)


@pytest.mark.slow
def test_a_page_is_of_all_built_in_models():
    root, sizes = Path(__file__).parent.parent, {"batch": 1024, "n_fft": 256, "k": 16}
    for file, tables in (
        ("docs/evidence/xeon.json", {"Errors of functions"}),
        ("notebooks/data/calibration-cpu.json", {"Errors of welch", "The fastest strategy, by batch and n_fft"}),
    ):
        assert tables <= Document(calibration_page(root / file, command="", workload=sizes)).tables.keys()


def test_a_page_asks_no_network_escapes_what_a_file_says_and_is_built_for_readers_who_do_not_see_it(document, page):
    assert f"rlxjax calibrate --out {NASTY}" in document.texts["td"]
    assert "<script>alert" not in page
    assert "script" not in document.texts
    assert not re.search(r"(?:https?:|//)\w", re.sub(r"^\s*//.*$", "", page, flags=re.MULTILINE))
    assert all(source.startswith("data:image/svg+xml;base64,") for source in document.attributes("src"))
    ids = document.attributes("id")
    assert {link[1:] for link in document.attributes("href") if link != "data:,"} <= set(ids)
    assert len(ids) == len(set(ids))
    assert set(document.attributes("aria-labelledby")) <= set(ids)
    tags = [tag for tag, _ in document.elements]
    assert [tags.count(tag) for tag in ("main", "header", "footer", "nav", "h1")] == [1] * 5
    assert tags.count("table") == tags.count("caption")
    assert all(given.get("scope") in ("col", "row") for tag, given in document.elements if tag == "th")
    pictures = [given for tag, given in document.elements if tag == "img"]
    assert len(pictures) > 5
    assert all(given["alt"] for given in pictures)
    assert [given for tag, given in document.elements if tag == "html"] == [{"lang": "en"}]


def contrast(*colours):
    """Return the contrast of two colours as #rrggbb (WCAG 2.2)."""
    parts = np.array([[int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)] for colour in colours])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    low, high = sorted(linear @ [0.2126, 0.7152, 0.0722])
    return (high + 0.05) / (low + 0.05)


def test_colours_have_the_contrast_of_wcag_aa_in_light_dark_and_print():
    css = resources.files("calibrate.report").joinpath("page.css").read_text()
    blocks = [dict(re.findall(r"--([\w-]+): (#\w{6})", one)) for one in re.findall(r":root \{(.*?)\}", css, re.DOTALL)]
    assert len(blocks) == 3
    pairs = [(name, ground) for ground in ("paper", "wash") for name in ("ink", "soft", "link")]
    pairs += [(name, f"{tone}-wash") for tone in ("good", "bad", "even") for name in ("ink", tone)]
    for theme in (blocks[0] | block for block in blocks):
        for one, other in pairs:
            assert contrast(theme[one], theme[other]) >= 4.5, (one, other)


# --- Refusals ------------------------------------------------------------------------------------


def test_bad_input_is_one_line_with_the_way_out_and_leaves_no_file(tmp_path, monkeypatch):
    out, plain = tmp_path / "out" / "r.html", tmp_path / "plain.json"
    other, empty, text, foreign = (tmp_path / name for name in ("other.json", "none.json", "text.json", "f.jsonl"))
    plain.write_text(json.dumps(sealed(content())))
    other.write_text(json.dumps(sealed(content(cores=4096))))
    empty.write_text(json.dumps(sealed(content() | {"models": {}})))
    text.write_text("no JSON")
    header, rest = report_files(tmp_path)[2].read_text().split("\n", 1)
    machine = json.loads(header)
    machine["fingerprint"]["cpu_model"] = "another one"
    foreign.write_text(f"{json.dumps(machine)}\n{rest}")
    for arguments, said in (
        ((tmp_path / "absent.json",), "no such file; measure again with `rlxjax calibrate"),
        ((text,), "not whole JSON"),
        ((empty,), "holds no known model; measure one with `rlxjax calibrate`"),
        ((plain, "--samples", text), "take samples with `rlxjax calibrate`"),
        ((plain, "--samples", foreign), "another machine took these samples (cpu_model 'another one' in the samples"),
        ((plain, "--against", other), "another machine measured it (cores 4096 in the earlier file"),
        ((plain, "--against", tmp_path / "absent.json"), "absent.json: no such file"),
        ((plain, "--n-fft", "255"), "expected an even number, got 255"),
        ((plain, "--advice", text), "FILE: leave it out with --advice"),
        (("--advice", text), "write one with `rlxjax advise ... --json > FILE`"),
        (("--advice", plain), "write one with `rlxjax advise ... --json > FILE`"),
    ):
        assert said in refused(*arguments, "-o", out), arguments
    assert not out.parent.exists()
    # A place that cannot be written is one line too, and an old page stays.
    assert "give another place with -o" in refused(plain, "-o", plain / "r.html")
    assert "got the folder" in refused(plain, "-o", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert f"jinja2 is not installed; get it with `{install_command('report')}`" in refused(plain)


def test_a_page_never_replaces_what_it_is_made_of(tmp_path, monkeypatch):
    folder = tmp_path / "read"
    folder.mkdir()
    path, earlier, samples = report_files(folder)
    taken, advice, link = (folder / name for name in ("taken.jsonl", "advice.json", "link.html"))
    taken.write_bytes(samples.read_bytes())
    advice.write_text(json.dumps(ADVICE))
    link.symlink_to(path)
    before = {file: file.read_bytes() for file in folder.iterdir()}
    for arguments, out in (
        ((path,), path),
        ((path,), link),
        ((path,), samples),
        ((path, "--samples", taken), taken),
        ((path, "--against", earlier), earlier),
        (("--advice", advice), advice),
    ):
        assert "--out: expected a new file for the page, got the file of" in refused(*arguments, "-o", out), out
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path / "home"))
    saved = default_calibration_path()
    saved.parent.mkdir()
    saved.write_bytes(path.read_bytes())
    assert "got the file of the calibration" in refused("-o", saved)
    assert saved.read_bytes() == before[path]
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_a_page_is_named_after_its_file_and_kind_and_replaces_pages_of_its_kind_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drawn = {kind: f"<meta content='{mark_of(kind)}'>" for kind in ("calibration", "advice")}
    files = {
        "a.json": "calibration",
        "calibration-cpu.json": "calibration",
        "b.json": "advice",
        "advice.json": "advice",
    }
    names = ["a-calibration.html", "calibration-cpu.html", "b-advice.html", "advice.html"]
    assert [str(_place(None, kind, Path(file), [])) for file, kind in files.items()] == names
    out = tmp_path / "page.html"
    for old in ("", *drawn.values(), "a page of somebody else", b"\xff\x00"):
        out.write_bytes(old if isinstance(old, bytes) else old.encode())
        for kind, own in drawn.items():
            if old in ("", own):
                assert _place(out, kind, tmp_path / "x.json", []) == out
            else:
                with pytest.raises(
                    ValueError, match=f"--out: .*page.html exists and is no {mark_of(kind)}: give another"
                ):
                    _place(out, kind, tmp_path / "x.json", [])


# --- An advice -----------------------------------------------------------------------------------

ADVICE = {
    "verdict": "fuse",
    "reason_code": "saves_traffic",
    "reason": f"one program saves 12.0 us a call {NASTY}",
    "probability": 0.97,
    "name": "together",
    "by": "model",
    "compared": "together",
    "alternatives": [
        {"name": "together", "predicted_ns": 38e3, "predicted_interval_ns": [30e3, 45e3]}
        | {"terms_ns": {"call_ns": 15e3, NASTY: 23e3}},
        {"name": "apart", "predicted_ns": 50e3, "predicted_interval_ns": [40e3, 60e3]}
        | {"terms_ns": {"call_ns": 30e3, "elementwise_ns": 21e3, "correction_ns": -1e3}},
    ],
    "stages": [{"name": "square", "predicted_ns": 25e3, "terms_ns": {"call_ns": 25e3}, "peak_bytes": 2048}],
    "saved_calls": 1,
    "saved_traffic_bytes": 4096,
    "code": "fused = jax.jit(lambda x: total(square(x)))",
    "calibration": f"the calibration of {NASTY}",
    "gain_ns": 12e3,
}


def test_an_advice_has_a_page_with_the_verdict_first_and_the_terms_of_both_forms(tmp_path, monkeypatch):
    def started(*_):
        raise AssertionError("JAX was started")

    monkeypatch.setattr("jax.devices", started)
    path, out = tmp_path / "advice.json", tmp_path / "a.html"
    path.write_text(json.dumps(ADVICE))
    found = made(out, "--advice", path)
    page = out.read_text(encoding="utf-8")
    made(out, "--advice", path)
    assert page == out.read_text(encoding="utf-8")
    assert "Fuse: make them one program." in found.texts["p"]
    assert page.index('id="verdict"') < page.index('id="code"') < page.index('id="terms"') < page.index('id="counts"')
    assert f"One program saves 12.0 us a call {NASTY} (saves_traffic)." in found.texts["li"]
    assert "<script>alert" not in page
    rows = {(row["strategy"], row["part"]): row for row in found.tables["Parts of the time, a call of all stages"]}
    for own in ADVICE["alternatives"]:
        form, terms = own["name"], {key.removesuffix("_ns"): time_ns for key, time_ns in own["terms_ns"].items()}
        assert {part: row["time"] for (of, part), row in rows.items() if of == form and part != "total"} == terms
        total = rows[form, "total"]
        shown = [total[end] for end in ("time", "from", "to")]
        assert shown == [own["predicted_ns"], *own["predicted_interval_ns"]]
    assert found.tables["Each stage, jitted by itself"][0]["stage"] == "square"
    assert ADVICE["code"] in found.texts["code"]
    why = "the calibration has no functions model"
    advice = rx.Advice("apart", "model", verdict="cannot model", reason_code="not_calibrated", reason=why)
    path.write_text(json.dumps(advice.as_dict() | {"calibration": "x"}))  # as `advise` prints it
    assert "The model cannot predict this." in made(out, "--advice", path).texts["p"]
