"""Derivatives by slopes, and those of the gate, are those of plain formulas."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import (
    FLOAT32_RTOL,
    FLOAT64_RTOL,
    assert_close,
    assert_gradient_is_the_finite_difference,
)
from test_evaluation import both_precisions, floats, on_cpu, quickly
from test_gate import GATE, INF, closed_form, table
from test_gate import rows as rows_of

import rlxjax as rx
from rlxjax import _numerics, _row_sums
from rlxjax._row_sums import LONG_LOOP, PIECE_BYTES, SHORT_LOOP, sums_of_pieces, sums_of_rows
from rlxjax._slopes import by_slopes

# --- Functions of rows and scalars ---------------------------------------------------------------


def two_results(coefficients, row):
    a, b, _ = coefficients
    return {"first": a * row + jnp.sin(b * row), "second": jnp.exp(a * row)}


def loss_of_results(f, names, coefficients, row):
    results = f(coefficients, row)
    return sum(jnp.sum(jnp.square(results[name])) for name in names)


@both_precisions
@pytest.mark.parametrize(
    ("rows", "names"),
    [
        *((rows, ("first", "second")) for rows in [(), (1,), (127,), (3, 400)]),
        *(((3, 400), names) for names in [("first",), ("second",)]),
    ],
)
def test_slopes_of_several_results_are_those_of_the_plain_function(x64, names, rows):
    with jax.enable_x64(x64):
        coefficients = tuple(map(jnp.asarray, (0.3, -1.2, 5.0)))
        row = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, rows), float)
        for transform in (jax.grad, jax.jacfwd):
            ours, plain = (
                quickly(transform(functools.partial(loss_of_results, f, names), (0, 1)))(coefficients, row)
                for f in (by_slopes(two_results), two_results)
            )
            assert_close(ours, plain, FLOAT64_RTOL if x64 else FLOAT32_RTOL)


@both_precisions
@pytest.mark.parametrize("rows", [(), (1,), (127,), (3, 400)])
def test_slopes_times_one_scalar_for_all_rows_are_those_of_the_plain_function(x64, rows):
    def mean_and_sum(f, coefficients, row):
        results = f(coefficients, row)
        return coefficients[2] * jnp.mean(results["first"]) + jnp.sum(results["second"])

    def mean_and_squares(f, coefficients, row):
        results = f(coefficients, row)
        return jnp.mean(results["first"]) + jnp.sum(jnp.square(results["second"]))

    with jax.enable_x64(x64):
        coefficients = tuple(map(jnp.asarray, (0.3, -1.2, 5.0)))
        row = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, rows), float)
        for loss in (mean_and_sum, mean_and_squares):
            ours, plain = (
                quickly(jax.grad(functools.partial(loss, f), (0, 1)))(coefficients, row)
                for f in (by_slopes(two_results), two_results)
            )
            assert_close(ours, plain, FLOAT64_RTOL if x64 else FLOAT32_RTOL)


#: What a loss may multiply a result by: of one column, of scalars, of shared parts, of two columns, and of
#: what is no matter of a few operations.
FACTORS = {
    "arithmetic": lambda x, s, y: -x * 3.0 + x / (2.0 - x) - s,
    "extremes": lambda x, s, y: jnp.minimum(x, s) + jnp.maximum(x, 0.2) * jnp.minimum(x, 0.5),
    "finite": lambda x, s, y: jax.lax.select(jnp.isfinite(1.0 / (x - 0.25)), x, 7.0 + 0.0 * x),
    "equal": lambda x, s, y: jax.lax.select(x == s, 9.0 * x, -x) + jax.lax.select(x != s, x, 5.0 * x),
    "greater": lambda x, s, y: jax.lax.select(x > 0.1, x, 3.0 * x) + jax.lax.select(x >= s, x, x * x),
    "less": lambda x, s, y: jax.lax.select(x < 0.1, x, 3.0 * x) + jax.lax.select(x <= s, x, x * x),
    "total order": lambda x, s, y: jax.lax.select(jax.lax.lt_to_p.bind(-(x - s), s - x), x + 90.0, x),
    "powers": lambda x, s, y: functools.reduce(lambda p, _: p * p + x, range(60), 0.1 * x),
    "scalars": lambda x, s, y: s * s - 2.0,
    "two columns": lambda x, s, y: x * y - s,
    "sine": lambda x, s, y: jnp.sin(x) + s,
    "column": lambda x, s, y: x,
}


@both_precisions
@pytest.mark.parametrize("name", list(FACTORS))
def test_slopes_times_what_a_loss_makes_of_a_column_are_those_of_the_plain_function(x64, name):
    def weighed(f, coefficients, row, other):
        results = f(coefficients, row)
        factor = FACTORS[name](row, coefficients[2], other)
        return jnp.sum(jax.lax.stop_gradient(factor) * results["first"]) + jnp.sum(results["second"])

    with jax.enable_x64(x64):
        coefficients = tuple(map(jnp.asarray, (0.3, -0.7, 0.25)))
        row, other = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (2, 3, 400)), float)
        row = row.at[..., 7].set(0.25)
        ours, plain = (
            quickly(jax.grad(functools.partial(weighed, f)))(coefficients, row, other)
            for f in (by_slopes(two_results), two_results)
        )
        assert_close(ours, plain, FLOAT64_RTOL if x64 else 10 * FLOAT32_RTOL)


def test_slopes_of_several_results_have_second_derivatives_and_are_mapped_as_a_loop():
    coefficients, row = tuple(map(jnp.asarray, (0.3, -1.2, 5.0))), jnp.linspace(-1.0, 1.0, 300)
    names = ("first", "second")
    for transform in (jax.hessian, lambda f: jax.jacrev(jax.grad(f))):
        ours, plain = (
            quickly(transform(functools.partial(loss_of_results, f, names)))(coefficients, row)
            for f in (by_slopes(two_results), two_results)
        )
        assert_close(ours, plain, FLOAT64_RTOL)
    gradient = jax.grad(functools.partial(loss_of_results, by_slopes(two_results), names))
    several = jax.tree.map(lambda leaf: leaf * jnp.linspace(0.5, 2.0, 5), coefficients)
    mapped = jax.vmap(gradient, (0, None))(several, row)
    loop = [gradient(one, row) for one in rows_of(several)]
    assert_close(mapped, jax.tree.map(lambda *leaves: jnp.stack(leaves), *loop), FLOAT64_RTOL)


def test_a_scalar_that_no_used_result_depends_on_is_not_summed():
    coefficients, row = tuple(map(jnp.asarray, (0.3, -1.2, 5.0))), jnp.linspace(-1.0, 1.0, 300)

    def sums(names):
        f = functools.partial(loss_of_results, by_slopes(two_results), names)
        return [
            len(equation.outvars)
            for equation in jax.make_jaxpr(jax.grad(f))(coefficients, row).eqns
            if equation.primitive.name == "weigh_rows" and equation.params["is_sum"]
        ]

    assert sums(("second",)) == [1]
    assert sums(("first", "second")) == [2]


# --- The gate ------------------------------------------------------------------------------------


def plain_score_ns(gate, benefit):
    """Return SPEC 2 in plain operations, to be differentiated by JAX alone."""
    launches, syncs, readback, traffic = vars(benefit).values()
    readback_bw = jnp.maximum(jnp.where(gate.unified_memory >= 0.5, 0.0, gate.host_readback_bw), 1.0)
    base = launches * gate.dispatch_ns + syncs * gate.roundtrip_ns
    base += traffic / jnp.maximum(gate.memory_bw, 1.0) + readback / readback_bw
    return base - jnp.where(syncs < 0, -syncs, 0.0) * gate.host_thunk_penalty_ns


def loss_of(score, gate, benefit):
    log_odds = (score(gate, benefit) - gate.min_gain_ns) / 1e7
    return jnp.mean(jax.nn.softplus(log_odds) - 0.3 * log_odds)


@both_precisions
@pytest.mark.parametrize("per_row", [True, False])
def test_the_gradient_of_a_loss_is_that_of_the_plain_formula(x64, per_row):
    with jax.enable_x64(x64):
        gate, benefit = floats(table(200))
        gate = gate if per_row else jax.tree.map(lambda leaf: leaf[3], gate)
        ours, plain = (
            jax.jit(jax.value_and_grad(lambda *x, score=score: loss_of(score, *x), (0, 1)))(gate, benefit)
            for score in (rx.IoFusionGate.score_ns, plain_score_ns)
        )
        for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
            scale = np.max(np.abs(expected))
            rtol = FLOAT64_RTOL if x64 else FLOAT32_RTOL
            np.testing.assert_allclose(got, expected, rtol=10 * rtol, atol=rtol * scale)


@both_precisions
@pytest.mark.parametrize("rows", [1, 2 * 8 * 2048, 40_003])
def test_a_long_table_is_summed_in_blocks_to_the_same_gradient(x64, rows):
    with jax.enable_x64(x64):
        gate, benefit = floats(table(200))
        gate = jax.tree.map(lambda leaf: leaf[3], gate)
        benefit = jax.tree.map(lambda leaf: jnp.resize(leaf, (rows,)), benefit)
        ours, plain = (
            jax.jit(jax.grad(lambda gate, score=score: loss_of(score, gate, benefit)))(gate)
            for score in (rx.IoFusionGate.score_ns, plain_score_ns)
        )
        for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-10 if x64 else 1e-4, atol=1e-300)


@pytest.mark.parametrize(("runs", "takes_in"), [(SHORT_LOOP, False), (SHORT_LOOP, True), (LONG_LOOP, False)])
def test_runs_of_any_number_of_rows_leave_none_out_and_count_none_twice(runs, takes_in):
    counts = [100, 128, 247, 367, 368, 375, 376, 384]
    columns = [jnp.arange(2 * count, dtype=float).reshape(2, count) for count in counts]

    def sums(columns):
        return [
            sums_of_rows(
                lambda x, y, scale: [scale * x, x + y * y], [*pair, jnp.asarray(3.0)], runs, takes_in
            )
            for pair in columns
        ]

    for (first, second), (scaled, others) in zip(columns, jax.jit(sums)(columns), strict=True):
        assert scaled == 3 * np.sum(first)
        assert others == np.sum(first) + np.sum(np.square(second))


@on_cpu
@pytest.mark.parametrize("count", [128 * 40, 128 * 40 + 64, 128 * 40 + 125])
def test_runs_are_cut_from_columns_without_a_copy_on_a_cpu(count):
    def sums(*columns):
        return sums_of_rows(
            lambda *row: [x * jnp.log(y) for x in row for y in row], columns, LONG_LOOP, False
        )

    columns = [jnp.ones(count) for _ in range(4)]
    memory = jax.jit(sums).lower(*columns).compile().memory_analysis()
    of_runs = 16 * columns[0].nbytes / LONG_LOOP.number  # for sixteen sums
    assert memory.temp_size_in_bytes < of_runs + columns[0].nbytes


@pytest.mark.parametrize(
    ("count", "is_cut"), [(500, False), (1279, False), (1280, True), (1500, True), (4096, True), (4223, True)]
)
def test_pieces_of_any_number_of_rows_leave_none_out_and_count_none_twice(monkeypatch, count, is_cut):
    monkeypatch.setattr(_row_sums, "MOST_BYTES", 100)
    monkeypatch.setattr(_row_sums, "PIECE_BYTES", 150)
    first, second = jnp.arange(2 * count, dtype=float).reshape(2, count)

    def sums(*columns):
        return sums_of_pieces(lambda x, y, scale: [scale * x, x + y * y], [*columns, jnp.asarray(3.0)])

    # Too few rows for a group of runs in each piece are not cut.
    assert ("scan" in str(jax.make_jaxpr(sums)(first, second))) == is_cut
    scaled, others = jax.jit(sums)(first, second)
    assert scaled == 3 * np.sum(first)
    assert others == np.sum(first) + np.sum(np.square(second))


@on_cpu
@pytest.mark.parametrize("count", [2**20, 2**20 + 128, 2**21 + 77])
def test_what_a_long_loop_adds_up_to_is_a_piece_at_a_time_where_it_is_much(count):
    def sums(*columns):
        return sums_of_pieces(lambda *row: [x * jnp.log(y) for x in row for y in row], columns)

    columns = [jax.ShapeDtypeStruct((count,), float)] * 5
    memory = jax.jit(sums).lower(*columns).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.1 * PIECE_BYTES  # and no column is copied for it


def test_a_gradient_of_many_gates_is_a_loop_over_them():
    gates, benefit = floats(table(20))
    gates = jax.tree.map(lambda leaf: leaf[:4], gates)
    for gradient in (jax.grad, jax.hessian):
        f = gradient(lambda gate: loss_of(rx.IoFusionGate.score_ns, gate, benefit))
        mapped, loop = jax.vmap(f)(gates), [f(gate) for gate in rows_of(gates)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *loop)
        for got, expected in zip(jax.tree.leaves(mapped), jax.tree.leaves(stacked), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-300)


def test_reverse_forward_and_second_derivatives_agree():
    gate, benefit = floats(table(50))
    gate = jax.tree.map(lambda leaf: leaf[3], gate)

    def f(gate):
        return loss_of(rx.IoFusionGate.score_ns, gate, benefit)

    forward, reverse = quickly(jax.jacfwd(f))(gate), quickly(jax.grad(f))(gate)
    for got, expected in zip(jax.tree.leaves(forward), jax.tree.leaves(reverse), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-10)
    plain = quickly(jax.hessian(lambda gate: loss_of(plain_score_ns, gate, benefit)))(gate)
    for hessian in (jax.hessian(f), jax.jacrev(jax.grad(f))):
        second = quickly(hessian)(gate)
        for got, expected in zip(jax.tree.leaves(second), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-300)


@pytest.mark.parametrize("unified", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [0.0, 1e6, INF])
@pytest.mark.parametrize("memory_bw", [0.0, 0.5, 150.0])
@pytest.mark.parametrize("syncs", [-2.0, 0.0, 2.0])
def test_a_gradient_at_a_singular_point_is_the_count(unified, penalty, memory_bw, syncs):
    gate = dataclasses.replace(
        GATE, unified_memory=unified, host_thunk_penalty_ns=penalty, memory_bw=memory_bw
    )
    benefit = rx.FusionBenefit(3.0, syncs, 7680.0, -900.0)
    by_gate, by_benefit = jax.grad(lambda *x: rx.IoFusionGate.score_ns(*x), (0, 1))(gate, benefit)
    by_memory_bw = 900 / memory_bw**2 if memory_bw > 1 else 0.0
    by_readback_bw = 0.0 if unified else -7680 / 30**2
    expected = (3, syncs, by_memory_bw, by_readback_bw, 0, min(syncs, 0.0), 0)
    np.testing.assert_allclose(dataclasses.astuple(by_gate), expected, rtol=FLOAT64_RTOL)
    by_syncs = 9_000.0 + (penalty if syncs < 0 else 0.0)
    expected = (700, by_syncs if np.isfinite(by_syncs) else 0.0, 1.0 if unified else 1 / 30)
    expected = (*expected, 1 / max(memory_bw, 1.0))
    np.testing.assert_allclose(dataclasses.astuple(by_benefit), expected, rtol=FLOAT64_RTOL)
    assert float(gate.score_ns(benefit)) == pytest.approx(closed_form(gate, benefit))


def test_a_saturated_probability_has_a_finite_gradient_and_its_log_odds_are_finite():
    gate = dataclasses.replace(GATE, min_gain_ns=0.0)
    for launches in (1e300, -1e300, INF, -INF):
        benefit = rx.FusionBenefit(launches_saved=launches)
        for name in ("fuse_probability", "fuse_log_probability"):
            f = lambda t, name=name, benefit=benefit: getattr(gate, name)(benefit, temperature_ns=t)  # noqa: E731
            assert np.isfinite(jax.grad(f)(1e-3))
        log_odds = gate.fuse_log_odds(benefit, temperature_ns=1e-30)
        assert np.isfinite(log_odds) == np.isfinite(launches)
        assert np.sign(log_odds) == np.sign(launches)


def test_log_odds_and_the_step_have_the_derivatives_of_finite_differences():
    tree = {"x": np.array([-30.0, -1.0, 0.5, 4.0, 30.0]), "t": np.array([2.0, 0.5, 1.0, 3.0, 1.5])}
    for f in (_numerics.log_odds, _numerics.soft_step, _numerics.log_soft_step):
        assert_gradient_is_the_finite_difference(lambda tree, f=f: f(tree["x"], tree["t"]), tree)
