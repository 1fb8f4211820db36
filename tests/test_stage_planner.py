"""Plans of stages: dynamic programming against all groupings, the laws of the best plan, and its smooth form."""

import itertools

import jax
import numpy as np
import pytest
from _tolerances import FLOAT64_RTOL
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import rlxjax as rx
from rlxjax.fusion import StagePlan, plan_stages, soft_plan_ns

value_and_slopes = jax.jit(jax.value_and_grad(soft_plan_ns, (0, 1)))


def tables(draw, sizes):
    """Return what the groups of some stages take and hold; some sets of stages are no group."""
    n = draw(sizes)
    times = draw(arrays(np.float64, (n, n), elements=st.floats(0.0, 1e6) | st.sampled_from([0.0, 5.0, np.inf])))
    np.fill_diagonal(times, np.where(np.isinf(np.diag(times)), 7.0, np.diag(times)))
    return times, draw(arrays(np.float64, (n, n), elements=st.integers(0, 9).map(float)))


problems = st.composite(tables)


def every_plan(times, peaks, price=0.0):
    """Return all plans that are possible, by what their words mean, the best first."""
    n, plans = len(times), []
    for cuts in itertools.product((False, True), repeat=n - 1):
        ends = [*(i for i, cut in enumerate(cuts) if cut), n - 1]
        groups = [(a, b) for a, b in zip([0, *(end + 1 for end in ends)], ends, strict=False)]
        time_ns, peak = sum(times[group] for group in groups), max(peaks[group] for group in groups)
        if np.isfinite(time_ns):
            plans.append(StagePlan(tuple(tuple(range(a, b + 1)) for a, b in groups), time_ns, peak))
    return sorted(plans, key=lambda p: p.time_ns + price * p.peak_bytes)


@given(problems(st.integers(1, 6)), st.sampled_from([0.0, 0.01, 1.0, 100.0]), st.integers(1, 40))
def test_the_best_plans_are_those_of_all_groupings(problem, price, count):
    times, peaks = problem
    found, expected = plan_stages(times, peaks, peak_price_ns_per_byte=price, count=count), every_plan(*problem, price)
    known = {plan.groups: plan for plan in expected}
    assert len(found) == len(set(found)) == min(len(expected), count)
    for plan, other in zip(found, expected, strict=False):
        assert plan == known[plan.groups]
        cost, least = (p.time_ns + price * p.peak_bytes for p in (plan, other))
        np.testing.assert_allclose(cost, least, rtol=FLOAT64_RTOL)


@given(problems(st.sampled_from([1, 4])))
def test_the_smooth_time_is_a_softmin_over_all_plans_and_tends_to_the_best(problem):
    times, _ = problem
    costs = np.array([plan.time_ns for plan in every_plan(*problem)])
    for temperature in (1e-9, 10.0, 1e5):
        expected = costs.min() - temperature * np.log(np.sum(np.exp((costs.min() - costs) / temperature)))
        smooth, (weights, slope) = jax.tree.map(np.asarray, value_and_slopes(times, temperature))
        np.testing.assert_allclose(smooth, expected, rtol=1e-9, atol=1e-9 * temperature)
        assert smooth <= costs.min() * (1 + FLOAT64_RTOL)
        if temperature == 10.0:  # of a group, the weight of the plans that have it: every stage is in one group
            assert np.isfinite(weights).all()
            assert np.isfinite(slope)
            inside = [weights[: stage + 1, stage:].sum() for stage in range(len(times))]
            np.testing.assert_allclose(inside, 1.0, rtol=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"time_ns": [1.0, 2.0]}, r"time_ns: expected a number for each first and last stage, got shape \(2,\)"),
        ({"time_ns": np.zeros((0, 0))}, "time_ns: expected a number for each first and last stage"),
        ({"time_ns": [[-1.0]]}, "time_ns: expected a number of at least 0, got -1.0"),
        ({"peak_bytes": [[-1.0]]}, "peak_bytes: expected a number of at least 0, got -1.0"),
        ({"peak_price_ns_per_byte": -1.0}, "peak_price_ns_per_byte: expected a number of at least 0, got -1"),
    ],
)
def test_what_is_no_table_is_refused_in_a_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        rx.fusion.plan_stages(**{"time_ns": [[1.0]], **arguments})
