"""What other machines say of one that was not timed, and which calibration is used where none is given."""

import json
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from _content import content, sealed

import rlxjax as rx
from rlxjax.calibration import (
    CalibrationFile,
    MachineMismatchWarning,
    current_fingerprint,
    population,
    population_prior,
    write_json_file,
)
from rlxjax.fit import named
from rlxjax.models import BUILT_IN, WELCH
from rlxjax.welch import schedule

SIGNAL = np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32)
PARAMS = rx.WelchPeakParams.fast(64, 4)


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A function that writes the saved calibration of this machine, with other coefficients or fingerprint."""
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))

    def write(launch_ns=None, **fingerprint):
        written = content(**fingerprint)
        if launch_ns is not None:
            written["models"]["welch"]["coefficients"]["launch_ns"]["value"] = launch_ns
        path = tmp_path / f"calibration-{jax.default_backend()}.json"
        write_json_file(CalibrationFile.model_validate(written), path)
        return path

    return write


def test_the_population_is_of_the_models_and_of_the_schedule_that_are_here():
    calibration = rx.calibration.prior_calibration("cpu")
    for name, calibrated in calibration.models.items():
        assert calibrated.model is BUILT_IN[name]
        assert named(calibrated.coefficients) == named(population_prior(BUILT_IN[name], "cpu").median)
        count = len(population("cpu").models[name].population.machines)
        said = f"from {count} other machine{'s' * (count > 1)}; `rlxjax calibrate`"
        assert said in calibrated.cautions[0]
    facts, here = calibration.of("welch").posterior.facts, schedule("cpu")._asdict()
    assert {name: facts[name] for name in here if name in facts} == {
        name: float(value) for name, value in here.items() if name in facts
    }
    assert "no calibration of this machine" in calibration.source
    assert rx.calibration.prior_calibration("abacus") is None
    assert population_prior(WELCH, "abacus") is None


def test_the_population_is_used_without_a_saved_calibration_and_for_a_model_that_the_saved_one_lacks(
    saved, tmp_path, monkeypatch
):
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path / "empty"))
    low, high = rx.default_calibration("cpu").interval_ns("fused", 1024, 256, 16)
    assert high / low > 3.0
    assert "no calibration of this machine" in rx.default_calibration("cpu").source
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    path = saved()
    written, found, expected = json.loads(path.read_text()), rx.default_calibration(), rx.load_calibration(path)
    assert found.source.endswith(str(path))
    assert found.predict_ns("fused", 64, 256, 16) == expected.predict_ns("fused", 64, 256, 16)
    other = tmp_path / "other"
    other.mkdir()
    (other / path.name).write_text(json.dumps(sealed(written | {"models": {}})))
    monkeypatch.setenv("RLXJAX_HOME", str(other))
    found = rx.default_calibration()
    assert named(found.of("welch").coefficients) == named(population_prior(WELCH).median)
    assert found.of("welch").cautions
    assert found.gate == expected.gate


#: A section that is stale, damaged, or of another machine.
BAD = {"model_version": 1}, {"noise_floor": -1.0}, {"fingerprint": current_fingerprint().model_dump() | {"cores": 9999}}


@pytest.mark.parametrize("change", BAD)
def test_a_good_section_and_the_gate_are_used_beside_one_that_is_not(saved, change):
    path = saved()
    written = json.loads(path.read_text(encoding="utf-8"))
    evidence = Path(rx.__file__).parents[1] / "docs/evidence/xeon.json"
    functions = json.loads(evidence.read_text(encoding="utf-8"))["models"]["functions"]
    written["models"] = {
        "functions": functions | {"fingerprint": written["machine"]["fingerprint"]},
        "welch": written["models"]["welch"] | change,
    }
    path.write_text(json.dumps(sealed(written)), encoding="utf-8")
    with pytest.warns(UserWarning, match="welch"):
        found = rx.default_calibration()
    assert found.gate is not None
    assert found.source.endswith(str(path))
    measured, _ = (found.of(name).provenance.values() for name in ("functions", "welch"))
    assert rx.gate.Provenance.MEASURED in measured
    assert set(found.of("welch").provenance.values()) == {rx.gate.Provenance.UNCALIBRATED}


def test_what_another_machine_saved_or_is_spoilt_is_named_and_not_used(saved, tmp_path, monkeypatch):
    saved(cpu_model="Z80")
    (tmp_path / "spoilt").mkdir()
    (tmp_path / "spoilt" / f"calibration-{jax.default_backend()}.json").write_text("{", encoding="utf-8")
    for home, warning, said in (
        (tmp_path, MachineMismatchWarning, "Z80"),
        ("spoilt", UserWarning, "the file is not used"),
    ):
        monkeypatch.setenv("RLXJAX_HOME", str(tmp_path / home))
        with pytest.warns(warning, match=said):
            assert "no calibration of this machine" in rx.default_calibration().source


def test_auto_picks_by_what_is_saved_and_by_the_reference_where_that_is_asked(saved):
    saved(launch_ns=1e12)  # a device that takes minutes to launch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peaks = rx.welch_peaks(SIGNAL, PARAMS)
    np.testing.assert_array_equal(peaks, rx.welch_peaks(SIGNAL, PARAMS, "host"))
    np.testing.assert_allclose(rx.welch_peaks(SIGNAL, PARAMS, calibration="reference"), peaks, rtol=1e-4)
    with pytest.raises(ValueError, match="expected a Calibration .* or 'reference', got str"):
        rx.welch_peaks(SIGNAL, PARAMS, calibration="other")


@pytest.mark.parametrize("is_saved", [False, True])
def test_the_first_question_may_come_while_a_program_is_traced(saved, is_saved):
    if is_saved:
        saved()
    constant = jax.jit(lambda x: x + rx.welch_peaks(SIGNAL[:3], PARAMS)[0, 0, 1])
    assert np.isfinite(constant(1.0))
    assert isinstance(rx.default_calibration().predict_ns("fused", 64, 256, 16).item(), float)
