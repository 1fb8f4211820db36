"""A table is what the separate functions return, under jit and vmap too; what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import FLOAT32_RTOL, FLOAT64_RTOL
from test_gate import GATE, INF, table

import rlxjax as rx

TEMPERATURE_NS = 1e5
both_precisions = pytest.mark.parametrize("x64", [True, False])


def profiles(n=100, seed=0):
    rng = np.random.default_rng(seed)
    sides = [[rng.integers(0, most, n) for most in (20, 4, 2**28, 2**40)] for _ in range(2)]
    return [rx.GraphIoProfile(*counts) for counts in sides]


def workloads(n=100, seed=0):
    """Return device codes, batch, n_fft and k that cross every threshold of the formulas."""
    rng = np.random.default_rng(seed)
    batch = rng.choice([0, 1, 128, 129, 256, 511, 512, 513, 2047, 2048, 4096, 8191, 8192, 16384], n)
    return rng.integers(0, len(rx.Device), n), batch, 2 ** rng.integers(1, 13, n), rng.integers(1, 40, n)


def floats(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, float), tree)


def assert_same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def assert_same_table(first, second):
    """Compare tables: exactly but for costs, and probabilities, whose log-odds may be rounded otherwise."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(second), strict=True):
        if "probability" in str(path) or "costs" in str(path):
            rtol = FLOAT64_RTOL if a.dtype == np.float64 else 20 * FLOAT32_RTOL
            np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-30)
        else:
            np.testing.assert_array_equal(a, b)


# --- The gate ------------------------------------------------------------------------------------


@both_precisions
@pytest.mark.parametrize("temperature_ns", [1e-3, 1e5, np.geomspace(1e2, 1e9, 100)])
def test_an_evaluation_is_what_the_separate_methods_return(x64, temperature_ns):
    with jax.enable_x64(x64):
        gate, options = rx.io_fusion_gate_for_target("cuda"), {"temperature_ns": temperature_ns}
        for pair in (profiles(), [floats(profile) for profile in profiles()]):
            result = gate.evaluate(*pair, **options)
            assert_same(result.benefit, rx.fusion_benefit(*pair))
            np.testing.assert_array_equal(result.score_ns, gate.score_ns(*pair))
            np.testing.assert_array_equal(result.should_fuse, gate.should_fuse(*pair))
            np.testing.assert_array_equal(result.fuse_probability, gate.fuse_probability(*pair, **options))
            assert_same(gate.evaluate(result.benefit, **options), result)


@both_precisions
@pytest.mark.parametrize("what", ["fusions", "runs"])
def test_a_compiled_table_is_an_eager_one_and_a_mapped_one_a_loop(what, x64):
    f = {
        "fusions": lambda gate, benefit: gate.evaluate(benefit, temperature_ns=TEMPERATURE_NS),
        "runs": lambda *workload: rx.welch.evaluate_welch_peaks(*workload, temperature_ns=TEMPERATURE_NS),
    }[what]
    with jax.enable_x64(x64):
        device, *sizes = workloads()
        arguments = floats(table(300)) if what == "fusions" else (jnp.asarray(device), *floats(sizes))
        expected = f(*arguments)
        assert_same_table(jax.jit(f)(*arguments), expected)
        assert_same_table(jax.jit(jax.vmap(f))(*arguments), expected)
        one, its = jax.tree.map(lambda leaf: leaf[3], (arguments, expected))
        assert_same_table(f(*one), its)


@pytest.mark.parametrize("shapes", [[(7,), ()], [(), (7,)], [(2, 1, 5), (1, 3, 1)], [(0,), (0,)], [(129,), (129,)]])
def test_an_evaluation_broadcasts(shapes):
    before, after = (
        rx.GraphIoProfile(*(np.float64(np.asarray(np.resize(counts, shape))) for counts in vars(side).values()))
        for side, shape in zip(profiles(200), shapes, strict=True)
    )
    gains = np.linspace(0.0, 1e6, 5).reshape(1, 1, 5) if shapes[0][-1:] == (5,) else 1e3
    gate = dataclasses.replace(GATE, min_gain_ns=gains)
    shape = np.broadcast_shapes(*shapes, np.shape(gate.min_gain_ns))
    expected = gate.score_ns(rx.fusion_benefit(before, after))
    for pair in ((before, after), (floats(before), floats(after)), (before, floats(after))):
        result = gate.evaluate(*pair, temperature_ns=TEMPERATURE_NS)
        np.testing.assert_array_equal(result.score_ns, expected)
        assert result.should_fuse.shape == result.fuse_probability.shape == shape
        assert_same(result.benefit, rx.fusion_benefit(*pair))


@pytest.mark.parametrize("bad", [-1.0, np.nan, -INF])
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_bad_count_is_refused_on_the_host_on_a_device_and_in_a_program(bad, side):
    pair = dict(zip(("before", "after"), map(floats, profiles(100)), strict=True))
    counts = pair[side].host_output_bytes.at[99].set(bad)
    says = f"{side}.host_output_bytes: expected a count of at least 0, got {bad}"
    for column in (counts, np.asarray(counts)):
        pair[side] = dataclasses.replace(pair[side], host_output_bytes=column)
        with pytest.raises(ValueError, match=says):
            GATE.evaluate(**pair, temperature_ns=TEMPERATURE_NS)
        with pytest.raises(ValueError, match=says):
            jax.jit(lambda t: GATE.evaluate(**pair, temperature_ns=t))(TEMPERATURE_NS)


# --- Strategy costs ------------------------------------------------------------------------------

LEARNED = {"learned_available": True, "learned_active_gates": 100.0, "learned_total_gates": 1024.0}


@pytest.mark.parametrize(("x64", "coefficients"), [(True, "arch"), (False, "portable")])
def test_a_table_of_runs_is_what_the_separate_functions_return(x64, coefficients):
    device, *sizes = workloads()
    if x64:  # Columns of one precision meet coefficients of another.
        device, sizes = "cuda", [np.asarray(size, np.float32) for size in sizes]
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("standard"):
        arguments, options = (device, *sizes), {"coefficients": coefficients}
        result = rx.welch.evaluate_welch_peaks(*arguments, **LEARNED, **options, temperature_ns=TEMPERATURE_NS)
        costs = rx.estimate_welch_peaks_costs(*arguments, **LEARNED, **options)
        why = rx.welch_peaks_fusion_gate_breakdown(*arguments, **options)
        rtol = FLOAT64_RTOL if x64 else FLOAT32_RTOL
        np.testing.assert_allclose(result.costs.stack(), costs.stack(), rtol=rtol)
        for name in ("score_ns", "should_fuse_io", "should_fuse", "compute_floor_ok"):
            np.testing.assert_array_equal(getattr(result, name), getattr(why, name))
        np.testing.assert_array_equal(result.benefit.sync_points_saved, why.sync_points_saved)
        np.testing.assert_allclose(result.benefit.host_readback_bytes_saved, why.readback_saved_bytes, rtol=rtol)
        gate = rx.io_fusion_gate_for_target(rx.fusion_target(jnp.asarray(rx.Device.codes(device))))
        by_gate = gate.fuse_probability(result.benefit, temperature_ns=TEMPERATURE_NS)
        np.testing.assert_allclose(result.fuse_probability, by_gate, rtol=1e3 * rtol, atol=1e-30)


def test_every_field_of_a_table_has_its_shape():
    result = rx.welch.evaluate_welch_peaks(
        np.array([[0], [4]]), np.array([[64, 512, 8192]]), 256, 16, temperature_ns=1.0
    )
    assert {leaf.shape for leaf in jax.tree.leaves(result)} == {(2, 3)}
    one = rx.welch.evaluate_welch_peaks("cuda", 64, 256, 16, temperature_ns=1.0)
    assert {leaf.shape for leaf in jax.tree.leaves(one)} == {()}


# --- What is refused -----------------------------------------------------------------------------


def test_a_bad_entry_of_a_column_is_refused_on_the_host_on_a_device_and_in_a_program():
    device, *sizes = workloads(65)
    good = dict(zip(("batch", "n_fft", "k"), sizes, strict=True)) | {"device": device}
    rx.welch.evaluate_welch_peaks(**good, temperature_ns=TEMPERATURE_NS)
    for name, bad, says in (
        ("batch", -1.0, "batch: expected a size of at least 0, got -1.0"),
        ("batch", np.nan, "batch: expected a size of at least 0, got nan"),
        ("n_fft", 7.0, "n_fft: expected an even number"),
        ("n_fft", 2.5, "n_fft: expected an even number"),
        ("n_fft", INF, "n_fft: expected a"),
        ("k", 0.0, "k: expected a size of at least 1, got 0.0"),
        ("device", 12, "device: expected codes from 0 to 11"),
        ("device", -1, "device: expected codes from 0 to 11"),
    ):
        column = np.array(good[name], type(bad))
        column[64] = bad
        for columns in (good | {name: column}, good | {name: jnp.asarray(column)}):
            for ask in (
                lambda t, columns=columns: rx.welch.evaluate_welch_peaks(**columns, temperature_ns=t),
                jax.jit(lambda t, columns=columns: rx.welch.evaluate_welch_peaks(**columns, temperature_ns=t)),
            ):
                with pytest.raises(ValueError, match=says):
                    ask(TEMPERATURE_NS)
