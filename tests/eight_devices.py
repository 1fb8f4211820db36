"""Laws of arrays on eight devices: `test_several_devices.py` runs them in a process that has eight."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _compilations import COMPILE, compilations
from _models import LINE, LINE_TRUTH, LineModel, calibrated, certain
from _tolerances import FLOAT32_RTOL
from _welch_reference import noise
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import rlxjax as rx
from calibrate.suites.collectives import CollectivesSuite
from rlxjax.fit import Timings, fit_posterior

PARAMS = rx.WelchPeakParams.fast(n_fft=64, k=5)
MODEL = rx.learned.LearnedFft.exact(64)
ON_DEVICES = ("fused", "auto", "learned")
#: How rows may be sharded over a mesh of the axes x and y, and the rows of a device among 16.
SPECS = {PartitionSpec("x", None): 4, PartitionSpec(("y", "x")): 2, PartitionSpec(): 16}

each_kind = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto axes", "explicit axes"])


def mesh_of(kind, shape=(4, 2), names=("x", "y")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def peaks_of(signal, path="fused"):
    return rx.welch_peaks(signal, PARAMS, path, model=MODEL)


def assert_same_peaks(found, expected, rtol=FLOAT32_RTOL):
    np.testing.assert_array_equal(found[..., 0], expected[..., 0])
    np.testing.assert_allclose(found, expected, rtol=rtol)


def assert_rows_alike(peaks, signal):
    rows = NamedSharding(signal.sharding.mesh, PartitionSpec(*signal.sharding.spec[:1]))
    assert peaks.sharding.is_equivalent_to(rows, peaks.ndim)


@each_kind
def test_peaks_are_those_of_one_device_and_are_sharded_as_their_rows(kind):
    mesh, rows = mesh_of(kind), noise(16, PARAMS)
    expected = {path: peaks_of(jnp.asarray(rows), path) for path in ("fused", "learned", "block", "host")}
    for spec, n_own in SPECS.items():
        signal = jax.device_put(rows, NamedSharding(mesh, spec))
        for path in (*ON_DEVICES, "block", "host"):
            peaks = peaks_of(signal, path)
            assert_rows_alike(peaks, signal)
            assert peaks.addressable_shards[0].data.shape == (n_own, 5, 2)
            # What the host selects, it selects of all rows; of a device's own, programs of other sizes may round.
            assert_same_peaks(peaks, expected["fused" if path == "auto" else path], FLOAT32_RTOL * (path in ON_DEVICES))


def test_the_rows_of_a_device_have_the_bits_that_they_have_alone_where_none_are_padded():
    rows = noise(4096, PARAMS)  # for each device more than a program transforms at a time
    signal = jax.device_put(rows, NamedSharding(mesh_of(AxisType.Auto), PartitionSpec(("x", "y"))))
    peaks = peaks_of(signal)
    for own, given in zip(peaks.addressable_shards, signal.addressable_shards, strict=True):
        assert own.device == given.device
        np.testing.assert_array_equal(own.data, peaks_of(np.asarray(given.data)))


def test_nothing_is_transferred_and_all_devices_share_one_program():
    model, where = rx.learned.LearnedFft.exact(32), NamedSharding(mesh_of(AxisType.Auto), PartitionSpec("x", None))
    for k, path in enumerate(ON_DEVICES, start=1):
        params = rx.WelchPeakParams.fast(32, k)
        first, second = (jax.device_put(noise(16, params, seed), where) for seed in (0, 1))
        compilations.clear()
        rx.welch_peaks(first, params, path, model=model)
        with jax.transfer_guard("disallow"):
            peaks = rx.welch_peaks(second, params, path, model=model)
        assert compilations.count(COMPILE) == 1, path
        assert_same_peaks(peaks, rx.welch_peaks(np.asarray(second), params, "fused"))


@each_kind
def test_any_real_dtype_longer_rows_no_rows_and_one_row_are_taken(kind):
    mesh = mesh_of(kind)
    counts = np.random.default_rng(1).integers(0, 100, (16, PARAMS.frame_len + 7))
    for name in ("int16", "float16", "float64"):
        signal = jax.device_put(counts.astype(name), NamedSharding(mesh, PartitionSpec("x")))
        assert_same_peaks(peaks_of(signal), peaks_of(counts.astype(name)))
    assert peaks_of(jax.device_put(counts[:0], signal.sharding)).shape == (0, 5, 2)
    row = jax.device_put(counts[0], NamedSharding(mesh, PartitionSpec()))
    for path in (*ON_DEVICES, "host"):
        assert_same_peaks(peaks_of(row, path), peaks_of(counts[:1]))


@each_kind
def test_a_stream_gives_peaks_that_are_sharded_as_their_rows(kind):
    where = NamedSharding(mesh_of(kind), PartitionSpec("x"))
    signals = [jax.device_put(noise(16, PARAMS, seed), where) for seed in range(3)]
    for peaks, signal in zip(rx.welch.stream_welch_peaks(signals, PARAMS), signals, strict=True):
        assert_rows_alike(peaks, signal)
        assert_same_peaks(peaks, peaks_of(np.asarray(signal)))


@each_kind
def test_the_devices_are_those_of_the_rows_whatever_mesh_the_caller_has_set(kind):
    rows = noise(16, PARAMS)
    own = Mesh(np.array(jax.devices()[5:1:-1]), ("z",), axis_types=(kind,))
    signal = jax.device_put(rows, NamedSharding(own, PartitionSpec("z")))
    with jax.set_mesh(mesh_of(kind)):
        peaks = peaks_of(signal)
    assert peaks.sharding.mesh == own
    assert_same_peaks(peaks, peaks_of(rows))


@pytest.mark.parametrize("path", ["fused", "learned"])
def test_traced_rows_of_explicit_axes_stay_on_their_devices(path):
    rows, mesh = noise(16, PARAMS), mesh_of(AxisType.Explicit)
    run = jax.jit(lambda signal: peaks_of(signal, path))
    for spec in SPECS:
        signal = jax.device_put(rows, NamedSharding(mesh, spec))
        assert_rows_alike(run(signal), signal)
        assert_same_peaks(run(signal), peaks_of(rows, path))


def test_gradients_and_rows_under_vmap_stay_on_their_devices():
    rows, where = noise(16, PARAMS), NamedSharding(mesh_of(AxisType.Explicit), PartitionSpec("x"))
    signal, slope = jax.device_put(rows, where), jax.jit(jax.grad(lambda signal: peaks_of(signal)[..., 1].sum()))
    assert_rows_alike(slope(signal), signal)
    np.testing.assert_allclose(slope(signal), slope(rows), rtol=FLOAT32_RTOL, atol=1e-4)
    stacked = jax.jit(jax.vmap(peaks_of))(signal[None])
    assert_same_peaks(stacked[0], peaks_of(rows))


@each_kind
@pytest.mark.parametrize("path", ["fused", "learned"])
def test_welch_peaks_run_within_a_shard_map_of_the_callers(path, kind):
    rows, split = noise(16, PARAMS), PartitionSpec("x")
    signal = jax.device_put(rows, NamedSharding(mesh_of(kind), split))
    mapped = jax.shard_map(lambda own: peaks_of(own, path), mesh=signal.sharding.mesh, in_specs=split, out_specs=split)
    peaks = jax.jit(mapped)(signal)
    assert_rows_alike(peaks, signal)
    assert_same_peaks(peaks, peaks_of(rows, path))


def test_sharded_samples_are_refused_in_one_sentence_that_says_what_to_do():
    rows = np.ones((8, 96), np.float32)
    for transform, kind in ((lambda run: run, AxisType.Auto), (jax.jit, AxisType.Explicit)):
        mesh = mesh_of(kind)
        for signal, spec, better in [
            (rows, PartitionSpec(None, "x"), PartitionSpec("x")),
            (rows, PartitionSpec("y", "x"), PartitionSpec("y")),
            (rows[0], PartitionSpec("x"), PartitionSpec()),
        ]:
            for path in (*ON_DEVICES, "host")[: 3 if transform is jax.jit else 4]:
                with pytest.raises(ValueError, match="^signal: expected whole rows on each device.*over 'x'") as caught:
                    transform(lambda x, path=path: peaks_of(x, path))(jax.device_put(signal, NamedSharding(mesh, spec)))
                assert "\n" not in str(caught.value)
                advice = str(caught.value).partition("use ")[2]
                names = {"jax": jax, "signal": signal, "mesh": mesh}
                assert eval(advice, names).sharding.spec == better  # noqa: S307 - the advice is code


@each_kind
def test_a_table_has_the_same_answers_under_a_mesh(kind):
    rng, rows = np.random.default_rng(0), 3000
    names = [f"{side}_{field.name}" for side in ("before", "after") for field in dataclasses.fields(rx.GraphIoProfile)]
    counts = {name: rng.integers(0, 2**20, rows) for name in names}
    line = calibrated(certain(LINE, LINE_TRUTH))
    for columns, what in ((counts, rx.io_fusion_gate_for_target("cuda")), ({"n": rng.integers(1, 9999, rows)}, line)):
        expected = rx.tables.evaluate(columns, what)
        with jax.set_mesh(mesh_of(kind)):
            assert rx.tables.evaluate(columns, what).equals(expected)


def answers_of(known, model, rows):
    """Return what rlxjax says of some rows: numbers, words, and arrays with the devices that hold them."""
    shape, params = jax.ShapeDtypeStruct(rows.shape, rows.dtype), PARAMS
    ways = {"sum": jax.jit(lambda x: jnp.exp(x).sum(1)), "last": jax.jit(lambda x: jnp.cumsum(jnp.exp(x), 1)[:, -1])}
    chosen = rx.choose(ways, shape, measure="never", calibration=known)
    sizes = len(rows), 256, 16
    yield known.predict_function(ways["last"], shape).time_ns
    yield from (chosen.probability, chosen.chosen.predicted_ns)
    yield rx.advise([jnp.exp, jnp.sum], shape, calibration=known).probability
    yield from (known.pick(*sizes), known.of("welch").alternatives(*sizes), float(known.predict_ns("fused", *sizes)))
    for path in ("auto", "fused", "learned", "block"):
        for signal in (rows, jnp.asarray(rows), jnp.asarray(rows[0])):
            peaks = rx.welch_peaks(signal, params, path, model=model, calibration=known)
            yield np.asarray(peaks)
            yield jax.typeof(peaks).sharding, peaks.devices() if isinstance(peaks, jax.Array) else None


@each_kind
def test_no_answer_depends_on_what_an_earlier_caller_had_set(kind):
    prior = rx.calibration.prior_calibration("cpu")
    settings = [
        lambda: jax.set_mesh(mesh_of(kind)),
        lambda: jax.default_device(jax.devices()[3]),
        lambda: jax.enable_x64(not jax.config.jax_enable_x64),
    ]
    for number, setting in enumerate(settings):
        rows = noise(16 + 2 * number + (kind == AxisType.Auto), PARAMS)

        def new(rows=rows):
            models = {name: dataclasses.replace(one) for name, one in prior.models.items()}
            return dataclasses.replace(prior, models=models), rx.learned.LearnedFft.exact(64), rows

        kept, inside, outside = new(), [], []
        for _ in range(2):
            with setting():
                inside.append([*answers_of(*kept)])
            outside.append([*answers_of(*kept)])
        fresh = [*answers_of(*new())]
        for found in outside:
            jax.tree.map(np.testing.assert_array_equal, found, fresh)
        jax.tree.map(np.testing.assert_array_equal, *inside)
        for one, other in zip(inside[0], fresh, strict=True):
            if isinstance(other, float):
                np.testing.assert_allclose(one, other, rtol=1e-3)
            elif isinstance(other, np.ndarray):
                assert_same_peaks(one, other)


def test_fits_run_on_the_first_cpu_whatever_the_default_device_is():
    places = set()

    class Placed(LineModel):
        def terms_ns(self, coefficients, runs, facts):
            with jax.ensure_compile_time_eval():
                places.update(jnp.zeros(()).devices())
            return super().terms_ns(coefficients, runs, facts)

    n, first = np.tile([10.0, 100.0, 1000.0], 4), jax.devices("cpu")[0]
    timings = Timings.checked(Placed(), time_ns=1e3 + 2.0 * n, variant="plain", n=n)
    expected = fit_posterior(Timings.checked(LineModel(), time_ns=1e3 + 2.0 * n, variant="plain", n=n)).terms
    with jax.default_device(jax.devices()[3]):
        found = fit_posterior(jax.tree.map(jnp.asarray, timings)).terms
        assert jnp.zeros(()).devices() == {jax.devices()[3]}
    assert places == {first}
    assert dict(found.coefficients) == dict(expected.coefficients)


def test_each_collective_of_the_suite_is_what_it_is_called():
    suite = CollectivesSuite()
    cells = {cell.name: cell for cell in suite.cells()}
    assert {cell.variant for cell in cells.values()} == set(rx.models.COLLECTIVES.variants)
    groups, counts = {"all_reduce": 4, "reduce_scatter": 4}, {"all_gather": 4, "reduce_scatter": 1 / 4}
    for kind in rx.models.COLLECTIVES.variants:
        result = suite.program(cells[f"{kind} 16384 of 4"])()
        np.testing.assert_array_equal(result, groups.get(kind, 1))
        operand = 2**14 // 4 // (4 if kind == "all_gather" else 1)
        assert result.addressable_shards[0].data.size == operand * counts.get(kind, 1)
