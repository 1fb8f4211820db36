"""Gradients of costs are those of plain formulas, summed over the rows in one loop."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import (
    FLOAT64_RTOL,
    GRADIENT_RTOL,
    assert_close,
    assert_gradient_is_the_finite_difference,
)
from test_evaluation import both_precisions, floats, quickly, workloads
from test_gate import INF
from test_gate import rows as rows_of

import rlxjax as rx
from rlxjax.device._costs import graph_work


def plain_io_cost_ns(row, profile):
    """Return SPEC 3 in plain operations, to be differentiated by JAX alone."""
    readback = jnp.where(
        row.unified_memory >= 0.5, profile.host_output_bytes, profile.host_readback_bytes(False)
    )
    ns = row.roundtrip_ns * (1 + profile.sync_points) + profile.kernel_launches * row.dispatch_ns
    ns += profile.device_traffic_bytes / jnp.maximum(row.memory_bw, 1.0)
    return ns + readback / jnp.maximum(row.readback_bw, 1.0)


LOSSES = {
    "logarithm": lambda ns: jnp.mean(jnp.log(ns)),
    "relative square": lambda ns: jnp.mean(jnp.square(ns / 3e4 - 1.0)),
    "logistic": lambda ns: jnp.mean(jax.nn.softplus((ns - 3e4) / 1e4)),
    "no rows alike": lambda ns: jnp.mean(jnp.sin(jnp.arange(ns.size)) * jax.scipy.special.gammaln(ns)),
}


@both_precisions
@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize(("rows", "unified"), [(128, 1.0), (40_003, 0.0)])
def test_a_loss_of_io_costs_has_the_gradient_of_the_plain_formula(x64, loss, rows, unified):
    with jax.enable_x64(x64):
        rng = np.random.default_rng(0)
        counts = [rng.integers(0, most, rows) for most in (20, 4, 2**18, 2**20)]
        profile = floats(rx.GraphIoProfile(*counts))
        row = dataclasses.replace(rx.backend_coefficients("cuda"), unified_memory=unified)
        row = floats(row)
        ours, plain = (
            compiled(jax.grad(lambda *x, f=f: LOSSES[loss](f(*x)), (0, 1)))(row, profile)
            for f, compiled in (
                (lambda row, profile: rx.io_cost_ns(profile, row), jax.jit),
                (plain_io_cost_ns, quickly),
            )
        )
        assert_close(ours, plain, 1e-10 if x64 else 1e-4)


def plain_costs_ns(device, set_, batch, n_fft, k, scale):
    """Return SPEC 5 in plain operations: ultra, fast, fused and learned, as if each were possible."""
    backend, strategy = (
        jax.tree.map(lambda leaf: leaf[rx.Device.codes(device)], part)
        for part in (set_.backend, set_.strategy)
    )

    def host_ns(segments):
        peaks, samples = 8 * batch * k, batch * segments * n_fft
        profile = rx.GraphIoProfile(batch * (segments + 1), 0 * batch, peaks, 12 * samples + peaks)
        log_batch = jnp.log(jnp.maximum(batch, 1.0) / 512)
        ns = plain_io_cost_ns(set_.host, profile)
        ns *= 1 + strategy.log_batch_slope * jnp.maximum(log_batch, 0.0)
        return ns * (
            1 + strategy.log2_batch_slope * jnp.maximum((log_batch - math.log(4)) / math.log(2), 0.0)
        )

    works = [
        graph_work(rx.welch_peaks_graph(int(b), rx.WelchPeakParams.fast(int(n), int(p)), True))
        for b, n, p in zip(batch, n_fft, k, strict=True)
    ]
    work = jax.tree.map(lambda *leaves: jnp.asarray(leaves, float), *works)
    falls_back = strategy.falls_back >= 0.5
    launches = jnp.where(falls_back, work.io.kernel_launches, 0.0)
    profile = dataclasses.replace(work.io, kernel_launches=launches)
    nodes = jnp.where(falls_back, work.dispatched_nodes, work.costed_nodes)
    io_ns = plain_io_cost_ns(backend, profile) + nodes * backend.dispatch_ns
    io_ns += jnp.where(falls_back, 0.0, work.output_bytes / jnp.maximum(backend.memory_bw, 1.0))
    floor_ns = jnp.where(batch < 512, strategy.fused_floor_ns * strategy.is_gpu, 0.0)

    def fused_ns(scale):
        factor = strategy.fused_scale * scale
        return jnp.maximum(io_ns * factor, jnp.where(factor >= 1, io_ns + floor_ns, floor_ns))

    return host_ns(1), host_ns(2), fused_ns(1.0), fused_ns(scale)


@pytest.mark.parametrize(
    ("device", "names"),
    [
        *itertools.product(["cuda"], [("fast_ns",), ("rlx_ns",)]),
        *itertools.product(["cpu", "metal", "cuda", "vulkan", "tpu"], [("fast_ns", "rlx_ns")]),
        *itertools.product(["cpu", "metal", "cuda"], [("ultra_ns", "learned_ns")]),
    ],
)
def test_a_loss_of_strategy_costs_has_the_gradient_of_the_plain_formula(device, names):
    _, *sizes = workloads(300)
    sizes = [np.maximum(size, 1) for size in sizes]
    active, total = 10, 1024
    set_ = floats(rx.coefficient_set("arch"))

    def ours(set_):
        return rx.estimate_welch_peaks_costs(
            device, *map(jnp.asarray, sizes), True, active, total, coefficients=set_
        )

    possible = jax.tree.map(jnp.isfinite, ours(set_))

    def plain(set_):
        costs = plain_costs_ns(device, set_, *sizes, 0.30 + 0.70 * active / total)
        return rx.WelchPeaksCostEstimates(*costs)

    def loss(costs_ns, set_):
        costs = costs_ns(set_)
        return sum(
            jnp.sum(jnp.where(getattr(possible, name), jnp.log(getattr(costs, name)), 0.0)) for name in names
        )

    value, gradient = jax.jit(jax.value_and_grad(functools.partial(loss, ours)))(set_)
    expected, plain_gradient = quickly(jax.value_and_grad(functools.partial(loss, plain)))(set_)
    np.testing.assert_allclose(value, expected, rtol=FLOAT64_RTOL)
    assert_close(gradient, plain_gradient, 1e-10)


@functools.cache
def path_costs(name, device):
    """Return a cost of rows, each with a set of its own, by sizes that may have derivatives."""

    def costs_ns(tree):
        options = {"n_segments": tree["n_segments"], "coefficients": tree["set"]}
        sizes = [tree[size] for size in ("batch", "n_fft", "k")]
        if name == "host_path_ns":
            return rx.host_path_ns(device, *sizes, **options)
        return rx.fused_graph_ns(device, *sizes, tree["scale"], **options)

    return jax.vmap(costs_ns)


@pytest.mark.parametrize("device", ["cuda", "metal", "tpu"])
@pytest.mark.parametrize("name", ["host_path_ns", "fused_graph_ns"])
def test_the_gradient_of_a_path_by_segments_and_scale_too_is_the_finite_difference(name, device):
    segments, scale, batch = (x.ravel() for x in np.meshgrid([1, 2, 5], [0.1, 0.6, 1.4], [30, 700, 9000]))
    n = len(batch)
    set_ = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (n, *np.shape(leaf))), rx.coefficient_set())
    tree = {"set": set_, "batch": batch, "n_fft": np.full(n, 256), "k": np.full(n, 16)}
    tree |= {"n_segments": segments, "scale": scale}
    kinks = {"['set'].strategy.is_gpu", "['set'].strategy.falls_back"}
    if device == "tpu":  # its factor of 1 is where the floor starts
        kinks.add("['set'].strategy.fused_scale")
    assert_gradient_is_the_finite_difference(path_costs(name, device), tree, kinks=kinks)


@pytest.mark.parametrize("cost", [rx.host_path_ns, rx.fused_graph_ns])
@pytest.mark.parametrize("segments", [1, 3, np.array([1, 2, 7] * 50)])
def test_the_gradient_of_a_table_of_paths_is_that_of_its_rows(cost, segments):
    set_ = floats(rx.coefficient_set("arch"))
    _, *sizes = floats(workloads(150))
    segments = jnp.broadcast_to(jnp.asarray(segments, float), 150)

    def total_ns(set_, segments, *sizes):
        return jnp.sum(cost("cuda", *sizes, coefficients=set_, n_segments=segments))

    gradient = quickly(jax.grad(total_ns, (0, 1, 2, 3, 4)))
    by_set, *by_sizes = gradient(set_, segments, *sizes)
    rows = [gradient(set_, *row) for row in rows_of((segments, *sizes))]
    assert_close(by_set, jax.tree.map(lambda *leaves: sum(leaves), *(row[0] for row in rows)), 1e-10)
    assert_close(by_sizes, [jnp.stack([row[i] for row in rows]) for i in range(1, 5)], FLOAT64_RTOL)


@pytest.mark.parametrize(("name", "count"), [("dispatch_ns", 300.0), ("roundtrip_ns", 1.0)])
def test_the_derivative_by_an_infinite_rate_is_its_count(name, count):
    def cost_ns(rate_ns):
        set_ = rx.coefficient_set()
        set_ = dataclasses.replace(set_, host=dataclasses.replace(set_.host, **{name: rate_ns}))
        return rx.host_path_ns("cuda", 100.0, 256.0, 16.0, coefficients=set_)

    assert jax.grad(cost_ns)(INF) == count


def test_costs_of_many_sets_have_first_and_second_derivatives_as_a_loop():
    set_ = floats(rx.coefficient_set("arch"))
    sizes = [jnp.asarray(size, float) for size in ([64.0, 700.0, 8192.0], 256.0, 16.0)]

    def loss(factors):
        host = dataclasses.replace(set_.host, memory_bw=set_.host.memory_bw * factors[0])
        scale, slope = set_.strategy.fused_scale * factors[1], set_.strategy.log_batch_slope * factors[2]
        strategy = dataclasses.replace(set_.strategy, fused_scale=scale, log_batch_slope=slope)
        changed = dataclasses.replace(set_, host=host, strategy=strategy)
        costs = rx.estimate_welch_peaks_costs("cuda", *sizes, coefficients=changed)
        return jnp.sum(jnp.log(costs.fast_ns)) + jnp.sum(jnp.log(jnp.minimum(costs.rlx_ns, 1e30)))

    factors = jnp.array([[0.5, 0.6, 0.7], [1.0, 1.0, 1.0], [1.5, 2.0, 3.0]])
    gradient, hessian = jax.grad(loss), jax.hessian(loss)
    for f in (gradient, hessian):
        mapped, one = quickly(jax.vmap(f))(factors), quickly(f)
        assert_close(mapped, jnp.stack([one(row) for row in factors]), FLOAT64_RTOL)
    by_reverse = quickly(jax.jacrev(gradient))(factors[0])
    assert_close(by_reverse, quickly(hessian)(factors[0]), FLOAT64_RTOL)
    moved = [[gradient(factors[0] + sign * move) for move in 1e-4 * jnp.eye(3)] for sign in (1, -1)]
    difference = (jnp.stack(moved[0]) - jnp.stack(moved[1])) / 2e-4
    assert_close(by_reverse, difference, GRADIENT_RTOL)
    assert np.all(np.any(by_reverse != 0, axis=1))


@pytest.mark.parametrize("device", ["cuda", np.arange(12)])
@pytest.mark.parametrize("cost", [rx.estimate_welch_peaks_costs, rx.host_path_ns, rx.fused_graph_ns])
@pytest.mark.parametrize("of_set", [np.float32, np.float64])
@pytest.mark.parametrize("of_batch", [np.float32, np.float64])
def test_a_gradient_has_the_types_of_what_it_is_of(device, cost, of_set, of_batch):
    set_ = jax.tree.map(lambda leaf: jnp.asarray(leaf, of_set), rx.coefficient_set("arch"))
    batch = jnp.asarray(2.0 ** np.arange(12), of_batch)

    def loss(set_, batch):
        costs_ns = jax.tree.leaves(cost(device, batch, 256, 16, coefficients=set_))
        return sum(jnp.sum(jnp.where(jnp.isfinite(ns), ns, 0.0)) for ns in costs_ns)

    by_set, by_batch = jax.eval_shape(jax.grad(loss, (0, 1)), set_, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(by_set)} == {np.dtype(of_set)}
    assert by_batch.dtype == of_batch


def test_a_mixed_table_has_the_gradient_of_its_rows():
    set_ = floats(rx.coefficient_set("arch"))
    device, *sizes = workloads(40)

    def loss(set_, device, *sizes):
        costs = rx.estimate_welch_peaks_costs(device, *sizes, coefficients=set_)
        return jnp.sum(jnp.log1p(jnp.where(jnp.isfinite(costs.stack()), costs.stack(), 0.0)))

    gradient = quickly(jax.grad(loss))
    table_gradient = gradient(set_, jnp.asarray(device), *floats(sizes))
    total = jax.tree.map(jnp.zeros_like, set_)
    for code, *row in rows_of((device, *sizes)):
        total = jax.tree.map(jnp.add, total, gradient(set_, code, *map(float, row)))
    for got, expected in zip(jax.tree.leaves(table_gradient), jax.tree.leaves(total), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-300)
