"""The calibration file and what it decides: predictions, picks, refusals, and whole files or none."""

import dataclasses
import json
import math
import os
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from _tolerances import FLOAT64_RTOL

import rlxjax as rx
from rlxjax import _calibration_file as file_module
from rlxjax.calibration import CalibrationFile, Uncertainty
from rlxjax._correction import KINDS, N_FEATURES
from rlxjax.calibration import write_json_file
from rlxjax._latency import COEFFICIENT_NAMES, FORMULA_VERSION, coefficient_unit
from rlxjax._posterior import LatencyPosterior
from rlxjax.welch import _run

MEDIAN = rx.typical_prior().median
GATE = {name: 100.0 + index for index, name in enumerate(file_module.GATE_UNITS)} | {"unified_memory": 1.0}
SLOW = 1e12
#: Without a correction, so that predictions are those of the terms.
POSTERIOR = LatencyPosterior(
    MEDIAN,
    np.zeros((len(KINDS), N_FEATURES)),
    0.05 * np.eye(len(COEFFICIENT_NAMES) + len(KINDS) * N_FEATURES),
    np.array([0.02, 0.04, 0.06, 0.08]),
)


def content(**fingerprint):
    """Return the plain content of a valid file of this machine, with parts of its fingerprint replaced."""

    def entry(value, unit):
        return {"value": value, "unit": unit, "provenance": "measured"}

    def fitted(name):
        return entry(getattr(MEDIAN, name), coefficient_unit(name)) | {"log_sd": 0.1}

    here = file_module.current_fingerprint().model_dump()
    errors = {"fit": 0.03, "interior": 0.05, "edge": None, "held_out": 0.05, "held_out_cells": 7}
    errors |= {"terms_alone": 0.07, "covered": 0.9}
    return {
        "schema_version": 3,
        "formula_version": FORMULA_VERSION,
        "created": "2024-05-01T12:00:00+00:00",
        "command": "rlxjax calibrate --budget 60",
        "units": file_module.UNITS,
        "fingerprint": {**here, **fingerprint},
        "coefficients": {name: fitted(name) for name in COEFFICIENT_NAMES},
        "uncertainty": Uncertainty.of(POSTERIOR).model_dump(),
        "gate": {name: entry(value, file_module.GATE_UNITS[name]) for name, value in GATE.items()},
        "canary_ns": {"launch": 1e4, "copy": 2e7},
        "noise_floor": 0.01,
        "held_out": {"fused": {**errors, "noise_floor": 0.01, "built_in": 4.0}},
        "domain": {
            "batch": {"low": 1.0, "high": 8192.0},
            "n_fft": {"low": 64.0, "high": 4096.0},
            "k": {"low": 4.0, "high": 16.0},
            "n_segments": {"low": 1.0, "high": 2.0},
            "samples": {"low": 64.0, "high": 2.0**21},
        },
        "samples": {"file": "samples.csv", "sha256": "0" * 64, "timings": 90, "rounds": 3, "workloads": 30},
        "fit": {
            "converged": True,
            "loss": 12.5,
            "message": "The fit of 90 timings converged.",
            "inseparable": [{"host_row_ns": 0.8, "host_flop_per_ns": -0.6}],
            "outliers": [],
        },
        "skipped": [],
    }


def changed(original, field, value=None):
    """Return a copy with a dotted field replaced, or dropped where no value is given."""
    copy = json.loads(json.dumps(original))
    *parents, last = field.split(".")
    section = copy
    for parent in parents:
        section = section[parent]
    section.pop(last, None)
    if value is not None:
        section[last] = value
    return copy


@pytest.fixture
def path(tmp_path):
    return tmp_path / "calibration.json"


def loaded(text, path):
    path.write_text(text)
    return rx.load_calibration(path)


def calibration(**coefficients):
    """Return a calibration of the typical machine with some coefficients replaced."""
    whole = rx.Calibration.from_file(CalibrationFile.model_validate(content()))
    return with_coefficients(whole, dataclasses.replace(MEDIAN, **coefficients))


def with_coefficients(whole, coefficients):
    return dataclasses.replace(
        whole, posterior=dataclasses.replace(whole.posterior, coefficients=coefficients)
    )


def assert_same(found, expected):
    """Check that two calibrations are equal, their arrays too."""
    jax.tree.map(np.testing.assert_array_equal, found.posterior, expected.posterior)
    assert dataclasses.replace(found, posterior=expected.posterior) == expected


CHEAPEST = {
    "host": {"device_call_ns": SLOW},
    "fused": {"host_call_ns": SLOW},
    "block": {"host_row_ns": SLOW, "topk_bin_ns": SLOW, "maxima_key_ns": SLOW},
}
each_cheapest = pytest.mark.parametrize("cheapest", CHEAPEST)


def test_what_is_written_is_what_is_loaded(path):
    written = CalibrationFile.model_validate(content())
    write_json_file(written, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = rx.load_calibration(str(path))
    assert_same(found, rx.Calibration.from_file(written))
    assert found.coefficients == MEDIAN
    assert found.gate == rx.IoFusionGate(**GATE)
    assert set(found.provenance.values()) == {rx.Provenance.MEASURED}
    assert found.domain["samples"] == (64.0, 2.0**21)
    assert found.held_out["fused"]["edge"] is None
    first = path.read_bytes()
    write_json_file(file_module.read_calibration_file(path), path)
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    ("strategy", "path_name", "n_segments"),
    [
        ("ultra", "host", 1),
        ("fast", "host", 2),
        ("host", "host", 2),
        ("fused", "fused", 2),
        ("Block", "block", 2),
    ],
)
def test_predictions_are_those_of_the_latency_model(strategy, path_name, n_segments):
    machine, batch = calibration(), np.array([1, 64, 4096])
    expected = rx.predict_latency_ns(MEDIAN, path_name, batch, 256, 16, n_segments)
    for found in (
        machine.predict_ns(strategy, batch, 256, 16),
        machine.predict_ns(strategy, batch, 256, 16, n_segments),
        machine.terms_ns(strategy, batch, 256, 16).total_ns(),
        machine.estimate(strategy, batch, 256, 16).time_ns,
    ):
        np.testing.assert_allclose(found, expected, rtol=FLOAT64_RTOL)


@pytest.mark.parametrize("strategy", ["fast", "fused", "block"])
def test_an_interval_is_log_normal_around_the_prediction(strategy):
    machine, batch = calibration(), np.array([1, 64, 4096])
    run = machine.estimate(strategy, batch, 256, 16)
    for level, sds in ((0.6826894921, 1.0), (0.9544997361, 2.0)):
        low, high = machine.interval_ns(strategy, batch, 256, 16, level=level)
        np.testing.assert_allclose(np.log(high / low), 2 * sds * run.log_sd(), rtol=1e-8)
        np.testing.assert_allclose(np.sqrt(low * high), run.time_ns, rtol=FLOAT64_RTOL)
    assert np.all(np.asarray(run.log_sd()) > np.asarray(run.spread))
    with pytest.raises(ValueError, match="level: expected a probability between 0 and 1, got 1"):
        machine.interval_ns(strategy, 1, 256, 16, level=1.0)


def test_a_decision_follows_the_predictions():
    for cheapest, verdict in (("fused", "fuse"), ("host", "keep")):
        machine = calibration(**CHEAPEST[cheapest])
        assert machine.decide(64, 256, 16).verdict() == verdict
    machine = calibration()
    same = machine.decide(64, 256, 16, fused="block", kept="block")
    assert (float(same.margin_ns), float(same.probability), same.verdict()) == (0.0, 0.5, "undecided")


@pytest.mark.parametrize("n_segments", [1, 2, 8])
@pytest.mark.parametrize(("batch", "n_fft", "k"), [(1, 64, 4), (32, 1024, 16), (8192, 256, 16)])
def test_the_pick_has_the_lowest_prediction_of_the_same_result(batch, n_fft, k, n_segments):
    host = {1: "ultra", 2: "fast", 8: "host"}[n_segments]
    for machine in (calibration(), *(calibration(**cheap) for cheap in CHEAPEST.values())):
        names = (host, "fused", "block")
        predicted = [float(machine.predict_ns(name, batch, n_fft, k, n_segments)) for name in names]
        best = int(np.argmin(predicted))
        assert machine.pick(batch, n_fft, k, n_segments) == names[best]
        assert machine.pick_path(batch, n_fft, k, n_segments).code == best
        assert machine.pick_index(batch, n_fft, k, n_segments) == best


@each_cheapest
def test_the_pick_of_two_segments_is_the_default_and_follows_the_coefficients(cheapest):
    name = "fast" if cheapest == "host" else cheapest
    assert calibration(**CHEAPEST[cheapest]).pick(64, 256, 16) == name


def test_equal_predictions_pick_the_earlier_path():
    machine, paths = calibration(), (rx.Path.FUSED, rx.Path.BLOCK)
    selections = ("topk_bin", "topk_update", "select_row", "select_bin", "select_sort", "select_peak")
    free = {f"{name}_ns": 0.0 for name in selections}
    fast = {"readback_bytes_per_ns": np.inf, "device_bytes_per_ns": np.inf, "host_bytes_per_ns": np.inf}
    fast |= {"far_bytes_per_ns": np.inf, "row_far_bytes_per_ns": np.inf}
    machine = calibration(**free, **fast, host_call_ns=0.0)
    assert machine.predict_ns("fused", 4, 64, 4) == machine.predict_ns("block", 4, 64, 4)
    assert machine.pick_path(4, 64, 4, 2, paths) is rx.Path.FUSED
    assert machine.pick_path(4, 64, 4, 2, paths[::-1]) is rx.Path.BLOCK


def test_pick_index_takes_arrays_and_traces():
    machine, batch = calibration(), np.array([1, 100, 8192])
    together = machine.pick_index(batch, 256, 16)
    assert together.tolist() == [machine.pick_path(int(b), 256, 16, 2).code for b in batch]
    np.testing.assert_array_equal(jax.jit(lambda b: machine.pick_index(b, 256, 16))(batch), together)


def test_predictions_have_a_gradient_by_the_calibrated_coefficients():
    def cost(coefficients):
        return with_coefficients(calibration(), coefficients).predict_ns("fused", 64, 256, 16)

    assert jax.grad(cost)(MEDIAN).dispatch_ns == pytest.approx(1.0, rel=FLOAT64_RTOL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fast", 1, 64, 4, 8), "n_segments: 'fast' has 2, got 8; use 'host'"),
        (("ultra", 1, 64, 4, 2), "n_segments: 'ultra' has 1, got 2; use 'host'"),
        (("fast", 1, 64, 4, np.array([2, 3])), "n_segments: 'fast' has 2"),
        (("learned", 1, 64, 4), "strategy: 'learned' was not timed"),
        (("rlx", 1, 64, 4), "strategy: expected one of ultra, fast, host, fused, block.*got 'rlx'"),
        (("fused", -1, 64, 4), "batch: expected a size of at least 0, got -1"),
    ],
)
def test_contradictions_and_unknown_strategies_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        calibration().predict_ns(*arguments)


def test_the_domain_is_closed_and_bounds_the_product_too():
    machine = calibration()
    assert machine.in_domain(1, 64, 4) is True
    assert machine.in_domain(8192, 256, 16) is True
    assert machine.in_domain(8192, 512, 16) is False
    inside = machine.in_domain(
        np.array([1, 1, 1, 9000, 1]), np.array([32, 4096, 8192, 64, 64]), [4, 16, 4, 4, 17]
    )
    assert inside.tolist() == [False, True, False, False, False]
    assert machine.in_domain(64, 256, 16, np.array([1, 2, 3, 8])).tolist() == [True, True, False, False]


def test_a_file_that_does_not_say_how_many_segments_has_those_that_jobs_timed(path):
    machine = loaded(json.dumps(changed(content(), "domain.n_segments")), path)
    assert machine.domain["n_segments"] == (1.0, 2.0)


def test_a_decision_and_an_explanation_say_whether_they_are_extrapolated():
    machine = calibration()
    batches, segments = np.array([8, 8, 9000]), np.array([2, 8, 2])
    assert machine.decide(batches, 64, 4, segments).in_domain.tolist() == [True, False, False]
    assert [machine.explain(8, 64, 4, n).in_domain for n in (1, 2, 8)] == [True, True, False]


@each_cheapest
@pytest.mark.parametrize("strategy", ["auto", "rlx", "host"])
def test_welch_peaks_runs_the_path_that_the_calibration_picks(strategy, cheapest, monkeypatch):
    ran = []
    monkeypatch.setattr(_run, "run_path", lambda path, signal, *_: ran.append(path) or signal)
    machine, params = calibration(**CHEAPEST[cheapest]), rx.WelchPeakParams.fast(64, 4)
    rx.welch_peaks(np.zeros((8, 96)), params, strategy, calibration=machine)
    device = min(("fused", "block"), key=lambda name: float(machine.predict_ns(name, 8, 64, 4)))
    assert ran == [{"auto": cheapest, "rlx": device, "host": "host"}[strategy]]


TEXT = json.dumps(content(), indent=2)


def assert_refused(text, path, *said):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = path.read_bytes()
    with pytest.raises(rx.CalibrationFileError) as caught:
        rx.load_calibration(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    assert all(part in message for part in said), message
    assert path.read_bytes() == before


@pytest.mark.parametrize("length", [*range(0, 5000, 50), *range(5000, len(TEXT), 500)])
def test_a_truncated_file_is_refused(length, path):
    assert_refused(TEXT[:length], path, "truncated", "line ", f"rlxjax calibrate --out {path}")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("schema_version", 4, "install a newer rlxjax"),
        ("schema_version", 2, "rlxjax calibrate"),
        ("formula_version", FORMULA_VERSION + 1, "install a newer rlxjax"),
        ("schema_version", 0, "rlxjax calibrate"),
        ("schema_version", "1", "rlxjax calibrate"),
        ("schema_version", None, "rlxjax calibrate"),
        ("formula_version", None, "rlxjax calibrate"),
        ("noise_floor", -0.1, "rlxjax calibrate"),
        ("noise_floor", None, "rlxjax calibrate"),
        ("coefficients", None, "rlxjax calibrate"),
        ("gate.memory_bw", None, "rlxjax calibrate"),
        ("gate.unknown_ns", {"value": 1.0, "unit": "ns", "provenance": "measured"}, "rlxjax calibrate"),
        (
            "coefficients.unknown_ns",
            {"value": 1.0, "unit": "ns", "provenance": "measured"},
            "rlxjax calibrate",
        ),
        ("coefficients.dispatch_ns.provenance", "guessed", "rlxjax calibrate"),
        ("coefficients.dispatch_ns.note", "hand-made", "rlxjax calibrate"),
        ("coefficients.dispatch_ns.log_sd", 0.0, "rlxjax calibrate"),
        ("uncertainty", None, "rlxjax calibrate"),
        ("uncertainty.spread.host", 0.0, "rlxjax calibrate"),
        ("uncertainty.correction.host", [0.0], "rlxjax calibrate"),
        ("uncertainty.covariance_factor", [[1.0]], "rlxjax calibrate"),
        ("canary_ns", None, "rlxjax calibrate"),
        ("canary_ns.launch", 0.0, "rlxjax calibrate"),
        ("fit.outliers", ["one", 2], "rlxjax calibrate"),
        ("domain.batch.low", 0.0, "rlxjax calibrate"),
        ("fingerprint.cores", "many", "rlxjax calibrate"),
        ("surprise", 1, "rlxjax calibrate"),
    ],
)
def test_a_field_outside_the_schema_is_refused_by_name(field, value, said, path):
    assert_refused(json.dumps(changed(content(), field, value)), path, f"{field}", said)


@pytest.mark.parametrize("name", COEFFICIENT_NAMES)
def test_a_missing_coefficient_is_refused_by_name(name, path):
    assert_refused(
        json.dumps(changed(content(), f"coefficients.{name}")), path, f"coefficients.{name}", "missing"
    )


@pytest.mark.parametrize("section", ["coefficients.dispatch_ns", "gate.dispatch_ns"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf, "12", [1.0], {}, True])
def test_a_coefficient_that_is_no_positive_number_is_refused(section, value, path):
    assert_refused(
        json.dumps(changed(content(), f"{section}.value", value)), path, f"{section}.value", str(path)
    )


def test_a_latency_coefficient_of_zero_is_refused_and_a_gate_of_zero_is_not(path):
    assert_refused(
        json.dumps(changed(content(), "coefficients.cache_bytes.value", 0.0)), path, "cache_bytes.value"
    )
    assert loaded(json.dumps(changed(content(), "gate.roundtrip_ns.value", 0.0)), path).gate.roundtrip_ns == 0


@pytest.mark.parametrize(
    "text",
    [b"\xff\xfe", "[]", "1", "null", '{"schema_version": ' + "9" * 5000 + "}", "[" * 100_000],
    ids=["not UTF-8", "list", "number", "null", "huge number", "deep"],
)
def test_a_file_that_is_no_calibration_is_refused(text, path):
    assert_refused(text, path, "rlxjax")


@pytest.mark.parametrize("field", ["a\nb", "coefficients.a\nb", "coefficients.dispatch_ns.a\nb"])
def test_a_name_of_two_lines_is_refused_in_one(field, path):
    assert_refused(json.dumps(changed(content(), field, 1.0)), path, "rlxjax calibrate")


def test_a_missing_file_or_a_folder_is_refused(path):
    with pytest.raises(
        rx.CalibrationFileError, match=f"{path}: no such file; .*rlxjax calibrate --out {path}"
    ):
        rx.load_calibration(path)
    with pytest.raises(rx.CalibrationFileError, match="cannot be read.*rlxjax calibrate"):
        rx.load_calibration(path.parent)


@pytest.mark.parametrize(
    ("name", "value"),
    [("cpu_model", "Z80"), ("cores", 100_000), ("jax", "0.0.1"), ("thread_flags", {"A": "1"})],
)
def test_a_file_of_another_machine_loads_with_a_warning_that_says_what_differs(name, value, path):
    here = getattr(file_module.current_fingerprint(), name)
    with pytest.warns(rx.MachineMismatchWarning) as caught:
        found = loaded(json.dumps(content(**{name: value})), path)
    assert found.coefficients == MEDIAN
    (warning,) = caught
    assert f"{name} {value!r} there, {here!r} here" in str(warning.message)
    is_software = name in ("jax", "thread_flags")
    assert ("was made with other software" if is_software else "was made elsewhere") in str(warning.message)
    assert str(path) in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("step", ["replace", "fsync", "chmod"])
@pytest.mark.parametrize("existed", [True, False])
def test_a_write_that_fails_leaves_the_old_file_whole_and_nothing_else(step, existed, path, monkeypatch):
    if existed:
        path.write_text("the old file")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="disk full"):
        write_json_file(CalibrationFile.model_validate(content()), path)
    assert [p.name for p in path.parent.iterdir()] == [path.name] * existed
    assert not existed or path.read_text() == "the old file"


def test_the_new_file_replaces_the_old_in_one_step(path, monkeypatch):
    path.write_text("the old file")
    seen = []
    replace = os.replace

    def watched(source, target):
        seen.append((path.read_text(), json.loads(Path(source).read_text())["schema_version"]))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    write_json_file(CalibrationFile.model_validate(content()), path)
    assert seen == [("the old file", 3)]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_default_file_lies_in_rlxjax_home(tmp_path, monkeypatch):
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path / "home"))
    default = file_module.default_calibration_path()
    assert default == tmp_path / "home" / f"calibration-{jax.default_backend()}.json"
    assert file_module.default_calibration_path("tpu") == tmp_path / "home" / "calibration-tpu.json"
    with pytest.raises(rx.CalibrationFileError, match=f"{default}: no such file"):
        rx.load_calibration()
    write_json_file(CalibrationFile.model_validate(content()), default)
    assert rx.load_calibration().coefficients == MEDIAN


def test_the_default_file_lies_with_the_users_data_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("RLXJAX_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert "rlxjax" in file_module.default_calibration_path("cpu").parts


def test_a_pick_of_arrays_and_traced_sizes_is_codes_and_of_scalars_a_name():
    cal = calibration()
    batches = np.array([1, 64, 1024, 8192])
    codes = cal.pick(batches, 256, 16)
    np.testing.assert_array_equal(codes, [cal.pick_path(int(b), 256, 16, 2).code for b in batches])
    np.testing.assert_array_equal(jax.jit(lambda b: cal.pick(b, 256, 16))(batches), codes)
    inside = jax.jit(lambda x: x + rx.Path.parse(cal.pick_path(8, 256, 16, 2)).code)(0)
    assert inside == cal.pick_path(8, 256, 16, 2).code
    with pytest.raises(ValueError, match="batch: expected an integer, got 1.5"):
        cal.pick(1.5, 256, 16)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("coefficients.dispatch_ns.unit", "us"),
        ("units.time", "s"),
        ("gate.unified_memory.value", 7.0),
        ("domain.batch.low", 1e9),
        ("schema_version", True),
    ],
)
def test_a_file_that_would_be_misread_is_refused(path, field, value):
    with pytest.raises(rx.CalibrationFileError, match=field.split(".")[0]):
        loaded(json.dumps(changed(content(), field, value)), path)
