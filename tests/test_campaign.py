"""The calibrate job, of any suite: what it writes of a campaign, what it measures, resumes, leaves out and refuses."""

import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import shlex
import signal
import time

import jax
import numpy as np
import pytest
from _campaigns import MICRO_NS, NAME, SUITE, TRUE_NS, Toy, ToySuite, fitted, made_up, quick_machine, quiet, run_job
from _content import sealed
from _documented import assert_documented
from rich.console import Console
from typer.testing import CliRunner

from calibrate import campaign, judge, measure
from calibrate.cli import app
from calibrate.judge import print_outcome
from calibrate.measure import by_work, measuring_order
from calibrate.samples import quantile_ns, read_samples
from calibrate.terminal import Progress
from rlxjax import load_calibration
from rlxjax.calibration import read_calibration_file, sha256_of
from rlxjax.fit import Cell, fit_posterior, is_measured, named, transferred_prior

#: Files name no suite that is imported.
OF_SUITE = ("--suite", NAME)


def command(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module", autouse=True)
def machine():
    with quick_machine():
        yield


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What the job says of a finished campaign."""
    made_up(path := tmp_path_factory.mktemp("made [up]") / "c.json")  # rich takes brackets for markup
    return fitted(path)


def copied(outcome, folder):
    """Return the path of a calibration in a folder, beside a copy of an outcome's samples."""
    (folder / outcome.samples_path.name).write_bytes(outcome.samples_path.read_bytes())
    return folder / "c.json"


def test_the_file_is_what_the_job_reports_and_describes_the_samples_behind_it(outcome):
    content = read_calibration_file(outcome.path, [SUITE.model])
    assert content.models == {"toy": outcome.section}
    loaded = load_calibration(outcome.path, [SUITE.model]).of("toy")
    assert named(loaded.coefficients) == named(outcome.fitted.calibrated.coefficients)
    log, recorded = read_samples(outcome.samples_path), outcome.samples
    assert (recorded.suite, recorded.sha256) == (NAME, sha256_of(outcome.samples_path))
    assert (recorded.timings, recorded.rounds) == (sum(map(len, log.rounds)), 2)
    assert recorded.workloads == len(log.cells) == len(SUITE.cells())
    assert content.machine.canary_ns == MICRO_NS
    assert content.machine.gate["dispatch_ns"].value == MICRO_NS["launch"]
    np.testing.assert_array_equal(outcome.fitted.measured_ns, quantile_ns(log.timed()[1]))


def test_a_known_machine_is_found_as_surely_as_is_said_and_what_the_fit_never_saw_is_predicted(outcome):
    calibrated = outcome.fitted.calibrated
    found, sds = named(calibrated.coefficients), named(calibrated.posterior.coefficient_log_sd())
    for name, entry in outcome.section.coefficients.items():
        assert found[name] == pytest.approx(TRUE_NS[name], rel=0.1), name
        assert entry.log_sd == pytest.approx(float(sds[name]), rel=1e-4)  # the factor has six digits
        assert (entry.provenance == "measured") == bool(is_measured(sds[name], SUITE.model.prior.log_sd[name])), name
    for group, summary in outcome.section.held_out.items():
        assert summary.held_out < 0.05, group
        assert summary.covered >= 0.8, group
        assert summary.held_out_cells == sum(cell.held_out and cell.group == group for cell in SUITE.cells())
    assert outcome.verdict.is_ready


def test_what_is_said_is_a_few_sentences_and_tables_on_request_of_80_columns(outcome):
    texts = []
    for verbose in (False, True):
        console = Console(width=80, file=io.StringIO())
        print_outcome(outcome, console, is_verbose=verbose)
        texts.append(console.file.getvalue())
    brief, verbose = texts
    assert brief.startswith("toy: Ready.\n  Mean error ")
    assert "at_once is faster from rows " in " ".join(brief.split())
    for words in ("held out", "interval", "fastest", "a ratio of 1", "row_ns"):
        assert words in verbose
        assert words not in brief


def test_a_refit_gives_what_the_job_gave_and_says_it_as_documented(outcome, tmp_path):
    packed = tmp_path / "c.toy.samples.jsonl.gz"
    packed.write_bytes(gzip.compress(outcome.samples_path.read_bytes()))
    result = command("refit", packed, *OF_SUITE, "--json", "--quiet")
    assert result.exit_code == 0, result.stderr
    assert_documented("calibrate", json.loads(result.stdout))
    again = read_calibration_file(tmp_path / "c.json", [SUITE.model])
    origin = {"models": {"toy": {"created", "command", "samples", "digest"}}, "machine": True, "digest": True}
    before = read_calibration_file(outcome.path, [SUITE.model])
    assert again.model_dump(exclude=origin) == before.model_dump(exclude=origin)
    assert again.models["toy"].command == shlex.join(["rlxjax", "refit", str(packed), *OF_SUITE])
    # Samples of another runner are fitted and marked, and not resumed.
    path = copied(outcome, tmp_path)
    kept_at = tmp_path / outcome.samples_path.name
    kept_at.write_text(kept_at.read_text().replace('"runner":1', '"runner":2', 1))
    result = command("refit", kept_at, *OF_SUITE, "--out", path)
    assert result.exit_code == 0, result.stderr
    assert "Runner version 2 took the samples, but the suite's runner is version 1" in " ".join(result.stdout.split())
    with pytest.raises(ValueError, match="samples of runner 2, and this is runner 1"):
        fitted(path)


def test_a_job_starts_from_what_another_calibration_says_and_names_its_platform(outcome, tmp_path):
    text = outcome.path.read_text(encoding="utf-8")
    prior = tmp_path / "other.json"
    content = json.loads(text.replace(f'"platform": "{jax.default_backend()}"', '"platform": "abacus"'))
    prior.write_text(json.dumps(sealed(content)))
    found = fitted(copied(outcome, tmp_path), prior=prior)
    assert any("'abacus'" in note for note in found.notes)
    timings = judge.timings_of(SUITE, found.fitted.cells, found.fitted.measured_ns)
    known = load_calibration(outcome.path, [SUITE.model]).of("toy").posterior  # with six digits, as the file has it
    again = fit_posterior(timings, transferred_prior(known), facts=SUITE.facts())
    assert named(again.terms.coefficients) == named(found.fitted.calibrated.coefficients)
    assert named(found.fitted.calibrated.coefficients) != named(outcome.fitted.calibrated.coefficients)


def test_sections_of_other_models_stay_and_a_stale_one_is_named_with_its_refit(outcome, tmp_path):
    """A file with one stale and one good section: the good one predicts, and survives a job of the other."""
    path = copied(outcome, tmp_path)
    content = json.loads(outcome.path.read_text())
    content["models"]["other"] = json.loads(json.dumps(content["models"]["toy"]))
    content["models"]["toy"]["model_version"] = 99
    path.write_text(json.dumps(sealed(content)))
    both = [SUITE.model, type("OtherToy", (type(SUITE.model),), {"name": "other"})()]
    with pytest.warns(UserWarning, match=r"toy.*refit .*c\.toy\.samples\.jsonl"):
        calibration = load_calibration(path, both)
    assert list(calibration.models) == ["other"]
    assert calibration.of("other").predict_ns("at_once", 16, 64) > 0
    result = command("refit", tmp_path / outcome.samples_path.name, *OF_SUITE)
    assert result.exit_code == 0, result.stderr
    assert list(load_calibration(path, both).models) == ["toy", "other"]


def test_what_is_not_good_enough_is_kept_and_widens_the_intervals(outcome, tmp_path):
    """Times that jump from one cell to the next can be fitted, not foretold."""
    rng = np.random.default_rng(0)
    made_up(path := tmp_path / "c.json", factors={cell.name: np.exp(rng.normal(0, 0.5)) for cell in SUITE.cells()})
    found = fitted(path)
    assert "run `rlxjax calibrate` again" in found.verdict.cautions[0]
    calibrated = load_calibration(path, [SUITE.model]).of("toy")
    assert set(found.section.cautions) <= set(calibrated.cautions)
    assert np.all(np.asarray(calibrated.posterior.spread) > np.asarray(outcome.fitted.calibrated.posterior.spread))
    assert command("refit", found.samples_path, *OF_SUITE, "--strict", "--quiet").exit_code == 3


class OfCompiled(ToySuite):
    """The toy's cells by what was compiled of them: all of twice the width."""

    model = type("CompiledToy", (Toy,), {"name": "compiled toy"})()

    def runs(self, cells):
        return super().runs([dataclasses.replace(cell, inputs=cell.compiled) for cell in cells])


class Compiling(ToySuite):
    """A suite whose cells say what was compiled."""

    def cells(self):
        return [self.as_compiled(cell, print) for cell in super().cells()]

    def as_compiled(self, cell, program):
        return dataclasses.replace(cell, compiled={"rows": cell.inputs["rows"], "width": 2 * cell.inputs["width"]})

    def of_compiled(self):
        return OfCompiled()


def test_samples_that_say_what_was_compiled_fit_the_model_of_that_too(tmp_path):
    path, suite = tmp_path / "a.json", Compiling()
    made_up(path, suite)
    found = fitted(path, suite)
    assert any(note.startswith("compiled toy, fitted to the compiled programs: Mean error") for note in found.notes)
    found = load_calibration(path, [suite.model, OfCompiled.model])
    as_written, as_compiled = (found.of(name).coefficients for name in ("toy", "compiled toy"))
    assert as_compiled["value_ns"] == pytest.approx(as_written["value_ns"] / 2, rel=0.05)
    assert as_compiled["launch_ns"] == pytest.approx(as_written["launch_ns"], rel=0.05)


def test_times_a_thousand_times_off_count_little_and_are_named(tmp_path):
    cells = SUITE.cells()
    spoilt = {cells[3].name: 1000.0, cells[22].name: 1e-3, cells[41].name: 20.0}
    made_up(path := tmp_path / "c.json", factors=spoilt)
    found = fitted(path)
    assert {text.partition(" took")[0] for text in found.section.fit.outliers} == set(spoilt)
    assert any(
        note.startswith(f"3 of {len(cells)} cells differ from their predictions by more than a factor of 3")
        for note in found.notes
    )
    whole = np.array([cell.name not in spoilt for cell in found.fitted.cells])
    predicted_ns = np.asarray(found.fitted.estimate.time_ns)
    np.testing.assert_allclose(predicted_ns[whole], found.fitted.measured_ns[whole], rtol=0.2)


def test_a_fit_that_did_not_converge_is_told_and_written_only_if_asked(outcome, tmp_path, monkeypatch):
    def fit(*arguments, **options):
        found = fit_posterior(*arguments, **options)
        return found._replace(terms=found.terms._replace(converged=False, message="It did not converge."))

    monkeypatch.setattr(judge, "fit_posterior", fit)
    out = tmp_path / "unfinished.json"
    said = shlex.join(["rlxjax", "refit", str(outcome.samples_path), *OF_SUITE, "--out", str(out), "--force"])
    for force, status in (((), 1), (("--force",), 0)):
        result = command("refit", outcome.samples_path, *OF_SUITE, "--out", out, *force)
        assert result.exit_code == status, result.stderr
        assert "It did not converge." in result.stdout
        assert out.exists() == (status == 0)
        assert (said in result.stdout) == (status == 1)
    assert read_calibration_file(out, [SUITE.model]).models["toy"].command.endswith("--force")


class Interrupting(Progress):
    """Presses Ctrl-C at the end of the second round."""

    @contextlib.contextmanager
    def phase(self, name, *arguments, **options):
        rounds = itertools.count(1)

        def advance():
            if "measuring" in name and next(rounds) == 2:
                signal.raise_signal(signal.SIGINT)

        with super().phase(name, *arguments, **options):
            yield advance


def interrupted(path, suite=SUITE):
    """Return the outcome of a job that Ctrl-C ends after two rounds more."""
    # Whoever starts the tests in the background of a shell has Ctrl-C ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        progress = Interrupting(quiet()._console, is_quiet=True)
        return run_job(path, suite, resume=True, budget_s=60.0, progress=progress)
    finally:
        signal.signal(signal.SIGINT, handler)


def test_ctrl_c_fits_what_was_measured_a_resumed_run_goes_on_and_what_there_is_is_printed(
    outcome, tmp_path, monkeypatch
):
    made_up(path := tmp_path / "c.json", rounds=0)
    first = interrupted(path)
    assert (first.is_interrupted, first.samples.rounds, first.is_written) == (True, 2, True)
    assert any("interrupted" in note for note in first.notes)
    whole = first.samples_path.read_bytes()
    first.samples_path.write_bytes(whole[:-20])  # as a killed run leaves it
    again = interrupted(path)
    assert again.samples_path.read_bytes().startswith(whole[: whole[:-20].rfind(b"\n")])
    assert again.samples.rounds == 3
    assert again.fitted.cells == first.fitted.cells
    for one, second, status, said in (
        (first, None, 130, "interrupted; the output covers the samples so far"),
        (outcome, ValueError("no suite"), 2, "error: no suite"),
        (outcome, KeyboardInterrupt("kept in f"), 130, "interrupted; kept in f"),
    ):
        made = []

        def run(suite, *_, one=one, second=second, made=made, **__):
            made.append(suite.model.name)
            if len(made) == 1:
                return one
            raise second

        monkeypatch.setattr(campaign, "run", run)
        result = command("calibrate", "--out", tmp_path / "other.json", "--json", "--quiet")
        assert (result.exit_code, made) == (status, ["functions"] if second is None else ["functions", "welch"])
        assert json.loads(result.stdout) == {"functions": one.as_dict()}
        assert result.stderr.splitlines()[-1] == said


def test_a_suite_of_ones_own_is_named_earlier_samples_are_kept_and_a_job_without_time_measures_a_round(
    tmp_path, monkeypatch
):
    for name, said in (
        ("nothing", "--suite: expected module:name"),
        ("no_such_module:SUITE", "--suite: no_such_module does not import"),
        ("_campaigns:NOTHING", "--suite: _campaigns has no 'NOTHING'"),
        ("_campaigns:NAME", "--suite: expected a rlxjax.Suite, _campaigns:NAME is of type str"),
    ):
        result = command("calibrate", "--suite", name, "--out", tmp_path / "c.json", "--quiet")
        assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
    monkeypatch.setattr(campaign, "FIT_RESERVE_S", 60.0)
    monkeypatch.setattr(measure, "CELL_LIMIT_S", 5.0)
    made_up(path := tmp_path / "c.json", rounds=0)
    kept = (tmp_path / "c.toy.samples.jsonl").read_bytes()
    result = command("calibrate", "--suite", NAME, "--budget", "10", "--out", path, "--quiet", "--json")
    assert result.exit_code == 0, result.stderr
    (found,) = json.loads(result.stdout).values()
    assert [file for file in tmp_path.iterdir() if file.is_file() and file.read_bytes() == kept]
    assert any(note.startswith("The earlier samples are kept as ") for note in found["notes"])
    assert found["timed"]["workloads"] >= campaign.MIN_CELLS
    assert found["timed"]["rounds"] >= 1


def test_the_better_of_two_fits_is_the_file_and_the_other_lies_beside_it(tmp_path, monkeypatch):
    """Whatever makes a fit worse: few visits, few cells, noise, a busy machine; a job and a refit decide alike."""
    made_up(path := tmp_path / "c.json", rounds=6)
    good, worse, earlier = fitted(path), tmp_path / "c.toy.worse.json", tmp_path / "c.toy.earlier.json"
    content, rng = path.read_bytes(), np.random.default_rng(0)
    assert good.is_written
    assert not worse.exists()
    assert not earlier.exists()
    kept_at, wild = good.samples_path, {cell.name: np.exp(rng.normal(0, 1)) for cell in SUITE.cells()}
    few = type("Few", (ToySuite,), {"cells": lambda _: SUITE.cells()[:12]})()
    for suite, samples, said in (
        (SUITE, {"rounds": 1}, f"The fit has {len(SUITE.cells())} visits, the earlier fit "),
        (few, {"rounds": 40}, " held-out cells, the earlier fit "),
        (SUITE, {"rounds": 3, "factors": wild}, "A typical 90 % interval reaches a factor of "),
    ):
        made_up(path, suite, **samples)
        assert command("refit", kept_at, *OF_SUITE, "--quiet").exit_code == 1, said
        found = fitted(path, suite)
        (note,) = (note for note in found.notes if note.startswith(f"{path} was not changed: "))
        assert (said in note, found.is_written, path.read_bytes()) == (True, False, content), note
        assert f"This fit is in {worse}. Measure more with `rlxjax calibrate" in note
        assert read_calibration_file(worse, [SUITE.model]).models["toy"] == found.section
    monkeypatch.setattr(campaign.judge, "busier", lambda *_: "Other programs keep processors busy.")
    made_up(path, rounds=6)
    assert "Other programs keep processors busy." in " ".join(
        fitted(path, earlier=read_calibration_file(path, [SUITE.model]).machine).notes
    )
    assert path.read_bytes() == content
    # Of another machine, or of another version of the model, nothing in the file predicts here.
    for field in ({"fingerprint": {"cores": 999}}, {"model_version": 99}):
        other = json.loads(content)
        for name, value in field.items():
            own = other["models"]["toy"]
            own[name] = own[name] | value if isinstance(value, dict) else value
        path.write_text(json.dumps(sealed(other)))
        before = path.read_bytes()
        made_up(path, few, rounds=2)
        assert fitted(path, few).is_written
        assert earlier.read_bytes() == before
    path.write_bytes(content)
    assert command("refit", kept_at, *OF_SUITE, "--quiet", "--force").exit_code == 0
    assert earlier.read_bytes() == content


def test_the_samples_of_an_earlier_calibration_keep_their_link_when_a_job_begins(outcome, tmp_path):
    path = copied(outcome, tmp_path)
    path.write_bytes(outcome.path.read_bytes())
    campaign.name_samples(path, SUITE.model, outcome.samples_path.name, "c.toy.samples.jsonl.1")
    section = read_calibration_file(path, [SUITE.model]).models["toy"]
    assert section.samples == outcome.samples.model_copy(update={"file": "c.toy.samples.jsonl.1"})
    assert section.coefficients == outcome.section.coefficients
    campaign.name_samples(tmp_path / "none.json", SUITE.model, "a", "b")
    assert not (tmp_path / "none.json").exists()


class Unruly(ToySuite):
    """Programs that cannot be timed, among others that can."""

    def cells(self):
        return [*SUITE.cells()[::3], *(Cell(name, "at_once", {"rows": 1, "width": 1}) for name in BAD)]

    def program(self, cell):
        return BAD.get(cell.name, lambda: np.zeros(1))


def raises():
    raise RuntimeError("no such luck\nand more")


LATER = iter(range(1000))


def raises_later():
    """Run three times, as often as it takes to be made ready."""
    if next(LATER) > 2:
        raise RuntimeError("no more")
    return np.zeros(1)


BAD = {
    "it raises": raises,
    "it raises later": raises_later,
    "it hangs": lambda: time.sleep(2.0),
    "it differs": lambda: np.random.default_rng().random(3),
}


def test_a_program_that_raises_hangs_or_differs_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "CELL_LIMIT_S", 0.5)
    made_up(path := tmp_path / "c.json", Unruly(), rounds=0)
    found = interrupted(path, Unruly())
    said = {note for note in found.notes if "left out" in note}
    assert said == {
        "it raises is left out: it raises RuntimeError: no such luck.",
        "it raises later is left out: it raises RuntimeError: no more.",
        "it hangs is left out: two runs took longer than 0.5 seconds, and the program still runs in the background.",
        "it differs is left out: its results differ between two runs.",
    }
    assert found.is_written
    assert not {cell.name for cell in found.fitted.cells} & set(BAD)


def test_what_cannot_be_done_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    one, odd, few = SUITE.cells()[0], Cell("a", "abacus", {"rows": 1, "width": 1}), Cell("b", "at_once", {"rows": 1})
    good = ToySuite.cells
    for cells, options, said in (
        (good, {"prior": tmp_path / "other.json"}, "other.json"),
        (good, {"resume": True}, "c.toy.samples.jsonl: no such file; leave out --resume to start again"),
        (lambda _: [], {}, "with cells, got none"),
        (lambda _: [odd], {}, "a is left out: .*abacus"),
        (lambda _: [3], {}, "a cell of type int"),
    ):
        monkeypatch.setattr(ToySuite, "cells", cells)
        with pytest.raises(ValueError, match=said):
            run_job(path, **options)
    monkeypatch.setattr(ToySuite, "cells", lambda _: [one, one, odd, few])
    assert campaign.checked_cells(SUITE)[0] == [one]
    assert [text.partition(" is")[0] for text in campaign.checked_cells(SUITE)[1]] == [one.name, "a", "b"]
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="expected a file to write, got the folder"):
        run_job(tmp_path)


def test_bad_input_of_a_refit_is_one_line_and_writes_nothing(outcome, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, dropped, options, said in (
        ("none.toy.samples.jsonl", None, (), "none.toy.samples.jsonl: no such file"),
        ("a.toy.samples.jsonl.gz", "", (), "cannot be read (Not a gzipped file"),
        ("a.toy.samples.jsonl.1", "", (), "--out: expected a file, since"),
        ("a.toy.samples.jsonl", "", ("--out", "a.toy.samples.jsonl"), "got the file of the samples"),
        ("a.toy.samples.jsonl", "", ("--out", "link"), "got the file of the samples"),
        ("a.toy.samples.jsonl", "", ("--out", "."), "expected a file to write, got the folder"),
        ("a.toy.samples.jsonl", "", ("--prior", "none.json"), "none.json: no such file"),
        ("a.toy.samples.jsonl", "visit", (), "measured cells for a fit, got 0"),
    ):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(name)
        if dropped is not None:
            lines = outcome.samples_path.read_text().splitlines(keepends=True)
            (tmp_path / name).write_text("".join(line for line in lines if json.loads(line)["kind"] != dropped))
        before = {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}
        result = command("refit", name, *OF_SUITE, *options)
        assert result.exit_code == 2
        (line,) = (line for line in result.stderr.splitlines() if "fitting: " not in line)
        assert said in line
        assert {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()} == before


def test_works_come_whole_the_shown_first_each_third_of_the_others_held_out():
    cells, prior = SUITE.cells(), SUITE.model.prior
    order, other = (measuring_order(SUITE, cells, prior, {}, np.random.default_rng(seed)) for seed in (0, 1))
    assert sorted(cell.name for cell in order) == sorted(cell.name for cell in cells)
    works = by_work(order)
    assert [cell for work in works.values() for cell in work] == order
    assert next(iter(works)) == SUITE.shown[0]
    out = [work[0].held_out for work in works.values()][1:]
    count = 3 * min(out.count(False) // 2, out.count(True))
    assert out[:count] == [False, False, True] * (count // 3)
    head = 1 + 3 * len(named(prior.median)) // 2
    seen = [[cell.name for cell in one[: 2 * head] if not cell.held_out] for one in (order, other)]
    assert seen[0][:8] == seen[1][:8]  # what the design chooses is not chance's
    only_out = [cell for cell in cells if cell.held_out]
    assert len(measuring_order(SUITE, only_out, prior, {}, np.random.default_rng(0))) == len(only_out)


def test_a_model_whose_check_reads_numbers_predicts_under_jit_and_vmap(outcome):
    class Checked(type(SUITE.model)):
        def check(self, values):
            if bool(np.any(values["rows"] > 1e6)):
                raise ValueError("rows: expected at most a million")

    calibrated = load_calibration(outcome.path, [Checked()]).of("toy")
    rows = np.array([4.0, 16.0])
    expected = calibrated.predict_ns("at_once", rows, 64)
    for transform in (jax.jit, jax.vmap):
        np.testing.assert_allclose(transform(lambda rows: calibrated.predict_ns("at_once", rows, 64))(rows), expected)
    with pytest.raises(ValueError, match="at most a million"):
        calibrated.predict_ns("at_once", 2e6, 64)
