"""Gradients of evaluated tables are those of the separate functions, in as few passes over the rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import assert_close, assert_gradient_is_the_finite_difference
from test_evaluation import (
    LEARNED,
    both_precisions,
    floats,
    profiles,
    quickly,
    workloads,
)
from test_gate import INF

import rlxjax as rx

ROWS = 128 * 40
GATES = {
    "cuda": rx.io_fusion_gate_for_target("cuda"),
    "unified": rx.io_fusion_gate_for_target("metal"),
    "infinite penalty": dataclasses.replace(rx.io_fusion_gate_for_target("cuda"), host_thunk_penalty_ns=INF),
}


def weighed(*columns):
    """Return a loss whose cotangents differ by row and by column, of numbers of any size."""
    return sum(
        jnp.mean(jnp.sin(jnp.arange(column.size) + place) * jnp.arctan(1e-6 * column.reshape(-1)))
        for place, column in enumerate(columns)
    )


@both_precisions
@pytest.mark.parametrize("name", list(GATES))
def test_an_evaluated_gate_has_the_gradient_of_the_separate_methods(x64, name):
    with jax.enable_x64(x64):
        gate, (before, after) = floats(GATES[name]), floats(profiles(300))
        temperature_ns = jnp.asarray(1e7)

        def evaluated(gate, temperature_ns, *pair):
            result = gate.evaluate(*pair, temperature_ns=temperature_ns)
            return weighed(result.score_ns, 1e6 * result.fuse_probability)

        def separate(gate, temperature_ns, *pair):
            benefit = pair[0] if len(pair) == 1 else rx.fusion_benefit(*pair)
            probability = gate.fuse_probability(benefit, temperature_ns=temperature_ns)
            return weighed(gate.score_ns(benefit), 1e6 * probability)

        pair = (before, after) if x64 else (rx.fusion_benefit(before, after),)
        places = tuple(range(2 + len(pair)))
        got, expected = (
            quickly(jax.grad(f, places))(gate, temperature_ns, *pair) for f in (evaluated, separate)
        )
        assert all(np.any(leaf != 0) for leaf in (got[0].dispatch_ns, got[0].min_gain_ns, got[1]))
        assert_close(got, expected, 1e-12 if x64 else 1e-5)


def evaluated_columns(device, set_, sizes, temperature_ns):
    result = rx.evaluate_welch_peaks(
        device, *sizes, **LEARNED, coefficients=set_, temperature_ns=temperature_ns
    )
    return [result.score_ns, 1e6 * result.fuse_probability, *map(finite, result.costs.stack().T)]


def separate_columns(device, set_, sizes, temperature_ns):
    """Return the same by the gate's own methods, of counts of SPEC 5, and by the costs' function."""
    batch, n_fft, k = sizes
    codes = rx.Device.codes(device)
    gate, strategy = (jax.tree.map(lambda leaf: leaf[codes], part) for part in (set_.gate, set_.strategy))
    syncs = jnp.where(batch >= 2048, strategy.has_native_kernel, 0.0) - 1.0
    samples, peaks = 2.0 * batch * n_fft, batch * k
    benefit = rx.FusionBenefit(-1.0 + 0.0 * batch, syncs, 8 * samples - 8 * peaks, -8 * samples - 8 * peaks)
    probability = gate.fuse_probability(benefit, temperature_ns=temperature_ns)
    costs = rx.estimate_welch_peaks_costs(device, *sizes, **LEARNED, coefficients=set_)
    return [gate.score_ns(benefit), 1e6 * probability, *map(finite, costs.stack().T)]


def finite(column):
    return jnp.where(jnp.isfinite(column), column, 0.0)


@pytest.mark.parametrize("device", ["cuda", "mixed"])
def test_an_evaluated_table_of_runs_has_the_gradient_of_the_separate_functions(device):
    codes, *sizes = workloads(300)
    arguments = floats(rx.coefficient_set("arch")), floats(sizes), jnp.asarray(1e7)
    device = jnp.asarray(codes) if device == "mixed" else device
    got, expected = (
        quickly(jax.grad(lambda *x, f=f: weighed(*f(device, *x)), (0, 1, 2)))(*arguments)
        for f in (evaluated_columns, separate_columns)
    )
    assert_close(got, expected, 1e-10)


def test_the_gradient_of_an_evaluated_table_is_the_finite_difference():
    sizes = np.meshgrid([30.0, 700.0, 5000.0], [64.0, 1024.0], [4.0, 16.0])
    batch, n_fft, k = (size.ravel() for size in sizes)
    set_ = jax.tree.map(
        lambda leaf: np.broadcast_to(leaf, (batch.size, *np.shape(leaf))), rx.coefficient_set()
    )
    tree = {"set": set_, "batch": batch, "n_fft": n_fft, "k": k, "temperature_ns": np.full(batch.size, 3e6)}

    def of_row(tree):
        options = {"coefficients": tree["set"], "temperature_ns": tree["temperature_ns"]}
        result = rx.evaluate_welch_peaks("cuda", tree["batch"], tree["n_fft"], tree["k"], **options)
        return result.score_ns * 1e-7 + result.fuse_probability

    score_and_probability = jax.vmap(of_row)
    # A native kernel saves the whole sync point: what adds one is penalised.
    kinks = {"['set'].strategy.has_native_kernel"}
    assert_gradient_is_the_finite_difference(score_and_probability, tree, kinks=kinks)


def test_evaluated_tables_have_second_derivatives_and_maps_as_the_separate_functions():
    _, *sizes = floats(workloads(40))
    set_, temperature_ns = floats(rx.coefficient_set("arch")), jnp.asarray(1e7)

    def of_factor(f, factor):
        gate = jax.tree.map(lambda leaf: factor * leaf, set_.gate)
        changed = dataclasses.replace(
            set_, gate=dataclasses.replace(gate, unified_memory=set_.gate.unified_memory)
        )
        return weighed(*f("cuda", changed, sizes, temperature_ns)[:2])

    for derivative in (jax.hessian, lambda f: jax.vmap(jax.grad(f)), lambda f: jax.jacfwd(jax.vmap(f))):
        factor = 1.1 if derivative is jax.hessian else jnp.array([0.5, 0.9, 1.3])
        got, expected = (
            quickly(derivative(lambda x, f=f: of_factor(f, x)))(factor)
            for f in (evaluated_columns, separate_columns)
        )
        np.testing.assert_allclose(got, expected, rtol=1e-8)
        assert np.any(np.asarray(got) != 0)


def mean_square(probability):
    return jnp.mean(jnp.square(probability - 0.3))


def written_columns(f, *arguments, loss=mean_square):
    gradient = jax.value_and_grad(lambda *x: loss(f(*x)))
    written = jax.jit(gradient).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    return written / jax.tree.leaves(arguments)[-1].nbytes
