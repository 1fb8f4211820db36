"""Laws of functions of rows: jit, vmap, loops and float32 change no value; derivatives are right."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import (
    FLOAT32_RTOL,
    FLOAT64_RTOL,
    GRADIENT_RTOL,
    SATURATED_ATOL,
    assert_close,
    assert_gradient_is_the_finite_difference,
)
from test_costs import sample_graph
from test_gate import GATE, table

import rlxjax as rx

ROWS = 24
RNG = np.random.default_rng(0)
CODES = np.arange(ROWS) % len(rx.Device)
PRICES = dataclasses.replace(rx.backend_coefficients(CODES), provenance="uncalibrated")
COUNTS = RNG.integers(0, [[20], [4], [2**10], [2**18]], (4, ROWS))
PROFILES = rx.GraphIoProfile(*COUNTS.astype(float))
BATCH = RNG.choice([0.0, 1.0, 129.0, 1024.0, 8192.0, 1e6], ROWS)
WORK = CODES, BATCH, 2.0 ** RNG.integers(1, 13, ROWS), RNG.integers(1, 40, ROWS).astype(float)
#: Temperatures at which no decision is certain.
WARM = np.geomspace(3e6, 3e7, ROWS)


def decisions(gate, benefit, temperature_ns):
    soft = ("score_ns", "fuse_log_probability", "fuse_log_odds")
    found = [getattr(gate, name)(benefit, temperature_ns=temperature_ns) for name in soft]
    return gate.evaluate(benefit, temperature_ns=temperature_ns), found


def paths(*work):
    return [path(*work) for path in (rx.fused_graph_ns, rx.block_graph_ns, rx.welch.host_path_ns)]


#: Functions of a row, and a table of what they take. Strategies are beside their golden tables.
FUNCTIONS = {
    "gate": (decisions, (*jax.tree.map(lambda leaf: leaf.astype(float), table(ROWS)), WARM)),
    "profile": (lambda profile, row: rx.io_cost_ns(profile, row), (PROFILES, PRICES)),
    "graph": (functools.partial(rx.graph_cost_ns, sample_graph()), (PRICES,)),
    "weights": (
        lambda costs, t: rx.pick_weights(costs, temperature_ns=t),
        (RNG.uniform(0, 9, (ROWS, 4)), np.linspace(0.5, 9, ROWS)),
    ),
    "stages": (rx.fusion.soft_plan_ns, (RNG.uniform(1, 9, (ROWS, 3, 3)), np.linspace(0.5, 9, ROWS))),
    "paths": (paths, WORK),
}
#: What has derivatives by all that it takes.
SMOOTH = {name: FUNCTIONS[name] for name in ("graph", "weights", "stages")}
SMOOTH["profile"] = functools.partial(rx.io_cost_ns, PROFILES), (PRICES,)


def floats_of(tree):
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]


def assert_same(found, expected, rtol):
    """Compare trees whose leaves have infinities, and values that cancel."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        largest = np.max(np.abs(other), initial=0.0, where=np.isfinite(other))
        np.testing.assert_allclose(one, other, rtol=10 * rtol, atol=10 * rtol * largest)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jit_vmap_a_loop_and_float32_change_no_value(name):
    f, columns = FUNCTIONS[name]
    table = f(*columns)
    assert_same(jax.jit(jax.vmap(f))(*columns), table, FLOAT64_RTOL)
    for i in range(0, ROWS, 7):
        row = jax.tree.map(lambda leaf, i=i: leaf[i].item() if leaf.ndim == 1 else leaf[i], columns)
        expected = jax.tree.map(lambda leaf, i=i: leaf[i], table)
        if name == "paths":  # as users call them
            row = (list(rx.Device)[row[0]], *map(int, row[1:]))
        assert_same(f(*row), expected, FLOAT64_RTOL)
    with jax.enable_x64(False):
        narrow = jax.tree.map(lambda leaf: leaf.astype(leaf.dtype.kind + "4"), columns)
        single = f(*narrow)
    assert {leaf.dtype for leaf in floats_of(single)} == {np.dtype(np.float32)}
    assert_same(single, table, FLOAT32_RTOL)


def total(f, columns):
    """Return the sum of all floats that a function finds, the infinite ones aside."""
    finite = [jnp.where(jnp.isfinite(x), x, 0) for x in floats_of(f(*columns))]
    return sum(jnp.sum(x).astype(float) for x in finite)


@pytest.mark.parametrize("turn", [0, 1])
def test_a_gradient_has_the_types_of_what_it_is_by(turn):
    for f, columns in FUNCTIONS.values():
        leaves, structure = jax.tree.flatten(columns)
        is_float = [np.issubdtype(leaf.dtype, np.floating) for leaf in leaves]
        types = [(np.float32, np.float64)[(i + turn) % 2] for i in range(len(leaves))]
        given = [leaf.astype(own) for leaf, own, known in zip(leaves, types, is_float, strict=True) if known]

        def loss(floats, f=f, structure=structure, leaves=leaves, is_float=is_float):
            rest = iter(floats)
            return total(
                f, structure.unflatten(next(rest) if own else leaf for own, leaf in zip(is_float, leaves, strict=True))
            )

        with jax.numpy_dtype_promotion("standard"):
            slopes = jax.eval_shape(jax.grad(loss), given)
        assert [slope.dtype for slope in slopes] == [leaf.dtype for leaf in given]


@pytest.mark.parametrize("name", SMOOTH)
def test_first_and_second_derivatives_are_finite_differences_forward_and_in_reverse(name):
    f, columns = SMOOTH[name]

    def rows(columns):
        found = f(*columns)
        return found @ jnp.arange(4.0) if name == "weights" else found

    assert_gradient_is_the_finite_difference(rows, columns)
    gradient = jax.grad(lambda columns: jnp.sum(jnp.square(rows(columns))))
    rng = np.random.default_rng(0)
    along = jax.tree.map(lambda leaf: leaf * rng.uniform(0.5, 1, leaf.shape), columns)
    slope = jax.jit(lambda step: gradient(jax.tree.map(lambda leaf, by: leaf + step * by, columns, along)))
    _, curvature = jax.jit(lambda: jax.jvp(gradient, (columns,), (along,)))()
    step = 1e-4
    difference = jax.tree.map(lambda one, other: (one - other) / (2 * step), slope(step), slope(-step))
    assert_close(curvature, difference, 10 * GRADIENT_RTOL)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(curvature))


def by_gate(prices, temperature_ns, straight):
    options = {"temperature_ns": temperature_ns, "straight_through_gradient": straight}
    return prices.fuse_probability(rx.FusionBenefit(np.array([9.0, 5.0, 1.0])), **options)


def by_strategy(prices, temperature_ns, straight):
    set_ = dataclasses.replace(rx.welch.coefficient_set(), gate=prices)
    options = {"temperature_ns": temperature_ns, "straight_through_gradient": straight, "coefficients": set_}
    return rx.soft_pick_welch_peaks_strategy("metal", 1024, 256, 16, **options)


@pytest.mark.parametrize(
    ("f", "prices", "temperature_ns", "hard"),
    [
        (by_gate, GATE, 1e3, [1.0, 1.0, 0.0]),
        (by_strategy, rx.welch.coefficient_set().gate, 3e5, None),
    ],
)
def test_straight_through_is_hard_and_has_the_soft_gradient(f, prices, temperature_ns, hard):
    at = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), (prices, temperature_ns))
    rng = np.random.default_rng(0)
    along = jax.tree.map(lambda leaf: leaf * rng.uniform(size=leaf.shape), at)

    def both(*prices):
        return [f(*prices, straight) for straight in (True, False)]

    (chosen, soft), (by_hard, by_soft) = jax.jit(lambda *ways: jax.jvp(both, *ways))(at, along)
    if hard is None:
        hard = np.eye(4)[rx.pick_welch_peaks_strategy("metal", 1024, 256, 16).code]
    np.testing.assert_array_equal(chosen, hard)
    assert np.any((soft > SATURATED_ATOL) & (soft < 1))
    np.testing.assert_allclose(by_hard, by_soft, rtol=FLOAT64_RTOL, atol=0)
    assert np.any(by_soft)
