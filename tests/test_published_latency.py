"""The latency of a batched FFT: its laws, its fit, and published latencies predicted cell by cell."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _compilations import compilations
from _tolerances import FLOAT32_RTOL, FLOAT64_RTOL, assert_gradient_is_the_finite_difference

from benchmarks import published_latency
from rlxjax.fit import LatencyPrior, Timings, fit_latency, named, unit_of
from rlxjax.models import FFT, FftLatencyCoefficients, fft_latency_ns

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "calibrated-model.md").read_text(encoding="utf-8")
TIMINGS = published_latency.read_timings(published_latency.PUBLISHED)
SIZES = {path: published_latency.sizes_of(timings) for path, timings in TIMINGS.items()}
MEDIAN = FFT.prior.median
NAMES = list(named(MEDIAN))
BATCH, N_FFT = (np.ravel(a) for a in np.meshgrid([1, 3, 32, 2048, 131072], [2, 64, 1000, 4096]))

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
    index = list(zip(*SIZES["metal"][::-1], strict=True)).index((256, 32))
    assert reports["metal"].contradicts(index) == ["1024 x 32"]
    rows = published_latency.summary(reports["metal"])["rows"]
    assert rows[index]["is_outlier"]
    assert "| metal 256 x 32 | 0.41 |" in published_latency.text(list(reports.values()))


@each_path
def test_the_documentation_states_the_median_error(path, reports):
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {path} | {len(TIMINGS[path].time_ns)} |")]
    stated = float(row.split("|")[3]) / 100
    assert stated == pytest.approx(np.median(np.abs(reports[path].errors())), abs=0.005)


def test_the_documentation_states_the_errors_from_few_cells_that_were_kept():
    kept = json.loads((ROOT / "docs" / "evidence" / "published-latency.json").read_text(encoding="utf-8"))
    assert [row["choices"] for row in kept["few_cells"]["paths"]] == [3003] * 5 + [462]
    alone, pooled = (
        np.mean([row[how]["mean_error"] for row in kept["few_cells"]["paths"]]) for how in ("alone", "pooled")
    )
    assert pooled < alone
    assert f"from {100 * alone:.1f} to {100 * pooled:.1f} %" in " ".join(PAGE.split())


def test_the_fit_recovers_a_machine():
    (batch, n_fft), true = SIZES["cpu"], machine(5)
    time_ns = fft_latency_ns(true, batch, n_fft)
    timings = Timings.checked(FFT, variant="fft", batch=batch, n_fft=n_fft, time_ns=time_ns)
    result = fit_latency(timings)
    found, expected = (fft_latency_ns(c, 512, 512) for c in (result.coefficients, true))
    assert result.converged
    assert isinstance(result.coefficients, FftLatencyCoefficients)
    np.testing.assert_allclose(found, expected, rtol=0.03)


def test_new_values_priors_and_weights_compile_nothing(reports):
    fft_latency_ns(MEDIAN, BATCH, N_FFT)
    fit_latency(TIMINGS["cpu"])
    compilations.clear()
    prior = LatencyPrior(machine(0), jax.tree.map(lambda _: 0.5, MEDIAN))
    slower = dataclasses.replace(TIMINGS["cpu"], time_ns=2 * TIMINGS["cpu"].time_ns)
    fit_latency(slower, prior, np.linspace(0.5, 1.0, 15))
    fft_latency_ns(machine(1), BATCH[::-1], N_FFT[::-1])
    assert not compilations


@pytest.mark.parametrize("seed", range(3))
def test_gradient_equals_finite_differences(seed):
    stacked = jax.tree.map(lambda value: np.full(BATCH.size, value), machine(seed))
    assert_gradient_is_the_finite_difference(
        lambda tree: fft_latency_ns(tree[0], tree[1], N_FFT), (stacked, BATCH.astype(float))
    )


def test_jit_vmap_and_a_loop_equal_one_call_of_arrays():
    together = fft_latency_ns(MEDIAN, BATCH, N_FFT)
    jitted = jax.jit(fft_latency_ns)(MEDIAN, jnp.asarray(BATCH), jnp.asarray(N_FFT))
    np.testing.assert_allclose(jitted, together, rtol=FLOAT64_RTOL)
    with jax.disable_jit():
        np.testing.assert_allclose(fft_latency_ns(MEDIAN, BATCH, N_FFT), together, rtol=FLOAT64_RTOL)
    machines = [machine(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.array(leaves), *machines)
    every = jax.vmap(lambda c: fft_latency_ns(c, BATCH, N_FFT))(stacked)
    loop = [[float(fft_latency_ns(c, int(b), int(n))) for b, n in zip(BATCH, N_FFT, strict=True)] for c in machines]
    np.testing.assert_allclose(every, loop, rtol=FLOAT64_RTOL)


@pytest.mark.parametrize("seed", range(3))
def test_the_latency_is_positive_and_grows_with_batch_and_n_fft(seed):
    batch, n_fft = 2 ** np.arange(20)[:, None], 2 ** np.arange(1, 14)[None, :]
    latency = np.asarray(fft_latency_ns(machine(seed), batch, n_fft))
    assert np.all(latency > machine(seed).call_ns)
    assert np.all(np.diff(latency, axis=0) > 0)
    assert np.all(np.diff(latency, axis=1) > 0)


def test_each_coefficient_moves_the_latency_its_own_way():
    gradient = jax.grad(lambda c: fft_latency_ns(c, 2048, 256))(MEDIAN)
    signs = {name: np.sign(getattr(gradient, name)) for name in NAMES}
    assert signs == {"call_ns": 1, "row_ns": 1, "flop_per_ns": -1, "bytes_per_ns": -1, "onset_rows": 1}


@pytest.mark.parametrize("scale", [1e-3, 7.0])
def test_a_slower_clock_scales_the_prediction(scale):
    power = {"ns": 1, "bytes/ns": -1, "FLOP/ns": -1, "rows": 0}
    slower = {name: getattr(MEDIAN, name) * scale ** power[unit_of(name)] for name in NAMES}
    found = fft_latency_ns(FftLatencyCoefficients(**slower), BATCH, N_FFT)
    np.testing.assert_allclose(found, scale * np.asarray(fft_latency_ns(MEDIAN, BATCH, N_FFT)), rtol=FLOAT64_RTOL)


def test_float32_is_within_1e_5_of_float64():
    exact = np.asarray(fft_latency_ns(machine(1), BATCH, N_FFT))
    with jax.enable_x64(False):
        single = fft_latency_ns(machine(1), BATCH, N_FFT)
        assert single.dtype == np.float32
        np.testing.assert_allclose(single, exact, rtol=FLOAT32_RTOL)


@pytest.mark.parametrize(
    ("batch", "n_fft", "message"),
    [
        (-1, 64, "batch: expected a size of at least 1.0, got -1"),
        (32, np.nan, "n_fft: expected a size of at least 2, got nan"),
        (32, 65, "n_fft: expected an even number, got 65"),
        (np.ones(2), 64 * np.ones(3), "shapes that broadcast"),
    ],
)
def test_a_workload_without_a_latency_is_refused(batch, n_fft, message):
    with pytest.raises(ValueError, match=message):
        fft_latency_ns(MEDIAN, batch, n_fft)


def test_the_command_writes_its_tables_and_refuses_other_files(tmp_path, monkeypatch, capsys):
    rows = published_latency.PUBLISHED.read_text(encoding="utf-8").splitlines()
    table, out = tmp_path / "one.csv", tmp_path / "out.json"
    table.write_text("\n".join(row for row in rows if row.startswith(("device", "gpu"))), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["published_latency.py", str(table), "--json", str(out)])
    published_latency.main()
    (path,) = json.loads(out.read_text(encoding="utf-8"))["paths"]
    assert (path["path"], path["cells"], len(path["rows"])) == ("gpu", 11, 11)
    assert f"| gpu | 11 | {100 * path['median_error']:.1f} |" in capsys.readouterr().out
    table.write_text("device,batch\ngpu,3\n", encoding="utf-8")
    with pytest.raises(SystemExit) as status:
        published_latency.main()
    assert status.value.code == 2
    assert "missing ['ms', 'n_fft']" in capsys.readouterr().err
