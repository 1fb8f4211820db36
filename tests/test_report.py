"""The report page: its figures are the calibration's, it asks nothing of a network, and bad input is one line."""

import doctest
import itertools
import json
import math
import re
from importlib import resources

import numpy as np
import pytest
from _content import content, sealed
from _pages import NASTY, WORKLOAD, Document, files, page
from typer.testing import CliRunner

import rlxjax as rx
from calibrate.cli import app
from calibrate.page import markup, scales, words
from calibrate.page.batches import curves_of
from calibrate.samples import read_samples
from calibrate.visits import quantile_ns
from rlxjax.calibration import CalibrationFile, default_calibration_path, write_json_file
from rlxjax.fit import named
from rlxjax.models import WELCH

__all__ = ["files", "page"]  # fixtures
#: Rows of a table, at most.
MOST_ROWS = 1024


@pytest.fixture(scope="module")
def document(page):
    return Document(page)


@pytest.fixture(scope="module")
def calibration(files):
    return rx.load_calibration(files[0])


def invoke(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def columns(rows):
    """Return the columns of a table: numbers where all entries have one, else texts."""
    found = []
    for column in zip(*rows, strict=True):
        is_number = all(value is not None for _, value in column)
        found.append(np.array([value if is_number else text for text, value in column]))
    return found


def asked(method, strategy, *runs):
    """Return what a calibration says of runs, asked as so many that every table compiles the same programs."""
    return np.asarray(method(strategy, *(np.resize(column, MOST_ROWS) for column in runs)))[..., : len(runs[0])]


def faster(calibration, runs, one, other):
    """Return the probability that one strategy is faster than another."""
    return calibration.decide(*runs, fused=one, kept=other).probability


def measured_of(files):
    """Return what the samples say of each workload in ns."""
    log = read_samples(files[0].with_suffix(".samples.jsonl"))
    return dict(zip(log.cells, quantile_ns(log.visits()), strict=True))


def test_the_times_by_batch_are_those_of_the_calibration_and_of_the_samples(document, calibration, files):
    rows = document.table("Time by batch of every strategy")
    strategy, n_fft, batch, k, n_segments, predicted, low, high = columns([row[:-1] for row in rows])
    assert set(strategy) == {"fast", "fused", "block", "ultra"}
    fastest = {}
    for cell, time_ns in measured_of(files).items():
        run = (cell.strategy.partition("-")[0], cell.n_fft, cell.batch, cell.k)
        fastest[run] = min(fastest.get(run, math.inf), time_ns)
    runs = list(zip(strategy, n_fft, batch, k, strict=True))
    assert {run: row[-1][1] for run, row in zip(runs, rows, strict=True) if row[-1][1]} == {
        run: pytest.approx(time_ns) for run, time_ns in fastest.items() if run in runs
    }
    assert sum(run in runs for run in fastest) > 20
    for name in set(strategy):
        mine, (fewer, more) = strategy == name, asked(calibration.interval_ns, name, batch, n_fft, k)
        np.testing.assert_allclose(
            predicted[mine], asked(calibration.predict_ns, name, batch, n_fft, k)[mine], rtol=1e-9
        )
        np.testing.assert_allclose((low[mine], high[mine]), (fewer[mine], more[mine]), rtol=1e-9)
    np.testing.assert_array_equal(n_segments, np.where(strategy == "ultra", 1, 2))
    assert np.all(calibration.in_domain(batch, n_fft, k, n_segments))


def test_the_map_is_what_the_calibration_picks_and_decides(document, calibration):
    pick, verdict, batch, n_fft, k, pick_ns, second, second_ns, probability, inside = columns(
        document.table("What is picked, by batch and n_fft")
    )
    k = np.minimum(k, n_fft // 2 + 1)  # there are no peaks beyond the bins
    times_ns = {name: asked(calibration.predict_ns, name, batch, n_fft, k) for name in ("fast", "fused", "block")}
    np.testing.assert_allclose(pick_ns, np.minimum.reduce(list(times_ns.values())))
    for name, own in times_ns.items():
        np.testing.assert_allclose(pick_ns[pick == name], own[pick == name])
        np.testing.assert_allclose(second_ns[second == name], own[second == name])
    is_sure = np.ones(len(pick), bool)
    for name, other in itertools.permutations(times_ns, 2):
        both = (pick == name) & (second == other)
        found = asked(lambda one, *runs, other=other: faster(calibration, runs, one, other), name, batch, n_fft, k)
        np.testing.assert_allclose(probability[both], found[both], rtol=1e-6)
        is_sure &= (pick != name) | (found >= 0.9)
    assert verdict.tolist() == np.where(is_sure, pick, "undecided").tolist()
    np.testing.assert_array_equal(inside == "yes", calibration.in_domain(batch, n_fft, k))
    assert np.all(pick_ns <= second_ns)
    for place in range(0, len(pick), 197):
        assert calibration.pick(batch[place], n_fft[place], k[place]) == pick[place]


def test_measured_times_are_those_of_the_samples_and_predictions_those_of_every_variant(document, files, calibration):
    strategy, batch, n_fft, k, measured, predicted, low, high, ratio, _ = columns(
        document.table("Every workload that was timed")
    )
    times_ns = measured_of(files)
    shown = dict(zip(zip(strategy, batch, n_fft, k, strict=True), measured, strict=True))
    assert shown == {tuple(cell): pytest.approx(time_ns) for cell, time_ns in times_ns.items()}
    np.testing.assert_allclose(ratio, predicted / measured)
    off = np.abs(np.log(ratio))
    assert np.all(off[:-1] >= off[1:])
    assert np.all((low < predicted) & (predicted < high))
    for name in ("fast", "ultra", "block"):
        mine, (fewer, more) = strategy == name, asked(calibration.interval_ns, name, batch, n_fft, k)
        np.testing.assert_allclose(predicted[mine], asked(calibration.predict_ns, name, batch, n_fft, k)[mine])
        np.testing.assert_allclose((low[mine], high[mine]), (fewer[mine], more[mine]), rtol=1e-4)
    # Fused is the faster of its two variants.
    fused = asked(calibration.predict_ns, "fused", batch, n_fft, k)
    variants = {
        name: dict(zip(runs_of(strategy == name, batch, n_fft, k), predicted[strategy == name], strict=True))
        for name in ("fused-maxima", "fused-top_k")
    }
    for place in np.flatnonzero(strategy == "fused-maxima"):
        run = (batch[place], n_fft[place], k[place])
        assert min(own[run] for own in variants.values()) == pytest.approx(fused[place])


def runs_of(mine, *columns):
    """Return the rows of columns that are somebody's own."""
    return list(zip(*(column[mine] for column in columns), strict=True))


def test_the_terms_are_those_of_the_explanation_and_add_up(document, calibration):
    explained = calibration.explain(*WORKLOAD.values())
    caption = "Parts of the time, "
    (heading, *rows) = next(rows for name, rows in document.tables.items() if name.startswith(caption))
    assert [text for text, _ in heading] == ["term", *(f"{one.strategy}, ns" for one in explained.strategies)]
    for place, one in enumerate(explained.strategies, 1):
        *terms, total, low, high = (row[place][1] for row in rows)
        assert terms == pytest.approx(list(one.terms_ns.values()))
        assert sum(terms) == pytest.approx(total) == pytest.approx(one.time_ns)
        assert (low, high) == pytest.approx(one.interval_ns)


def test_the_coefficients_and_errors_are_those_of_the_file(document, files):
    section = json.loads(files[0].read_text())["models"]["welch"]
    name, value, unit, log_sd, _, _, provenance = columns(document.table("Coefficients of the welch model"))
    entries = section["coefficients"]
    assert set(name) == entries.keys()
    for place, one in enumerate(name):
        entry = entries[one]
        assert value[place] == pytest.approx(entry["value"])
        # The file keeps six digits of the covariance.
        assert log_sd[place] == pytest.approx(entry["log_sd"], rel=1e-4)
        assert (unit[place], provenance[place]) == (entry["unit"], entry["provenance"])
    for row in document.table("Errors by strategy"):
        summary = section["held_out"][row[0][0]]
        shown = {value for _, value in row[1:] if value is not None}
        assert shown == {value for value in summary.values() if value is not None}


def test_changes_are_sorted_by_their_joint_standard_deviations(document, files):
    first, last = (json.loads(file.read_text())["models"]["welch"]["coefficients"] for file in reversed(files))
    rows = document.table("Changes, the surest first")
    names, kinds, before, after, _, ratio, log_sd, sds, verdict = columns(rows)
    np.testing.assert_allclose(ratio, after / before)
    np.testing.assert_allclose(sds, np.log(ratio) / log_sd, atol=1e-12)
    assert np.all(np.abs(sds[:-1]) >= np.abs(sds[1:]))
    for name in first:
        (place,) = np.flatnonzero(names == name)
        joint = math.hypot(first[name]["log_sd"], last[name]["log_sd"])
        assert log_sd[place] == pytest.approx(joint, rel=1e-4)
        grown = math.log(last[name]["value"] / first[name]["value"])
        assert sds[place] == pytest.approx(grown / joint, rel=1e-4, abs=1e-9)
    assert names[0] == "launch_ns"
    assert verdict[0] == "smaller"
    # A launch that costs a third takes no path longer.
    assert set(verdict[kinds == "prediction"]) <= {"faster", "within chance"}
    assert set(np.abs(sds[verdict == "within chance"]) <= 2.0) == {True}


def test_the_verdict_comes_first_and_says_what_the_file_says(document, page):
    assert page.index('id="verdict"') < page.index('id="measured"') < page.index('id="changes"')
    said = " ".join(document.texts["li"])
    assert "on workloads it never saw" in said
    assert "Fused pays from batch" in said or "is the faster one" in said


def test_cautions_of_a_file_make_it_not_ready(files, tmp_path):
    spoilt = json.loads(files[0].read_text())
    spoilt["models"]["welch"]["cautions"] = [f"Careful {NASTY}."]
    path, out = tmp_path / "c.json", tmp_path / "r.html"
    path.write_text(json.dumps(sealed(spoilt)))
    result = invoke(path, "-o", out)
    assert result.exit_code == 0, result.stderr
    found = Document(out.read_text(encoding="utf-8"))
    assert "Welch peaks: not ready." in found.texts["p"]
    assert f"Caution: Careful {NASTY}." in found.texts["li"]
    # Without its samples the page says so, and has every other picture.
    assert any("is not beside the calibration" in text for text in found.texts["p"])
    assert not any(name.startswith("Every workload") for name in found.tables)


def test_what_the_file_says_is_escaped(document, page):
    assert f"Command: rlxjax calibrate --out {NASTY}" in document.texts["p"]
    assert "<script>alert" not in page
    assert len(document.texts["script"]) == 1


def test_the_page_asks_no_network(document, page):
    assert not re.search(r"(?:https?:|//)\w", re.sub(r"^\s*//.*$", "", page, flags=re.MULTILINE))
    assert not document.attributes("src")
    assert all(link.startswith("#") or link == "data:," for link in document.attributes("href"))
    assert "url(" not in page


def test_the_page_is_built_for_readers_who_do_not_see_it(document):
    ids = document.attributes("id")
    assert len(ids) == len(set(ids))
    named = [name for names in document.attributes("aria-labelledby") for name in names.split()]
    assert set(named) <= set(ids)
    tags = [tag for tag, _ in document.elements]
    assert [tags.count(tag) for tag in ("main", "header", "footer", "nav", "h1")] == [1] * 5
    assert tags.count("table") == tags.count("caption")
    assert all(given.get("scope") in ("col", "row") for tag, given in document.elements if tag == "th")
    pictures = [given for tag, given in document.elements if tag == "svg" and given.get("aria-hidden") != "true"]
    assert all(given["role"] == "img" and len(given["aria-labelledby"].split()) == 2 for given in pictures)
    assert tags.count("desc") == len(pictures)
    assert [given for tag, given in document.elements if tag == "html"] == [{"lang": "en"}]


def test_the_examples_of_the_words_and_axes_run():
    for module in (markup, scales, words):
        tried = doctest.testmod(module)
        assert tried.failed == 0 < tried.attempted, module.__name__


def luminance(colour):
    """Return the relative luminance of a colour as #rrggbb (WCAG 2.2)."""
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_have_the_contrast_of_wcag_aa_in_light_dark_and_print():
    css = resources.files("calibrate.page").joinpath("page.css").read_text()
    blocks = [
        dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    ]
    assert len(blocks) == 3
    for theme in (blocks[0] | block for block in blocks):
        for ground in ("paper", "wash"):
            for name in ("ink", "soft", "link"):
                assert contrast(theme[name], theme[ground]) >= 4.5, (name, ground)
        for tone in ("good", "bad", "even"):
            assert contrast(theme[tone], theme[f"{tone}-wash"]) >= 4.5
            assert contrast(theme["ink"], theme[f"{tone}-wash"]) >= 4.5
        assert contrast(theme["tip"], theme["tip-ink"]) >= 4.5
        # What is drawn: at least 3, on the paper and on the band of noise.
        for name in ("fast", "fused", "block", "ultra", "learned", "other"):
            assert contrast(theme[name], theme["paper"]) >= 3.0, name
            assert contrast(theme[name], theme["noise"]) >= 3.0, name
        for name in ("fast", "fused", "block", "learned"):
            assert contrast(theme["cell-ink"], theme[f"{name}-cell"]) >= 3.0, name


@pytest.fixture
def welch(tmp_path):
    path = tmp_path / "calibration.json"
    write_json_file(CalibrationFile.model_validate(content()), path)
    return path


def refused(*arguments):
    """Return the one line that is said."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    line = result.stderr.strip().splitlines()[-1]
    assert [text for text in result.stderr.splitlines() if "error" in text] == [line]
    assert line.startswith("error: ")
    assert "Traceback" not in result.output
    return line


def test_bad_input_is_one_line_with_the_mend_and_leaves_no_file(welch, files, tmp_path):
    out = tmp_path / "out" / "r.html"
    other, no_welch, text = (tmp_path / name for name in ("other.json", "none.json", "text.json"))
    other.write_text(json.dumps(sealed(content(cores=4096))))
    no_welch.write_text(json.dumps(sealed(content() | {"models": {}})))
    text.write_text("no JSON")
    samples = files[0].with_suffix(".samples.jsonl")
    header, *rest = samples.read_text().splitlines(keepends=True)
    foreign = tmp_path / "foreign.samples.jsonl"
    machine = json.loads(header)
    machine["fingerprint"]["cpu_model"] = "another one"
    foreign.write_text(json.dumps(machine) + "\n" + "".join(rest))
    for arguments, said in (
        ((tmp_path / "absent.json",), "no such file; make a new one with `rlxjax calibrate"),
        ((text,), "not whole JSON"),
        ((no_welch,), "holds no Welch peaks; measure them with `rlxjax calibrate --only welch`"),
        ((welch, "--samples", text), "take samples with `rlxjax calibrate`"),
        ((welch, "--samples", foreign), "samples of another machine (cpu_model 'another one' in the samples"),
        ((welch, "--against", other), "of another machine (cores 4096 in the earlier one"),
        ((welch, "--against", tmp_path / "absent.json"), "absent.json: no such file"),
        ((welch, "--n-fft", "255"), "expected an even number, got 255"),
        ((welch, "--advice", text), "expected no FILE beside it"),
        (("--advice", text), "write one with `rlxjax advise ... --json > FILE`"),
        (("--advice", welch), "write one with `rlxjax advise ... --json > FILE`"),
    ):
        assert said in refused(*arguments, "-o", out), arguments
    assert not out.parent.exists()


def test_a_place_that_cannot_be_written_is_one_line_and_an_old_page_stays(welch, tmp_path):
    assert "give another place with -o" in refused(welch, "-o", welch / "r.html")
    assert "got the folder" in refused(welch, "-o", tmp_path)
    out = tmp_path / "r.html"
    out.write_text("old")
    refused(welch, "--n-fft", "255", "-o", out)
    assert out.read_text() == "old"


def test_a_page_never_replaces_what_it_is_made_of(files, tmp_path, monkeypatch):
    folder = tmp_path / "read"
    folder.mkdir()
    path, earlier = (folder / file.name for file in files)
    samples, taken, advice = (folder / name for name in ("calibration.samples.jsonl", "taken.jsonl", "advice.json"))
    for source, copy in ((files[0], path), (files[1], earlier), (files[0].with_name(samples.name), samples)):
        copy.write_bytes(source.read_bytes())
    taken.write_bytes(samples.read_bytes())
    advice.write_text(json.dumps(ADVICE))
    link = folder / "link.html"
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
        assert "--out: expected a file for the page, got that of" in refused(*arguments, "-o", out), out
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path / "home"))
    saved = default_calibration_path()
    saved.parent.mkdir()
    saved.write_bytes(path.read_bytes())
    assert "got that of the calibration" in refused("-o", saved)
    assert saved.read_bytes() == before[path]
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_strategies_have_curves_where_they_can_run(calibration):
    learned = {"learned_n_fft": [256.0], "learned_flop": [1e4], "learned_live_bins": [64.0]}
    facts = {name: np.array(value) for name, value in learned.items()}
    found = curves_of(calibration.of("welch").with_facts(**facts), None, 16)
    lengths = {}
    for curve in found:
        lengths.setdefault(curve.strategy, set()).add(curve.n_fft)
    assert lengths.pop("learned") == {256}
    assert set(lengths) == {"fast", "fused", "block", "ultra"}
    assert all(own == lengths["fast"] > {256} for own in lengths.values())


def test_the_prior_of_a_coefficient_is_the_models_own(document):
    name, _, _, _, prior, log_sd, _ = columns(document.table("Coefficients of the welch model"))
    medians, sds = named(WELCH.prior.median), named(WELCH.prior.log_sd)
    np.testing.assert_allclose(prior, [medians[one] for one in name])
    np.testing.assert_allclose(log_sd, [sds[one] for one in name])


def test_the_interval_of_a_measured_workload_is_that_of_the_calibration(document, calibration):
    strategy, batch, n_fft, k, _, predicted, low, high, _, _ = columns(document.table("Every workload that was timed"))
    (place,) = np.flatnonzero((strategy == "fast") & (batch == 32) & (n_fft == 64))[:1]
    run = ("fast", batch[place], n_fft[place], k[place])
    np.testing.assert_array_equal((low[place], high[place]), calibration.interval_ns(*run))


def test_a_time_has_the_unit_of_what_it_is_rounded_to():
    for exponent in range(13):
        below, above = 10.0**exponent * (1 - 1e-4), 10.0**exponent
        assert words.duration(below) == words.duration(above), exponent
        assert "e+" not in words.duration(above)


def test_help_has_an_example_and_the_exit_statuses():
    said = " ".join(invoke("-h").stdout.split())
    for part in (
        "rlxjax report calibration.json -o report.html",
        "0: the page is written",
        "2: bad input",
        "--against",
    ):
        assert part in said


ADVICE = {
    "verdict": "fuse",
    "reason_code": "saves_traffic",
    "reason": f"one program saves 12.0 us a call {NASTY}",
    "probability": 0.97,
    "apart_ns": 50e3,
    "apart_interval_ns": [40e3, 60e3],
    "together_ns": 38e3,
    "together_interval_ns": [30e3, 45e3],
    "apart_terms_ns": {"call_ns": 30e3, "elementwise_ns": 21e3, "correction_ns": -1e3},
    "together_terms_ns": {"call_ns": 15e3, "elementwise_ns": 23e3},
    "stages": [{"name": "square", "time_ns": 25e3, "limit": "call", "peak_bytes": 2048}],
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
    result = invoke("--advice", path, "-o", out)
    assert result.exit_code == 0, result.stderr
    page = out.read_text(encoding="utf-8")
    found = Document(page)
    assert "Fuse: make them one program." in found.texts["p"]
    assert page.index('id="verdict"') < page.index('id="terms"') < page.index('id="counts"')
    assert f"One program saves 12.0 us a call {NASTY} (saves_traffic)." in found.texts["li"]
    assert "<script>alert" not in page
    rows = {row[0][0]: [value for _, value in row[1:]] for row in found.table("Parts of the time, ")}
    assert rows["call"] == [30e3, 15e3]
    assert rows["correction"] == [-1e3, None]
    assert rows["total"] == [ADVICE["apart_ns"], ADVICE["together_ns"]]
    for place, form in enumerate(("apart", "together")):
        assert (rows["90 % from"][place], rows["to"][place]) == tuple(ADVICE[f"{form}_interval_ns"])
    assert found.table("Each stage")[0][0][0] == "square"
    assert ADVICE["code"] in found.texts["code"]


def test_what_advise_prints_is_what_the_page_reads(tmp_path):
    advice = rx.Advice("cannot model", "not_calibrated", "the calibration has no functions model")
    path, out = tmp_path / "advice.json", tmp_path / "a.html"
    path.write_text(json.dumps(advice.as_dict() | {"calibration": "x"}))
    assert invoke("--advice", path, "-o", out).exit_code == 0
    assert "This cannot be modelled." in Document(out.read_text(encoding="utf-8")).texts["p"]
