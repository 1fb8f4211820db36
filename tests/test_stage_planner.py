"""Plans of stages: dynamic programming against all groupings, the laws of the best plan, and its smooth form."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import FLOAT64_RTOL, assert_close, assert_gradient_is_the_finite_difference
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import rlxjax as rx

smooth_of, slopes_of = jax.jit(rx.fusion.soft_plan_ns), jax.jit(jax.grad(rx.fusion.soft_plan_ns, (0, 1)))
prices = st.sampled_from([0.0, 0.01, 1.0, 100.0])


def tables(draw, n):
    """Return what the groups of some stages take and hold; some sets of stages are no group."""
    times = draw(arrays(np.float64, (n, n), elements=st.floats(0.0, 1e6) | st.sampled_from([0.0, 5.0, np.inf])))
    np.fill_diagonal(times, np.where(np.isinf(np.diag(times)), 7.0, np.diag(times)))
    return times, draw(arrays(np.float64, (n, n), elements=st.integers(0, 9).map(float)))


problems = st.composite(lambda draw: tables(draw, draw(st.integers(1, 6))))()


def groupings(n):
    """Return all ways to group stages that stand in a row."""
    for cuts in itertools.product((False, True), repeat=n - 1):
        starts = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), n]
        yield tuple(tuple(range(a, b)) for a, b in itertools.pairwise(starts))


def plan_of(times, peaks, groups):
    """Return a plan with its time and peak, by what these words mean."""
    ends = [(group[0], group[-1]) for group in groups]
    return rx.fusion.StagePlan(groups, sum(times[end] for end in ends), max(peaks[end] for end in ends))


def every_plan(times, peaks, price):
    """Return all plans that are possible, the best first."""
    plans = [plan_of(times, peaks, groups) for groups in groupings(len(times))]
    return sorted((p for p in plans if np.isfinite(p.time_ns)), key=lambda p: p.time_ns + price * p.peak_bytes)


@given(problems, prices, st.integers(1, 40))
def test_the_best_plans_are_those_of_all_groupings(problem, price, count):
    times, peaks = problem
    found = rx.fusion.plan_stages(times, peaks, peak_price_ns_per_byte=price, count=count)
    expected = every_plan(times, peaks, price)[:count]
    assert len(found) == len(set(found)) == len(expected)
    for plan, other in zip(found, expected, strict=True):
        assert plan == plan_of(times, peaks, plan.groups)
        cost, least = (p.time_ns + price * p.peak_bytes for p in (plan, other))
        np.testing.assert_allclose(cost, least, rtol=FLOAT64_RTOL)


@given(problems, st.floats(1.0, 1e6))
def test_a_dearer_launch_leaves_no_more_programs_and_a_dearer_peak_no_larger_one(problem, price):
    times, peaks = problem
    cheap, dear = (rx.fusion.plan_stages(times + launch_ns)[0] for launch_ns in (0.0, price))
    assert len(dear.groups) <= len(cheap.groups)
    assert cheap.time_ns <= dear.time_ns <= cheap.time_ns + price * len(cheap.groups) + FLOAT64_RTOL * dear.time_ns
    free, priced = (rx.fusion.plan_stages(times, peaks, peak_price_ns_per_byte=own)[0] for own in (0.0, price))
    assert priced.peak_bytes <= free.peak_bytes
    assert priced.time_ns >= free.time_ns


@given(problems)
def test_units_do_not_matter_and_what_is_no_group_is_not_read(problem):
    times, peaks = problem
    below = np.tri(len(times), k=-1, dtype=bool)
    for other in (4.0 * times, np.where(below, np.nan, 4.0 * times)):
        one, scaled = (rx.fusion.plan_stages(table, np.where(below, -1.0, peaks)) for table in (times, other))
        assert scaled[0].groups == one[0].groups
        assert scaled[0].time_ns == 4.0 * one[0].time_ns


@given(problems)
def test_the_smooth_time_is_a_softmin_over_all_plans_and_tends_to_the_best(problem):
    times, peaks = problem
    costs = np.array([plan.time_ns for plan in every_plan(times, peaks, 0.0)])
    for temperature in (1e-9, 10.0, 1e5):
        expected = costs.min() - temperature * np.log(np.sum(np.exp((costs.min() - costs) / temperature)))
        smooth = float(smooth_of(times, temperature))
        np.testing.assert_allclose(smooth, expected, rtol=1e-9, atol=1e-9 * temperature)
        assert smooth <= costs.min() * (1 + FLOAT64_RTOL)
    # Of a group, the weight of the plans that have it: every stage is in one group.
    weights, slope = map(np.asarray, slopes_of(times, 10.0))
    assert np.isfinite(weights).all()
    assert np.isfinite(slope)
    inside = [weights[: stage + 1, stage:].sum() for stage in range(len(times))]
    np.testing.assert_allclose(inside, 1.0, rtol=1e-9)


def test_the_gradient_is_the_finite_difference_jit_is_eager_and_vmap_a_loop():
    rng = np.random.default_rng(0)
    rows = rng.uniform(1.0, 9.0, (5, 4, 4))
    temperature = np.linspace(0.5, 2.0, 5)
    assert_gradient_is_the_finite_difference(
        lambda tree: rx.fusion.soft_plan_ns(tree["times"], tree["temperature"]),
        {"times": rows, "temperature": temperature},
    )
    one_by_one = np.array([rx.fusion.soft_plan_ns(row, own) for row, own in zip(rows, temperature, strict=True)])
    for call in (rx.fusion.soft_plan_ns, jax.jit(rx.fusion.soft_plan_ns), jax.vmap(rx.fusion.soft_plan_ns)):
        assert_close(np.asarray(call(rows, temperature)), one_by_one, FLOAT64_RTOL)
    assert rx.fusion.soft_plan_ns(jnp.float32(rows[0]), jnp.float32(0.5)).dtype == jnp.float32


def test_what_is_no_table_is_refused_in_a_sentence():
    for arguments, message in (
        ({"time_ns": [1.0, 2.0]}, r"time_ns: expected a number for each first and last stage, got shape \(2,\)"),
        ({"time_ns": [[1.0, 2.0]]}, "time_ns: expected a number for each first and last stage"),
        ({"time_ns": np.zeros((0, 0))}, "time_ns: expected a number for each first and last stage"),
        ({"time_ns": [[-1.0]]}, "time_ns: expected a number of at least 0, got -1.0"),
        ({"time_ns": [[np.nan]]}, "time_ns: expected a number of at least 0, got nan"),
        ({"peak_bytes": [[-1.0]]}, "peak_bytes: expected a number of at least 0, got -1.0"),
        ({"peak_price_ns_per_byte": -1.0}, "peak_price_ns_per_byte: expected a number of at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            rx.fusion.plan_stages(**{"time_ns": [[1.0]], **arguments})
