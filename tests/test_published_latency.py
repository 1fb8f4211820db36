"""The latency of a batched FFT: its laws, its fit, and published latencies predicted cell by cell."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import FLOAT32_RTOL, FLOAT64_RTOL, assert_gradient_is_the_finite_difference

import rlxjax as rx
from benchmarks import published_latency
from benchmarks.startup import compilations
from rlxjax._latency import coefficient_unit

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "calibrated-model.md").read_text(encoding="utf-8")
TIMINGS = published_latency.read_timings(published_latency.PUBLISHED)
STACKED, WEIGHTS = rx.stack_timings(list(TIMINGS.values()))
MEDIAN = rx.typical_fft_prior().median
NAMES = [field.name for field in dataclasses.fields(rx.FftLatencyCoefficients)]
BATCH, N_FFT = (np.ravel(a) for a in np.meshgrid([0, 1, 32, 2048, 131072], [2, 64, 1000, 4096]))

each_path = pytest.mark.parametrize("path", TIMINGS)


def machine(seed):
    """Return coefficients a few times more or less than the typical ones."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda median: float(median * np.exp(rng.normal())), MEDIAN)


@pytest.fixture(scope="module")
def reports():
    return {path: published_latency.leave_one_out(path, timings) for path, timings in TIMINGS.items()}


@each_path
def test_a_published_latency_is_predicted_from_the_others_within_12_per_cent(path, reports):
    assert np.median(np.abs(reports[path].errors())) <= 0.12


@each_path
def test_every_fit_converges_to_positive_coefficients(path, reports):
    assert reports[path].converged
    assert all(np.isfinite(value) and value > 0 for value in vars(reports[path].fit.coefficients).values())
    assert reports[path].fit.measured["call_ns"]
    assert reports[path].fit.measured["flop_per_ns"] or reports[path].fit.measured["bytes_per_ns"]


def test_the_cell_that_contradicts_a_larger_one_is_named(reports):
    index = list(zip(TIMINGS["metal"].n_fft, TIMINGS["metal"].batch, strict=True)).index((256, 32))
    assert reports["metal"].contradicts(index) == ["1024 x 32"]
    rows = published_latency.summary(reports["metal"])["rows"]
    assert rows[index]["is_outlier"]
    assert "| metal 256 x 32 | 0.41 |" in published_latency.text(list(reports.values()))


@each_path
def test_the_documentation_states_the_median_error(path, reports):
    (row,) = [
        line for line in PAGE.splitlines() if line.startswith(f"| {path} | {len(TIMINGS[path].batch)} |")
    ]
    stated = float(row.split("|")[3]) / 100
    assert stated == pytest.approx(np.median(np.abs(reports[path].errors())), abs=0.005)


def test_the_documentation_states_the_errors_from_few_cells_that_were_kept():
    kept = json.loads((ROOT / "docs" / "evidence" / "published-latency.json").read_text(encoding="utf-8"))
    assert [row["choices"] for row in kept["few_cells"]["paths"]] == [3003] * 5 + [462]
    alone, pooled = (
        np.mean([row[how]["mean_error"] for row in kept["few_cells"]["paths"]]) for how in ("alone", "pooled")
    )
    assert f"from {100 * alone:.1f} to {100 * pooled:.1f} %" in " ".join(PAGE.split())


def test_the_fit_recovers_a_machine():
    batch, n_fft, true = TIMINGS["cpu"].batch, TIMINGS["cpu"].n_fft, machine(5)
    timings = rx.FftTimings.checked(batch=batch, n_fft=n_fft, time_ns=rx.fft_latency_ns(true, batch, n_fft))
    result = rx.fit_fft_latency(timings)
    found, expected = (rx.fft_latency_ns(c, 512, 512) for c in (result.coefficients, true))
    assert result.converged
    assert isinstance(result.coefficients, rx.FftLatencyCoefficients)
    np.testing.assert_allclose(found, expected, rtol=0.03)


def test_float32_fits_the_same_predictions(reports):
    timings, exact = TIMINGS["ane"], reports["ane"].fit.coefficients
    with jax.enable_x64(False):
        single = rx.fit_fft_latency(timings).coefficients
    found, expected = (rx.fft_latency_ns(c, timings.batch, timings.n_fft) for c in (single, exact))
    np.testing.assert_allclose(found, expected, rtol=0.01)


def test_new_values_priors_and_weights_compile_nothing(reports):
    rx.fft_latency_ns(MEDIAN, BATCH, N_FFT)
    rx.fit_fft_latency(TIMINGS["cpu"])
    compilations.clear()
    prior = rx.LatencyPrior(machine(0), jax.tree.map(lambda _: 0.5, MEDIAN))
    slower = dataclasses.replace(TIMINGS["cpu"], time_ns=2 * TIMINGS["cpu"].time_ns)
    rx.fit_fft_latency(slower, prior, np.linspace(0.5, 1.0, 15))
    rx.fft_latency_ns(machine(1), BATCH[::-1], N_FFT[::-1])
    assert not compilations


def test_every_path_at_once_equals_one_after_the_other(reports):
    many = rx.fit_fft_devices(STACKED, weights=WEIGHTS)
    np.testing.assert_allclose(many.loss, [reports[path].fit.loss for path in TIMINGS], rtol=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_gradient_equals_finite_differences(seed):
    rows = BATCH > 0
    stacked = jax.tree.map(lambda value: np.full(rows.sum(), value), machine(seed))
    tree = (stacked, BATCH[rows].astype(float))
    assert_gradient_is_the_finite_difference(lambda t: rx.fft_latency_ns(t[0], t[1], N_FFT[rows]), tree)


def test_jit_vmap_and_a_loop_equal_one_call_of_arrays():
    together = rx.fft_latency_ns(MEDIAN, BATCH, N_FFT)
    jitted = jax.jit(rx.fft_latency_ns)(MEDIAN, jnp.asarray(BATCH), jnp.asarray(N_FFT))
    np.testing.assert_allclose(jitted, together, rtol=FLOAT64_RTOL)
    with jax.disable_jit():
        np.testing.assert_allclose(rx.fft_latency_ns(MEDIAN, BATCH, N_FFT), together, rtol=FLOAT64_RTOL)
    machines = [machine(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.array(leaves), *machines)
    every = jax.vmap(lambda c: rx.fft_latency_ns(c, BATCH, N_FFT))(stacked)
    loop = [
        [float(rx.fft_latency_ns(c, int(b), int(n))) for b, n in zip(BATCH, N_FFT, strict=True)]
        for c in machines
    ]
    np.testing.assert_allclose(every, loop, rtol=FLOAT64_RTOL)


@pytest.mark.parametrize("seed", range(3))
def test_the_latency_is_positive_and_grows_with_batch_and_n_fft(seed):
    batch, n_fft = 2 ** np.arange(20)[:, None], 2 ** np.arange(1, 14)[None, :]
    latency = np.asarray(rx.fft_latency_ns(machine(seed), batch, n_fft))
    assert np.all(latency > machine(seed).call_ns)
    assert np.all(np.diff(latency, axis=0) > 0)
    assert np.all(np.diff(latency, axis=1) > 0)


def test_each_coefficient_moves_the_latency_its_own_way():
    gradient = jax.grad(lambda c: rx.fft_latency_ns(c, 2048, 256))(MEDIAN)
    signs = {name: np.sign(getattr(gradient, name)) for name in NAMES}
    assert signs == {"call_ns": 1, "row_ns": 1, "flop_per_ns": -1, "bytes_per_ns": -1, "onset_rows": 1}


@pytest.mark.parametrize("scale", [1e-3, 7.0])
def test_a_slower_clock_scales_the_prediction(scale):
    power = {"ns": 1, "bytes/ns": -1, "FLOP/ns": -1, "rows": 0}
    slower = {name: getattr(MEDIAN, name) * scale ** power[coefficient_unit(name)] for name in NAMES}
    found = rx.fft_latency_ns(rx.FftLatencyCoefficients(**slower), BATCH, N_FFT)
    np.testing.assert_allclose(
        found, scale * np.asarray(rx.fft_latency_ns(MEDIAN, BATCH, N_FFT)), rtol=FLOAT64_RTOL
    )


def test_float32_is_within_1e_5_of_float64():
    exact = np.asarray(rx.fft_latency_ns(machine(1), BATCH, N_FFT))
    with jax.enable_x64(False):
        single = rx.fft_latency_ns(machine(1), BATCH, N_FFT)
        assert single.dtype == np.float32
        np.testing.assert_allclose(single, exact, rtol=FLOAT32_RTOL)


def columns(**changed):
    return {"batch": [32] * 10, "n_fft": [64] * 10, "time_ns": [1e5] * 10, **changed}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": 32}, r"batch: expected one axis, got shape \(\)"),
        ({"n_fft": [64] * 9}, r"n_fft: expected shape \(10,\), as batch has, got \(9,\)"),
        ({"n_fft": [64] * 9 + [65]}, r"n_fft: expected even whole numbers, got 65"),
        ({"batch": [1] * 9 + [2.5]}, r"batch: expected whole numbers, got 2.5"),
        ({"time_ns": [1e5] * 9 + [0.0]}, r"time_ns\[9\]: expected a positive finite number, got 0"),
        ({"time_ns": ["fast"] * 10}, r"time_ns: expected numbers, got \['fast'"),
    ],
)
def test_columns_that_no_run_has_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        rx.FftTimings.checked(**columns(**changed))


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(ValueError, match="expected several workloads, got one"):
        rx.fit_fft_latency(rx.FftTimings.checked(**columns()))
    with pytest.raises(ValueError, match="at least 8 that count, got 5"):
        rx.fit_fft_latency(rx.FftTimings.checked(**columns()), weights=np.arange(10) < 5)
    with pytest.raises(ValueError, match=r"weights: expected shape \(10,\), got \(9,\)"):
        rx.fit_fft_latency(rx.FftTimings.checked(**columns()), weights=np.ones(9))


@pytest.mark.parametrize(
    ("batch", "n_fft", "message"),
    [
        (-1, 64, "batch: expected a size of at least 0, got -1"),
        (32, np.nan, "n_fft: expected a size of at least 2, got nan"),
        (32, 65, "n_fft: expected an even number, got 65"),
        (np.ones(2), 64 * np.ones(3), "shapes that broadcast"),
    ],
)
def test_a_workload_without_a_latency_is_refused(batch, n_fft, message):
    with pytest.raises(ValueError, match=message):
        rx.fft_latency_ns(MEDIAN, batch, n_fft)


def test_the_command_writes_its_tables_and_refuses_other_files(tmp_path):
    rows = published_latency.PUBLISHED.read_text(encoding="utf-8").splitlines()
    table, out = tmp_path / "one.csv", tmp_path / "out.json"
    table.write_text("\n".join(row for row in rows if row.startswith(("device", "gpu"))), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.published_latency"]
    done = subprocess.run([*command, table, "--json", out], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = json.loads(out.read_text(encoding="utf-8"))["paths"]
    assert (path["path"], path["cells"], len(path["rows"])) == ("gpu", 11, 11)
    assert f"| gpu | 11 | {100 * path['median_error']:.1f} |" in done.stdout
    table.write_text("device,batch\ngpu,3\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"missing \['ms', 'n_fft'\]"):
        published_latency.read_timings(table)
