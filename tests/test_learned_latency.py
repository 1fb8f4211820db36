"""The latency of the learned path: its laws, its fit, and what a calibration predicts and picks with it."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import FLOAT32_RTOL, FLOAT64_RTOL, assert_gradient_is_the_finite_difference
from test_calibration import assert_same, changed, content, with_coefficients

import rlxjax as rx
from rlxjax._calibration import LearnedCalibration
from rlxjax._calibration_file import CalibrationFile, read_calibration_file
from rlxjax._files import write_json_file
from rlxjax._latency import coefficient_unit
from rlxjax._learned_latency import (
    LEARNED_COEFFICIENT_NAMES,
    LearnedLatencyCoefficients,
    fit_learned,
    learned_terms_ns,
)
from rlxjax.welch import LearnedWork
from rlxjax.welch._launch import LEAST_IN_PLACE_BYTES, MOST_UNSHARED_SAMPLES

SHARED = rx.typical_prior().median
OWN = LearnedLatencyCoefficients(learned_segment_ns=40.0, learned_flop_per_ns=25.0)
#: Columns (flop, live bins, batch, n_fft, k, n_segments) of runs that reach every branch of the formula.
RUNS = tuple(
    np.array(column, float)
    for column in zip(
        *(
            (flop, share * (n_fft / 2 + 1), batch, n_fft, k, n_segments)
            for flop, share, batch, n_fft, k, n_segments in itertools.product(
                (1.0, 3e3, 3e5), (0.0, 0.2, 1.0), (1, 64, 8192), (64, 2048), (1, 16, 50), (1, 8)
            )
        ),
        strict=True,
    )
)
SIZES = {"flop": 3e3, "live_bins": 20.0, "batch": 64.0, "n_fft": 1024.0, "k": 8.0, "n_segments": 2.0}
MODELS, BATCHES, KS = ((64, 2e3, 8), (256, 1.5e4, 30), (1024, 9e4, 100)), (1, 16, 128, 1024, 8192), (4, 16)


def machine(seed):
    """Return coefficients a few times more or less than the typical ones."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda value: float(value * np.exp(rng.normal())), (OWN, SHARED))


def predict(coefficients, runs=RUNS):
    return learned_terms_ns(*coefficients, *runs).total_ns()


def test_terms_are_positive_and_sum_to_the_prediction():
    for seed in range(2):
        terms = jax.jit(learned_terms_ns)(*machine(seed), *RUNS)
        parts = [np.asarray(part) for name, part in vars(terms).items() if name != "correction_ns"]
        assert np.all(terms.correction_ns == 0.0)
        assert all(part.shape == RUNS[0].shape for part in parts)
        assert all(np.all(np.isfinite(part) & (part > 0)) for part in parts)
        np.testing.assert_allclose(sum(parts), predict(machine(seed)), rtol=FLOAT64_RTOL)


def test_all_but_the_device_s_work_and_what_it_hides_are_the_fused_path_s():
    own, shared = machine(0)
    learned = learned_terms_ns(own, shared, *RUNS)
    fused = rx.latency_terms_ns(shared, "fused", *RUNS[2:])
    for name in ("call_ns", "upload_ns", "readback_ns"):
        np.testing.assert_allclose(getattr(learned, name), getattr(fused, name), rtol=FLOAT64_RTOL)


def test_the_prediction_grows_with_every_size():
    for seed in range(2):
        for name in SIZES:
            columns = {
                "flop": np.geomspace(1, 1e7, 40),
                "live_bins": np.arange(514.0),
                "batch": np.unique([rx.padded_batch(batch) for batch in range(1, 5001)]).astype(float),
                "n_fft": 2.0 ** np.arange(6, 13),
                "k": np.arange(1.0, 500.0),
                "n_segments": np.arange(1.0, 9.0),
            }
            runs = dict(SIZES, live_bins=513.0 if name == "k" else 20.0) | {name: columns[name]}
            steps = np.diff(jax.jit(predict)(machine(seed), list(runs.values())))
            samples = np.broadcast_to(runs["batch"] * runs["n_fft"] * runs["n_segments"], columns[name].shape)
            signal_bytes = 2.0 * samples * (1.0 + 1.0 / runs["n_segments"])
            # Where sharing begins, and where signals are no longer copied, a run takes less.
            regime = 1 * (samples > MOST_UNSHARED_SAMPLES) + 2 * (signal_bytes >= LEAST_IN_PLACE_BYTES)
            assert np.all(steps[regime[1:] == regime[:-1]] > 0)


def cost_ns(t, batch, n_fft):
    return learned_terms_ns(
        t["own"], t["shared"], t["flop"], t["live_bins"], batch, n_fft, t["k"], t["n_segments"]
    ).total_ns()


def test_the_gradient_is_the_finite_difference():
    for seed in range(2):
        own, shared = machine(seed)
        runs = [column[::11] for column in RUNS]
        rows = len(runs[0])
        own, shared = jax.tree.map(lambda value: np.full(rows, value), (own, shared))
        flop, live_bins, batch, n_fft, _, _ = runs
        smooth = {"flop": np.maximum(flop, 100.0), "live_bins": np.clip(live_bins, 1, n_fft / 4)}

        # Whole numbers of segments give chunks of exactly a batch, where two branches meet.
        tree = {"own": own, "shared": shared, **smooth, "k": np.full(rows, 3.0), "n_segments": runs[5] + 0.25}
        assert_gradient_is_the_finite_difference(cost_ns, tree, batch, n_fft)
        slope = jax.grad(lambda b: predict((OWN, SHARED), (SIZES | {"batch": b}).values()))(9.0)
        assert slope > 0, "no staircase"


def test_an_empty_batch_or_mask_has_a_finite_prediction():
    for nothing in ({"batch": 0.0}, {"live_bins": 0.0}, {"flop": 0.0}):
        assert np.isfinite(predict((OWN, SHARED), (SIZES | nothing).values()))


def test_jit_vmap_and_loop_equal_one_call_of_arrays_and_new_values_are_not_traced_again():
    traces = []

    @jax.jit
    def compiled(coefficients, runs):
        traces.append(1)
        return predict(coefficients, runs)

    together = predict(machine(1))
    for seed in (0, 1):
        found = compiled(machine(seed), RUNS)
    np.testing.assert_allclose(found, together, rtol=FLOAT64_RTOL)
    assert len(traces) == 1
    one = jax.vmap(lambda *run: predict(machine(1), run))
    np.testing.assert_allclose(one(*map(jnp.asarray, RUNS)), together, rtol=FLOAT64_RTOL)
    rows = list(zip(*(column.tolist() for column in RUNS), strict=True))[::23]
    np.testing.assert_allclose([predict(machine(1), row) for row in rows], together[::23], rtol=FLOAT64_RTOL)
    machines = [machine(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.array(leaves), *machines)
    np.testing.assert_allclose(jax.vmap(predict)(stacked), [predict(m) for m in machines], rtol=FLOAT64_RTOL)


def test_float32_is_within_1e_5_of_float64():
    for seed in range(2):
        exact = np.asarray(predict(machine(seed)))
        with jax.enable_x64(False):
            single = predict(machine(seed))
            assert single.dtype == np.float32
            np.testing.assert_allclose(single, exact, rtol=FLOAT32_RTOL)


#: Columns as above of runs of three models.
TIMED = tuple(
    np.array(
        [(flop, bins, batch, n_fft, k, 2) for n_fft, flop, bins in MODELS for batch in BATCHES for k in KS]
    ).T
)


def test_the_fit_finds_known_coefficients():
    for seed in range(2):
        own, shared = machine(seed)
        noise = np.exp(np.random.default_rng(seed).normal(0, 0.01, len(TIMED[0])))
        result = fit_learned(
            shared, *TIMED[:2], np.stack(TIMED[2:]), np.asarray(predict((own, shared), TIMED)) * noise
        )
        assert result.converged, result.message
        found = predict((result.coefficients, shared), TIMED)
        np.testing.assert_allclose(found, predict((own, shared), TIMED), rtol=0.03)
        for name in LEARNED_COEFFICIENT_NAMES:
            assert result.measured[name]
            assert getattr(result.coefficients, name) == pytest.approx(getattr(own, name), rel=0.1)


def test_what_weighs_nothing_is_not_seen_and_too_few_timings_are_refused():
    time_ns = np.asarray(predict((OWN, SHARED), TIMED))
    weights = (TIMED[3] != 256).astype(float)
    spoilt = np.where(weights > 0, time_ns, 1e12)
    fits = [fit_learned(SHARED, *TIMED[:2], np.stack(TIMED[2:]), t, weights) for t in (time_ns, spoilt)]
    assert fits[0].coefficients == fits[1].coefficients
    few = [column[:7] for column in TIMED]
    with pytest.raises(ValueError, match="timings: expected at least 8 that count, got 7"):
        fit_learned(SHARED, *few[:2], np.stack(few[2:]), time_ns[:7])


def section(**models):
    """Return a learned section of models of 64 and 1024 samples, fields of the first replaced."""
    units = {name: coefficient_unit(name) for name in LEARNED_COEFFICIENT_NAMES}
    facts = {"live_bins": 8, "active_gates": 20, "total_gates": 192, "file": "m.json", "sha256": "0" * 64}
    return {
        "coefficients": {
            name: {"value": getattr(OWN, name), "log_sd": 0.1, "unit": unit, "provenance": "measured"}
            for name, unit in units.items()
        },
        "models": [
            {"n_fft": 64, "flop": 1000.0, **facts, **models},
            {"n_fft": 1024, "flop": 3e5, **facts},
        ],
        "spread": 0.07,
        "fit": {
            "converged": True,
            "loss": 1.5,
            "message": "The fit of 30 timings converged.",
            "inseparable": [],
        },
    }


def calibration(shared=None, **own):
    """Return a calibration of the typical machine with a learned section, some coefficients replaced."""
    whole = rx.Calibration.from_file(CalibrationFile.model_validate(content() | {"learned": section()}))
    learned = dataclasses.replace(whole.learned, coefficients=dataclasses.replace(OWN, **own))
    coefficients = dataclasses.replace(SHARED, **(shared or {}))
    return with_coefficients(dataclasses.replace(whole, learned=learned), coefficients)


def test_predictions_are_those_of_the_formula_at_the_timed_work():
    cal, batch = calibration(), np.array([1, 64, 4096])
    for n_fft, flop in ((64, 1000.0), (1024, 3e5)):
        for n_segments in (None, 1, 8):
            expected = learned_terms_ns(OWN, SHARED, flop, 8, batch, n_fft, 16, n_segments or 2)
            found = cal.predict_ns("Learned", batch, n_fft, 16, n_segments)
            np.testing.assert_allclose(found, expected.total_ns(), rtol=FLOAT64_RTOL)
    mixed = cal.predict_ns("learned", 64, np.array([64, 1024]), 16)
    alone = [cal.predict_ns("learned", 64, n_fft, 16) for n_fft in (64, 1024)]
    np.testing.assert_allclose(mixed, alone, rtol=FLOAT64_RTOL)
    assert cal.learned_strategies(64) == ("learned",)
    assert cal.learned_strategies(256) == ()


def test_a_length_that_was_not_timed_is_refused_with_those_that_were():
    for n_fft in [256, np.int64(256), np.array([64, 256]), [64, 256], np.arange(64, 4096, 2)]:
        cal = calibration()
        for run in (cal.predict_ns, cal.terms_ns):
            with pytest.raises(ValueError, match="but at n_fft 64, 1024") as caught:
                run("learned", 8, n_fft, 4)
            assert "\n" not in str(caught.value)


def test_a_length_that_was_not_timed_is_refused_inside_jit_where_it_is_known():
    with pytest.raises(ValueError, match="but at n_fft 64, 1024"):
        jax.jit(lambda batch: calibration().predict_ns("learned", batch, 256, 4))(8)


def test_a_traced_length_that_was_not_timed_is_infinitely_slow():
    found = jax.jit(lambda n: calibration().predict_ns("learned", 8, n, 4))(np.array([64, 256]))
    assert np.isfinite(found[0])
    assert found[1] == np.inf


def test_sizes_that_cannot_be_are_refused_as_on_the_other_paths():
    for sizes in [(-1, 64, 4), (np.nan, 64, 4), (1, 64, 0)]:
        for strategy in ("fused", "learned"):
            with pytest.raises(ValueError, match="expected a size of at least"):
                calibration().predict_ns(strategy, *sizes)


GRID = tuple(itertools.product((1, 1024), (64, 256, 1024), (4,), (1, 2)))
FAST_MODEL = {"learned_segment_ns": 1.0, "learned_flop_per_ns": 200.0}


def test_the_pick_is_the_argmin_of_the_predictions_and_learned_only_where_it_was_timed():
    host_is_slow = {"host_row_ns": 400.0}
    for cal in (calibration(host_is_slow), calibration(host_is_slow, **FAST_MODEL)):
        for sizes in GRID:
            *run, n_segments = sizes
            host = {1: "ultra", 2: "fast"}[n_segments]
            names = (host, "fused", "block", *cal.learned_strategies(run[1]))
            predicted = [float(cal.predict_ns(name, *run, n_segments)) for name in names]
            best = names[int(np.argmin(predicted))]
            assert cal.pick(*sizes) == best, sizes
            path = cal.pick_path(*sizes)
            assert path == ("host" if best == host else best)
            assert int(cal.pick_index(*sizes)) == path.code
    columns = [np.array(column) for column in zip(*GRID, strict=True)]
    codes = [cal.pick_path(*sizes).code for sizes in GRID]
    np.testing.assert_array_equal(cal.pick_index(*columns), codes)
    np.testing.assert_array_equal(jax.jit(cal.pick)(*columns), codes)
    assert set(codes) >= {rx.Path.HOST.code, rx.Path.LEARNED.code}


def test_a_slow_learned_path_is_never_picked():
    cal = calibration(learned_segment_ns=1e12)
    assert {cal.pick(*sizes) for sizes in GRID}.isdisjoint({"learned"})
    columns = [np.array(column) for column in zip(*GRID, strict=True)]
    assert rx.Path.LEARNED.code not in np.asarray(cal.pick_index(*columns))


def test_a_calibration_with_other_coefficients_forgets_the_picks_of_the_old():
    fast = calibration({"host_call_ns": 1e9}, **FAST_MODEL)
    assert fast.pick(64, 64, 4) == "learned"
    assert dataclasses.replace(fast, learned=None).pick(64, 64, 4) != "learned"


def test_auto_takes_the_work_of_the_model_at_hand():
    cal = calibration({"host_call_ns": 1e9, "topk_bin_ns": 1e3}, **FAST_MODEL)
    cheap, dear = LearnedWork(1.0, 1), LearnedWork(1e12, 33)
    assert cal.pick_path(64, 256, 4, 2, work=cheap) is rx.Path.LEARNED
    assert cal.pick_path(64, 64, 4, 2, work=dear) is not rx.Path.LEARNED
    assert dataclasses.replace(cal, learned=None).pick_path(64, 64, 4, 2, work=cheap) != "learned"
    model, params = rx.LearnedFft.exact(64), rx.WelchPeakParams.fast(64, 4)
    gates, mask = np.zeros_like(model.gates), np.arange(33) < 2.0
    model = dataclasses.replace(model, gates=gates, mask=mask)
    signal = np.random.default_rng(0).normal(size=(8, 96))
    peaks = rx.welch_peaks(signal, params, calibration=cal, model=model)
    np.testing.assert_array_equal(peaks, rx.welch_peaks(signal, params, "learned", model=model))
    for other, given in ((cal, None), (dataclasses.replace(cal, learned=None), model)):
        exact = rx.welch_peaks(signal, params, calibration=other, model=given)
        np.testing.assert_allclose(exact, rx.welch_peaks(signal, params, "fused"), rtol=1e-3)


def test_the_section_is_written_and_loaded(tmp_path):
    written = CalibrationFile.model_validate(content() | {"learned": section()})
    write_json_file(written, tmp_path / "c.json")
    assert read_calibration_file(tmp_path / "c.json") == written
    works = {64: LearnedWork(1000.0, 8), 1024: LearnedWork(3e5, 8)}
    found = rx.load_calibration(tmp_path / "c.json")
    assert found.learned == LearnedCalibration(OWN, works, 0.07)
    assert_same(found, rx.Calibration.from_file(written))
    run = found.estimate("learned", 64, np.array([64, 1024]), 16)
    np.testing.assert_array_equal(run.time_ns, found.predict_ns("learned", 64, np.array([64, 1024]), 16))
    np.testing.assert_allclose(run.log_sd(), 0.07)


def test_files_without_the_section_load_and_say_that_nothing_was_timed(tmp_path):
    for plain in (content(), content() | {"learned": None}):
        (tmp_path / "c.json").write_text(json.dumps(plain))
        found = rx.load_calibration(tmp_path / "c.json")
        assert found.learned is None
        with pytest.raises(ValueError, match="'learned' was not timed.*given no learned model"):
            found.predict_ns("learned", 1, 64, 4)
        assert found.pick_path(1, 64, 4, 2) is not rx.Path.LEARNED


def test_a_bad_section_is_refused_in_one_line_that_names_the_field(tmp_path):
    for field, value in [
        ("learned.coefficients.learned_segment_ns", None),
        ("learned.coefficients.learned_segment_ns.value", -1.0),
        ("learned.coefficients.learned_flop_per_ns.value", float("nan")),
        ("learned.coefficients.learned_flop_per_ns.unit", "GFLOP/s"),
        ("learned.coefficients.unknown_ns", {"value": 1.0, "unit": "ns", "provenance": "measured"}),
        ("learned.models", None),
        ("learned.models", []),
        ("learned.models", [section()["models"][0]] * 2),
        ("learned.models", section(flop=0.0)["models"]),
        ("learned.models", section(live_bins=-1)["models"]),
        ("learned.models", section(live_bins=34)["models"]),
        ("learned.models", section(n_fft=63)["models"]),
        ("learned.models", section(active_gates=193)["models"]),
        ("learned.models", section(surprise=1)["models"]),
        ("learned.spread", 0.0),
        ("learned.fit", None),
    ]:
        path = tmp_path / "c.json"
        path.write_text(json.dumps(changed(content() | {"learned": section()}, field, value)))
        with pytest.raises(rx.CalibrationFileError) as caught:
            rx.load_calibration(path)
        message = str(caught.value)
        assert "\n" not in message
        assert message.startswith(f"{path}: learned")
        assert field.split(".")[2 if field.count(".") > 1 else 1] in message
