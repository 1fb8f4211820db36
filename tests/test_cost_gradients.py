"""Derivatives of scores and costs: of first and second order, of tables and maps, at singular points."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import (
    FLOAT64_RTOL,
    GRADIENT_RTOL,
    QUICKLY,
    assert_close,
    assert_gradient_is_the_finite_difference,
)
from test_gate import GATE, INF, closed_form, table
from test_gate import rows as rows_of

import rlxjax as rx

quickly = functools.partial(jax.jit, compiler_options=QUICKLY)
TEMPERATURE = {"temperature_ns": 1e7}


def floats(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, float), tree)


def workloads(n, seed=0):
    """Return device codes, batch, n_fft and k, with every threshold of the formulas among the batches."""
    rng = np.random.default_rng(seed)
    batch = rng.choice([1, 128, 129, 256, 511, 512, 513, 2047, 2048, 4096, 8191, 8192, 16384], n)
    return rng.integers(0, len(rx.Device), n), batch, 2 ** rng.integers(1, 13, n), rng.integers(1, 40, n)


def finite(column):
    return jnp.where(jnp.isfinite(column), column, 0.0)


# --- Losses of coefficients ----------------------------------------------------------------------


def gate_loss(gate, benefit):
    """Return a loss of score, log-odds and both probabilities, through methods and a table alike."""
    result, options = gate.evaluate(benefit, **TEMPERATURE), TEMPERATURE
    log_odds, log_p = gate.fuse_log_odds(benefit, **options), gate.fuse_log_probability(benefit, **options)
    square = jnp.square(result.fuse_probability - 0.3) + jnp.square(1e-8 * result.score_ns)
    return jnp.mean(square + jax.nn.softplus(log_odds) - 0.3 * log_odds - log_p)


def io_loss(row, profile):
    cost_ns = rx.io_cost_ns(profile, row)
    return jnp.mean(jnp.log(cost_ns) + jnp.square(cost_ns / 1e4 - 1.0))


def strategy_loss(set_, *workload):
    """Return a loss of all strategies' costs, and of the gate's score and probability, mixed devices."""
    result = rx.evaluate_welch_peaks(*workload, True, 10, 1024, coefficients=set_, **TEMPERATURE)
    costs = jnp.mean(jnp.log1p(finite(result.costs.stack())))
    return costs + jnp.mean(jnp.arctan(1e-6 * result.score_ns) + result.fuse_probability)


def cases():
    gate, benefit = floats(table(40))
    rng = np.random.default_rng(0)
    profile = floats(rx.GraphIoProfile(*(rng.integers(0, most, 40) for most in (20, 4, 2**10, 2**18))))
    device, *sizes = workloads(40)
    set_ = floats(rx.coefficient_set())
    return {
        "gate": (gate_loss, jax.tree.map(lambda leaf: leaf[3], gate), (benefit,)),
        "io": (io_loss, floats(rx.backend_coefficients("cuda")), (profile,)),
        "strategies": (strategy_loss, set_, (jnp.asarray(device), *floats(sizes))),
    }


CASES = cases()
#: Of many strategies, whose derivatives compile for long; the two other cases have the same laws.
each_case = pytest.mark.parametrize("name", ["gate", "io", pytest.param("strategies", marks=pytest.mark.slow)])


def scaled(coefficients, factors):
    """Return coefficients with the leaves multiplied in turn by one of some factors; flags stay."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(coefficients)
    flags = ("unified_memory", "is_gpu", "is_fused_viable", "has_native_kernel", "falls_back")
    return structure.unflatten(
        leaf if str(path[-1]).lstrip(".") in flags else leaf * factors[i % len(factors)]
        for i, (path, leaf) in enumerate(leaves)
    )


@functools.cache
def programs(name):
    """Return value, gradient, forward derivative and Hessian by three factors of the coefficients."""
    loss, coefficients, rows = CASES[name]
    of_factors = lambda factors: loss(scaled(coefficients, factors), *rows)  # noqa: E731
    return tuple(map(quickly, (of_factors, jax.grad(of_factors), jax.jacfwd(of_factors), jax.hessian(of_factors))))


@each_case
def test_reverse_and_forward_mode_and_finite_differences_agree_to_second_order(name):
    value, gradient, forward, hessian = programs(name)
    at, step = jnp.array([0.93, 1.07, 1.11]), 1e-4
    np.testing.assert_allclose(forward(at), gradient(at), rtol=1e-9)
    for f, derivative in ((value, gradient(at)), (gradient, hessian(at))):
        moved = jnp.stack([(f(at + move) - f(at - move)) / (2 * step) for move in step * jnp.eye(3)], -1)
        assert_close(derivative, moved, 10 * GRADIENT_RTOL)
        assert np.all(np.asarray(derivative).any(-1))


@each_case
def test_a_gradient_of_many_sets_of_coefficients_is_a_loop_over_them(name):
    loss, coefficients, rows = CASES[name]
    gradient = jax.grad(lambda factors: loss(scaled(coefficients, factors), *rows))
    factors = jnp.array([[0.5, 0.6, 0.7], [1.0, 1.0, 1.0], [1.5, 2.0, 3.0]])
    loop = jnp.stack([programs(name)[1](one) for one in factors])
    assert_close(quickly(jax.vmap(gradient))(factors), loop, 1e-10)


@each_case
def test_the_gradient_of_a_table_is_the_mean_of_its_rows_gradients(name):
    loss, coefficients, rows = CASES[name]
    gradient = quickly(jax.grad(loss))
    of_table = gradient(coefficients, *rows)
    one_by_one = [gradient(coefficients, *row) for row in rows_of(rows)]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *one_by_one)
    assert_close(of_table, mean, 1e-9)


@pytest.mark.parametrize(("of_set", "of_batch"), [(np.float32, np.float64), (np.float64, np.float32)])
@pytest.mark.parametrize("device", ["cuda", np.arange(12)])
def test_a_gradient_has_the_types_of_what_it_is_of(device, of_set, of_batch):
    set_ = jax.tree.map(lambda leaf: jnp.asarray(leaf, of_set), rx.coefficient_set())
    batch = jnp.asarray(2.0 ** np.arange(12), of_batch)
    for cost in (rx.estimate_welch_peaks_costs, rx.host_path_ns, rx.fused_graph_ns):

        def loss(set_, batch, cost=cost):
            return sum(jnp.sum(finite(ns)) for ns in jax.tree.leaves(cost(device, batch, 256, 16, coefficients=set_)))

        with jax.numpy_dtype_promotion("standard"):
            by_set, by_batch = jax.eval_shape(jax.grad(loss, (0, 1)), set_, batch)
        assert {leaf.dtype for leaf in jax.tree.leaves(by_set)} == {np.dtype(of_set)}
        assert by_batch.dtype == of_batch


# --- Every argument of a row ---------------------------------------------------------------------


def rows_with_sets(n):
    return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (n, *np.shape(leaf))), rx.coefficient_set())


@functools.cache
def path_costs(name):
    """Return a cost of rows, each with a set of its own, by sizes that may have derivatives; of a code's device."""

    def costs_ns(tree, device):
        options = {"n_segments": tree["n_segments"], "coefficients": tree["set"]}
        sizes = [tree[size] for size in ("batch", "n_fft", "k")]
        if name == "host_path_ns":
            return rx.host_path_ns(device, *sizes, **options)
        return rx.fused_graph_ns(device, *sizes, tree["scale"], **options)

    return jax.vmap(costs_ns)


@pytest.mark.parametrize("name", ["host_path_ns", "fused_graph_ns"])
def test_the_gradient_of_a_path_by_sizes_segments_and_scale_is_the_finite_difference(name):
    segments, scale, batch = (x.ravel() for x in np.meshgrid([1, 2, 5], [0.1, 0.6, 1.4], [30, 700, 9000]))
    n = len(batch)
    tree = {"set": rows_with_sets(n), "batch": batch, "n_fft": np.full(n, 256), "k": np.full(n, 16)}
    tree |= {"n_segments": segments, "scale": scale}
    for device in ("cuda", "metal", "tpu"):
        kinks = {"['set'].strategy.is_gpu", "['set'].strategy.falls_back"}
        if device == "tpu":  # its factor of 1 is where the floor starts
            kinks.add("['set'].strategy.fused_scale")
        codes = np.full(n, rx.Device.parse(device).code)
        assert_gradient_is_the_finite_difference(path_costs(name), tree, codes, kinks=kinks)


def test_the_gradient_of_an_evaluated_table_is_the_finite_difference():
    batch, n_fft, k = (x.ravel() for x in np.meshgrid([30.0, 700.0, 5000.0], [64.0, 1024.0], [4.0, 16.0]))
    tree = {"set": rows_with_sets(len(batch)), "batch": batch, "n_fft": n_fft, "k": k}
    tree |= {"temperature_ns": np.full(len(batch), 3e6)}

    @jax.vmap
    def score_and_probability(tree):
        options = {"coefficients": tree["set"], "temperature_ns": tree["temperature_ns"]}
        result = rx.evaluate_welch_peaks("cuda", tree["batch"], tree["n_fft"], tree["k"], **options)
        return result.score_ns * 1e-7 + result.fuse_probability

    # A native kernel saves the whole sync point: what adds one is penalised.
    kinks = {"['set'].strategy.has_native_kernel"}
    assert_gradient_is_the_finite_difference(score_and_probability, tree, kinks=kinks)


# --- Singular points -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [INF, math.nan])
@pytest.mark.parametrize(("name", "count"), [("dispatch_ns", 300.0), ("roundtrip_ns", 1.0)])
def test_the_derivative_by_an_infinite_rate_is_its_count_and_shows_in_all_others(name, count, value):
    def cost_ns(rate_ns, batch):
        set_ = rx.coefficient_set()
        set_ = dataclasses.replace(set_, host=dataclasses.replace(set_.host, **{name: rate_ns}))
        return rx.host_path_ns("cuda", batch, 256.0, 16.0, coefficients=set_)

    cost, (by_rate, by_batch) = jax.value_and_grad(cost_ns, (0, 1))(value, 100.0)
    assert by_rate == count
    np.testing.assert_array_equal(cost, value)
    assert not np.isfinite(by_batch)


@pytest.mark.parametrize("name", ["memory_bw", "host_readback_bw", "readback_bw"])
def test_an_infinite_bandwidth_moves_bytes_for_nothing_and_makes_no_nan(name):
    profile, benefit = rx.GraphIoProfile(1.0, 0.0, 4096.0, 8192.0), rx.FusionBenefit(1.0, 0.0, 4096.0, 8192.0)
    gate, row = dataclasses.replace(GATE, unified_memory=0.0), rx.backend_coefficients("cuda")
    if name != "readback_bw":
        gate = dataclasses.replace(gate, **{name: INF})
    if name != "host_readback_bw":
        row = dataclasses.replace(row, **{name: INF})
    for f, coefficients in (
        (lambda g: g.score_ns(benefit), gate),
        (lambda r: rx.io_cost_ns(profile, r), row),
    ):
        value, gradient = jax.value_and_grad(f)(coefficients)
        assert np.isfinite(value)
        assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(gradient))


#: One program for all points.
gradient_of_score = jax.jit(jax.grad(lambda *x: rx.IoFusionGate.score_ns(*x), (0, 1)))


@pytest.mark.parametrize("unified", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [0.0, 1e6, INF])
@pytest.mark.parametrize("memory_bw", [0.0, 0.5, 150.0])
@pytest.mark.parametrize("syncs", [-2.0, 0.0, 2.0])
def test_a_gradient_at_a_singular_point_is_the_count(unified, penalty, memory_bw, syncs):
    gate = dataclasses.replace(GATE, unified_memory=unified, host_thunk_penalty_ns=penalty, memory_bw=memory_bw)
    benefit = rx.FusionBenefit(3.0, syncs, 7680.0, -900.0)
    by_gate, by_benefit = gradient_of_score(gate, benefit)
    by_memory_bw = 900 / memory_bw**2 if memory_bw > 1 else 0.0
    by_readback_bw = 0.0 if unified else -7680 / 30**2
    expected = (3, syncs, by_memory_bw, by_readback_bw, 0, min(syncs, 0.0), 0)
    np.testing.assert_allclose(dataclasses.astuple(by_gate), expected, rtol=FLOAT64_RTOL)
    expected = (700, 1.0 if unified else 1 / 30, 1 / max(memory_bw, 1.0))
    by_launches, by_syncs, *by_bytes = dataclasses.astuple(by_benefit)
    np.testing.assert_allclose((by_launches, *by_bytes), expected, rtol=FLOAT64_RTOL)
    # At no sync point the slope lies between those on both sides; an infinite penalty has none.
    most = penalty if np.isfinite(penalty) else 0.0
    assert most * (syncs < 0) <= by_syncs - 9_000.0 <= most * (syncs <= 0)
    assert float(gate.score_ns(benefit)) == pytest.approx(closed_form(gate, benefit))


def test_a_saturated_decision_has_finite_log_odds_and_gradients():
    gate = dataclasses.replace(GATE, min_gain_ns=0.0)
    for launches in (1e300, -1e300, INF, -INF):
        benefit = rx.FusionBenefit(launches_saved=launches)
        for name in ("fuse_probability", "fuse_log_probability", "fuse_log_odds"):
            f = lambda t, name=name, benefit=benefit: getattr(gate, name)(benefit, temperature_ns=t)  # noqa: E731
            assert all(np.isfinite(jax.value_and_grad(f)(1e-3)))
        assert np.sign(gate.fuse_log_odds(benefit, temperature_ns=1e-30)) == np.sign(launches)
