"""Smooth and gradient-unsafe primitives: value, gradient, singular points, and the limit T -> 0."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from _tolerances import (
    FLOAT32_RTOL,
    FLOAT64_RTOL,
    LIMIT_TEMPERATURES,
    SATURATED_ATOL,
    assert_gradient_is_the_finite_difference,
)

from rlxjax import _numerics as num

INF = np.inf
X = np.array([-700.0, -30.0, -3.0, -0.25, 0.5, 2.0, 40.0, 650.0])
Y = np.array([2.0, 31.0, -4.0, -0.25, 0.75, -2.0, 60.0, 640.0])
T = np.array([1.0, 5.0, 0.5, 2.0, 3.0, 0.125, 10.0, 30.0])


def log_sum_exp(x, y, t):
    return t * np.logaddexp(x / t, y / t)


#: name: (function, arguments, the same in NumPy and SciPy)
CLOSED_FORMS = {
    "times": (num.times, (X, Y), lambda x, y: x * y),
    "logistic": (num.logistic, (X,), scipy.special.expit),
    "soft_step": (num.soft_step, (X, T), lambda x, t: scipy.special.expit(x / t)),
    "log_soft_step": (num.log_soft_step, (X, T), lambda x, t: scipy.special.log_expit(x / t)),
    "at_least": (
        lambda x, y, t: num.Choices(t).at_least(x, y),
        (X, Y, T),
        lambda x, y, t: scipy.special.expit((x - y) / t + t**-0.5),
    ),
    "soft_relu": (num.soft_relu, (X, T), lambda x, t: log_sum_exp(x, 0, t)),
    "soft_maximum": (num.soft_maximum, (X, Y, T), log_sum_exp),
    "soft_minimum": (num.soft_minimum, (X, Y, T), lambda x, y, t: -log_sum_exp(-x, -y, t)),
    "clip": (
        lambda x, y, t: num.Choices(t).clip(x, y, y + 3),
        (X, Y, T),
        lambda x, y, t: -log_sum_exp(-log_sum_exp(x, y, t), -y - 3, t),
    ),
    **{
        f"soft_roofline of sharpness {p}": (
            lambda x, y, p=p: num.soft_roofline(x, y, p),
            (np.exp(X / 400), np.exp(Y / 400)),
            lambda x, y, p=p: (x**p + y**p) ** (1 / p),
        )
        for p in (2, 2.5)
    },
    **{
        f"soft_excess of sharpness {p}": (
            lambda x, y, p=p: num.soft_excess(x, y, p),
            (np.exp(X / 400), np.exp(Y / 400)),
            lambda x, y, p=p: x**p / (x**p + y**p),
        )
        for p in (2.5, 4)
    },
    "temperature_from_sd": (num.temperature_from_sd, (T,), lambda sd: sd * np.sqrt(3) / np.pi),
}


def test_value_is_the_closed_form_in_either_precision_gradient_the_finite_difference_and_jit_and_vmap_change_nothing():
    arguments = {name: own for name, (_, own, _) in CLOSED_FORMS.items()}
    forms = {name: f for name, (f, *_) in CLOSED_FORMS.items()}

    @jax.jit
    def by_forms(given):
        one = {name: [column[5] for column in own] for name, own in given.items()}
        return {name: (f(*given[name]), jax.vmap(f)(*given[name]), f(*one[name])) for name, f in forms.items()}

    compiled = by_forms(arguments)
    near = {name: [np.clip(column, -60, 60) for column in own] for name, own in arguments.items()}
    with jax.enable_x64(False):
        single = by_forms(jax.tree.map(lambda column: jnp.asarray(column, jnp.float32), near))
    for name, (f, own, exact) in CLOSED_FORMS.items():
        eager = f(*own)
        np.testing.assert_allclose(eager, exact(*own), rtol=FLOAT64_RTOL, atol=0)
        for other, expected in zip(compiled[name], (eager, eager, eager[5]), strict=True):
            np.testing.assert_allclose(other, expected, rtol=FLOAT64_RTOL, atol=0)
        assert single[name][0].dtype == jnp.float32
        np.testing.assert_allclose(single[name][0], exact(*near[name]), rtol=FLOAT32_RTOL, atol=1e-38)
        size = np.abs(eager) + sum(np.abs(column) for column in own)
        assert_gradient_is_the_finite_difference(lambda tree: f(*tree), list(own), scale=size)  # noqa: B023


POINTS = np.array([-1e6, -3.0, -1e-3, 0.0, 1e-3, 2.0, 3.0, 1e6])


def test_a_relaxation_is_within_its_temperature_of_the_hard_choice():
    for temperature in (1e-5, 1e-8):
        for soft, hard in (
            (num.soft_relu(POINTS, temperature), np.maximum(POINTS, 0)),
            (num.soft_maximum(POINTS, 2.0, temperature), np.maximum(POINTS, 2)),
            (num.soft_minimum(POINTS, 2.0, temperature), np.minimum(POINTS, 2)),
        ):
            assert (np.abs(soft - hard) <= LIMIT_TEMPERATURES * temperature).all()
        # A choice tends to the hard one with its temperature, or with its scale; `at_least` at the tie, too.
        for name, others in [("relu", ()), ("maximum", (2.0,)), ("clip", (-3.0, 2.0)), ("at_least", (2.0,))]:
            hard = getattr(num.Choices(), name)(POINTS, *others)
            for rules, scale in ((num.Choices(temperature), None), (num.Choices(1e6 * temperature), 1e6)):
                smooth = getattr(rules, name)(POINTS, *others, scale=scale)
                atol = SATURATED_ATOL if name == "at_least" else LIMIT_TEMPERATURES * temperature
                np.testing.assert_allclose(smooth, hard, rtol=0, atol=atol)
        away = POINTS[POINTS != 0]
        np.testing.assert_allclose(num.soft_step(away, temperature), away >= 0, rtol=0, atol=SATURATED_ATOL)
        assert num.soft_step(0.0, temperature) == 0.5


def test_a_count_of_zero_wins_over_an_infinite_coefficient():
    count, coefficient = jnp.array([0.0, 0.0, 2.0, -2.0]), jnp.array([INF, -INF, INF, INF])
    np.testing.assert_array_equal(num.times(count, coefficient), [0, 0, INF, -INF])
    by_count, by_coefficient = jax.vmap(jax.grad(lambda n, rate: num.dot([n], [rate]), (0, 1)))(count, coefficient)
    np.testing.assert_array_equal(by_count, 0)
    np.testing.assert_array_equal(by_coefficient, count)


def test_the_logistic_keeps_its_slope_where_it_rounds_to_one_and_has_three_derivatives_everywhere():
    x = np.array([18.0, 40.0, 80.0])
    with jax.enable_x64(False):
        slopes = jax.vmap(jax.grad(num.logistic))(jnp.asarray([*x, *-x], jnp.float32))
        np.testing.assert_array_equal(num.logistic(jnp.asarray(x, jnp.float32)), 1)
    np.testing.assert_allclose(slopes[:3], scipy.special.expit(x) * scipy.special.expit(-x), rtol=FLOAT32_RTOL)
    np.testing.assert_array_equal(slopes[:3], slopes[3:])
    x = np.array([-np.inf, -1e3, -1.5, 0.0, 1.5, 1e3, np.inf])
    p = scipy.special.expit(x)
    slope = p * (1 - p)
    curvature = jax.grad(jax.grad(num.logistic))
    found = jax.jit(lambda x: (jax.vmap(curvature)(x), jax.vmap(jax.grad(curvature))(x)))(x)
    np.testing.assert_allclose(found[0], slope * (1 - 2 * p), rtol=FLOAT64_RTOL)
    np.testing.assert_allclose(found[1], slope * (1 - 6 * slope), rtol=FLOAT64_RTOL)


def test_log_odds_have_the_slopes_of_the_quotient_and_stay_finite():
    slopes_of = jax.jit(jax.value_and_grad(num.log_odds, argnums=(0, 1)))
    for x in (-np.inf, -1e300, 0.0, 3.0, 1e300):
        odds, slopes = slopes_of(x, 2.0)
        np.testing.assert_allclose(slopes, (0.5, -odds / 2.0))
        assert np.isfinite(odds)
    # The logarithm of a step does not underflow.
    assert jax.value_and_grad(num.log_soft_step)(-1e6, 1.0) == (-1e6, 1.0)
    assert num.soft_step(-1e6, 1.0) == 0


def test_powers_of_ratios_keep_value_and_slopes_over_the_range_of_float32():
    x, y = np.logspace(-12, 24, 400), 3e6
    forms = [(f, sharpness) for f in (num.soft_roofline, num.soft_excess) for sharpness in (2, 16)]

    @jax.jit
    def both(x):
        each = [functools.partial(f, sharpness=sharpness) for f, sharpness in forms]
        return [(f(x, y), *jax.vmap(jax.grad(f, (0, 1)), (0, None))(x, y)) for f in each]

    with jax.enable_x64(False):
        found = both(x.astype(np.float32))
    for (f, sharpness), own in zip(forms, found, strict=True):
        log_x, log_y = sharpness * np.log(x), sharpness * np.log(y)
        value, of_y = scipy.special.expit(log_x - log_y), scipy.special.expit(log_y - log_x)
        slopes = sharpness * value * of_y / x, -sharpness * value * of_y / y
        if f is num.soft_roofline:
            total = np.exp(np.logaddexp(log_x, log_y) / sharpness)
            value, slopes = total, (value * total / x, of_y * total / y)
        for got, exact in zip(own, (value, *slopes), strict=True):
            np.testing.assert_allclose(got, exact, rtol=sharpness * FLOAT32_RTOL, atol=1e-34)


def test_straight_through_has_the_value_of_one_and_the_slope_of_the_other():
    f = jax.jit(jax.value_and_grad(lambda x, hard: num.straight_through(hard + 0 * x, x**2)))
    for hard in [3.0, 0.1 + 0.2, INF, -INF]:
        assert f(1e17, hard) == (hard, 2e17)
    chosen = num.straight_through(jnp.array([True, False]), jnp.array([0.9, 0.2]))
    assert chosen.dtype == float
    np.testing.assert_array_equal(chosen, [1, 0])


COSTS = np.array([[1.0, 2.0, 4.0], [3.0, INF, 3.0], [INF, 7.0, INF], [INF, INF, INF], [1e9, 1e9, 1e9]])
SOFTMIN_T = np.array([0.5, 2.0, 1e-3, 1.0, 1e5])


def test_log_softmin_is_a_log_softmax_over_the_possible_entries_and_tends_to_the_first_of_the_cheapest():
    cold = np.exp(num.log_softmin(COSTS[:3], np.full(3, 1e-9)))
    np.testing.assert_array_equal(cold, [[1, 0, 0], [0.5, 0, 0.5], [0, 1, 0]])
    for log_availability in (np.log([[0.5, 0.25, 1.0]] * 5), [[0.0, -INF, 0.0]] * 5, [[-INF] * 3] * 5):
        weights = num.log_softmin(COSTS, SOFTMIN_T, np.array(log_availability))
        for row, costs, t, log_a in zip(weights, COSTS, SOFTMIN_T, log_availability, strict=True):
            logits = -costs / t + log_a
            expected = scipy.special.log_softmax(logits) if np.isfinite(logits).any() else logits
            np.testing.assert_allclose(row, expected, rtol=1e-9)


def test_no_gradient_of_log_softmin_is_not_finite():
    mix, log_availability = np.array([0.3, -1.0, 2.0]), np.log([[0.5, 0.25, 1.0]] * 5)
    arguments = {"costs": COSTS, "temperature": SOFTMIN_T, "log_a": log_availability}

    @jax.jit
    def f(tree):
        weights = jnp.exp(num.log_softmin(tree["costs"], tree["temperature"], tree["log_a"]))
        return weights @ mix

    gradient = jax.grad(lambda tree: f(tree).sum())(arguments)
    assert all(np.isfinite(leaf).all() for leaf in gradient.values())
    np.testing.assert_array_equal(gradient["costs"][np.isinf(COSTS)], 0)
    masked = np.array([0.0, -INF, 0.0])
    slope = jax.grad(lambda a: (jnp.exp(num.log_softmin(COSTS[0], 1.0, a)) * mix).sum())(masked)
    assert np.isfinite(slope).all()


def test_no_temperature_makes_a_nan():
    """Neither a value nor a gradient, from the coldest to the hottest float of either precision."""
    functions = {
        **{name: getattr(num, name) for name in ("soft_step", "log_soft_step", "soft_relu")},
        "soft_maximum": lambda x, t: num.soft_maximum(x, 1.0, t),
        "soft_minimum": lambda x, t: num.soft_minimum(x, 1.0, t),
    }

    @jax.jit
    def values_and_gradients(x, t):
        return {name: (f(x, t), jax.grad(lambda x, t: jnp.sum(f(x, t)), (0, 1))(x, t)) for name, f in functions.items()}

    @jax.jit
    def weights_and_gradients(costs, t):
        def weights(costs, t):
            return jnp.exp(num.log_softmin(costs, t))

        return weights(costs, t), jax.grad(lambda c, t: jnp.sum(weights(c, t)[:, 0]), (0, 1))(costs, t)

    for x64 in (True, False):
        with jax.enable_x64(x64):
            dtype = jnp.result_type(float)
            limits = jnp.finfo(dtype)
            edges = np.array([limits.tiny, 1e-30, 1e-10, 1.0, 1e10, 1e30, limits.max], dtype)
            x, t = np.meshgrid(np.array([-np.inf, -1e9, -1, 0, 1, 1e9, np.inf], dtype), edges)
            for name, found in values_and_gradients(x, t).items():
                assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(found)), name
            found = weights_and_gradients(np.array([[1.0, np.inf, 1e9]] * len(edges), dtype), edges)
            np.testing.assert_array_equal(found[0][:, 1], 0)
            assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(found))


def test_smooth_extremes_keep_the_smaller_of_very_different_numbers():
    for x64 in [True, False]:
        with jax.enable_x64(x64):
            for other in (1e9, 1e20, np.inf):
                assert num.soft_minimum(1.0, other, 1e-3) == num.soft_minimum(other, 1.0, 1e-3) == 1.0
                assert num.soft_maximum(1.0, -other, 1e-3) == num.soft_maximum(-other, 1.0, 1e-3) == 1.0
            assert num.soft_relu(1e25, 1.0) == np.asarray(1e25, num.soft_relu(1e25, 1.0).dtype)
            assert (np.asarray(num.soft_relu(np.arange(3), 1e-6)) >= np.arange(3)).all()


def test_a_temperature_that_is_none_is_refused_where_the_host_can_read_it():
    for bad in (0.0, -1.0, np.nan, [1.0, -1.0]):
        for soft in (num.soft_step, num.soft_relu, lambda x, t: num.soft_maximum(x, 1.0, t)):
            with pytest.raises(ValueError, match="temperature: expected a positive number, got (0|-1|nan)"):
                soft(2.0, bad)
    for bad in (-1.0, np.nan):
        with pytest.raises(ValueError, match=f"sd: expected a standard deviation of at least 0, got {bad}"):
            num.temperature_from_sd(bad)
    assert num.temperature_from_sd(np.inf) == np.inf
    # The standard deviation of a logistic distribution is its scale times pi over the root of 3.
    np.testing.assert_allclose(num.temperature_from_sd(0.7) * np.pi / 3**0.5, 0.7, rtol=FLOAT64_RTOL)
