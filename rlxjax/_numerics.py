"""Every smooth or gradient-unsafe primitive, each with the wrong derivative that it prevents.

A relaxation of temperature `T` equals the hard choice in the limit `T -> 0`. `Exact` and `Smooth`
offer the same four choices, so that a formula is written once and read with either.
"""

import dataclasses
import functools
import math
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._slopes import along
from ._typing import RealLike

#: Standard deviation of a logistic distribution of temperature 1.
LOGISTIC_SD = math.pi / math.sqrt(3.0)


def namespace_of(*arguments: RealLike) -> ModuleType:
    """Return `jax.numpy` if one of the arguments is an array of JAX, else NumPy, which compiles nothing."""
    return jnp if any(isinstance(argument, jax.Array) for argument in arguments) else np


@jax.custom_jvp
def times(count: RealLike, coefficient: RealLike) -> Array:
    """Return `count * coefficient`, where a count of zero wins over an infinite coefficient.

    Prevents: NaN from `0 * inf`, forward and backward; the derivative by the count is taken as 0
    where the coefficient is infinite. The selection also keeps compilers from contracting the product
    and a following sum into one rounding, so that scores are the same to the last bit however they are
    compiled. Where the count is a constant, nothing is left of the selection, and the zero does that:
    compilers do not know that it is one, and contracting the product with it changes nothing.
    """
    zero = 0.0 * jnp.where(jnp.isfinite(coefficient), coefficient, 0.0)
    product = jnp.asarray(count * coefficient) + zero
    return jnp.where(jnp.asarray(count) == 0, jnp.zeros_like(product), product)


@times.defjvp
def _times_jvp(primals, tangents):
    count, coefficient = primals
    count_dot, coefficient_dot = tangents
    slope = jnp.where(jnp.isinf(coefficient), jnp.zeros_like(coefficient), coefficient)
    return times(count, coefficient), slope * count_dot + count * coefficient_dot


@jax.custom_jvp
def logistic(x: RealLike) -> Array:
    """Return `1 / (1 + exp(-x))`.

    Prevents: the derivative `p * (1 - p)`, which is exactly zero in float32 from `x = 17` on; here
    it is `p(x) * p(-x)`, which keeps its relative accuracy until `p(-x)` itself underflows.
    """
    return jax.nn.sigmoid(x)


@logistic.defjvp
def _logistic_jvp(primals, tangents):
    (x,) = primals
    (x_dot,) = tangents
    return logistic(x), logistic(x) * logistic(-x) * x_dot


def soft_step(x: RealLike, temperature: RealLike) -> Array:
    """Return the smooth twin of `x >= 0`: the logistic of `x / temperature`.

    Examples:
        >>> print(soft_step(0.0, 2.0))
        0.5
    """
    return _step(*_floats(x, temperature))


def log_odds(x: RealLike, temperature: RealLike) -> Array:
    """Return `x / temperature`, the log-odds of `soft_step`; finite where `x` is."""
    return _ratio(*_floats(x, temperature))


@jax.custom_jvp
def _ratio(x: Array, temperature: Array) -> Array:
    """Prevents: an infinite quotient of finite numbers, and `inf - inf` in what a loss makes of it.

    The divisor being an array of rows, compilers divide once and keep the quotients: by a scalar they
    would multiply, and compute `x` again wherever its quotient is used.
    """
    limits = jnp.finfo(x.dtype)
    least = jnp.minimum(jnp.abs(x), limits.max) * limits.tiny
    return x / jnp.maximum(temperature, least)


@functools.partial(_ratio.defjvp, symbolic_zeros=True)
def _ratio_jvp(primals, tangents):
    x, temperature = primals
    ratio = _ratio(x, temperature)
    return ratio, along(ratio, (1.0 / temperature, -ratio / temperature), tangents)


@jax.custom_jvp
def _step(x: Array, temperature: Array) -> Array:
    """Prevents: `0 * inf` where the step is saturated, and a slope of 0 where it only nearly is.

    A table is multiplied by one reciprocal rather than divided row by row. The step of a product that
    overflows is that of its infinity.
    """
    return jax.nn.sigmoid(x * (1.0 / temperature))


@functools.partial(_step.defjvp, symbolic_zeros=True)
def _step_jvp(primals, tangents):
    x, temperature = primals
    z = _held_ratio(x, temperature)
    decay = jnp.exp(-jnp.abs(z))
    steepness = jnp.where(jnp.abs(z) < _saturation(z), 1.0 / temperature, 0.0)
    slope = decay / jnp.square(1.0 + decay) * steepness
    step = _step(x, temperature)
    return step, along(step, (slope, -slope * z), tangents)


def log_soft_step(x: RealLike, temperature: RealLike) -> Array:
    """Return the logarithm of `soft_step`, without underflow at very negative `x`."""
    return _log_step(*_floats(x, temperature))


@jax.custom_jvp
def _log_step(x: Array, temperature: Array) -> Array:
    """Prevents: `0 * inf` in the derivative by the temperature."""
    ratio = _ratio(x, temperature)
    return jnp.minimum(ratio, 0.0) - _log1p_exp(-jnp.abs(ratio))


@functools.partial(_log_step.defjvp, symbolic_zeros=True)
def _log_step_jvp(primals, tangents):
    x, temperature = primals
    largest = jnp.finfo(x.dtype).max
    ratio = _ratio(x, temperature)
    slope = jax.nn.sigmoid(-ratio) / temperature
    by_temperature = jnp.clip(slope * jnp.clip(ratio, -largest, largest), -largest, largest)
    by_temperature = jnp.where(slope > 0, by_temperature, 0.0)
    log_step = _log_step(x, temperature)
    return log_step, along(log_step, (slope, -by_temperature), tangents)


def soft_at_least(x: RealLike, threshold: RealLike, temperature: RealLike) -> Array:
    """Return the smooth twin of `x >= threshold` whose limit at the tie is 1, as the hard one's is.

    The logistic is shifted by the root of the temperature, which vanishes with it: a plain logistic stays
    at one half at the tie however small the temperature.
    """
    x, temperature = _floats(x, temperature)
    return _step(x - threshold + jnp.sqrt(temperature), temperature)


def soft_maximum(x: RealLike, y: RealLike, temperature: RealLike) -> Array:
    """Return the smooth twin of `max(x, y)`: a logsumexp of temperature `temperature`.

    Examples:
        >>> float(soft_maximum(3.0, 1e9, temperature=1.0))
        1000000000.0
    """
    x, temperature = _floats(x, temperature)
    return _maximum(x, jnp.asarray(y, jnp.result_type(x, y)), temperature)


@jax.custom_jvp
def _maximum(x: Array, y: Array, temperature: Array) -> Array:
    """Prevents: cancellation between the larger and the difference, and `inf - inf`."""
    gap = jnp.where(x == y, 0.0, x - y)
    return jnp.maximum(x, y) + temperature * _log1p_exp(-jnp.abs(gap / temperature))


@_maximum.defjvp
def _maximum_jvp(primals, tangents):
    x, y, temperature = primals
    gap = jnp.where(x == y, 0.0, x - y)
    z = jnp.abs(_held_ratio(gap, temperature))
    by_temperature = _log1p_exp(-z) + jnp.where(z < _saturation(z), z * logistic(-z), 0.0)
    by_x, by_y = _step(gap, temperature), _step(-gap, temperature)
    return _maximum(x, y, temperature), by_x * tangents[0] + by_y * tangents[1] + by_temperature * tangents[2]


def soft_relu(x: RealLike, temperature: RealLike) -> Array:
    """Return the smooth twin of `max(x, 0)`: `temperature * softplus(x / temperature)`.

    Examples:
        >>> print(soft_relu(0.0, temperature=1.0).round(4))
        0.6931
    """
    x, temperature = _floats(x, temperature)
    return _maximum(x, jnp.zeros_like(x), temperature)


def soft_minimum(x: RealLike, y: RealLike, temperature: RealLike) -> Array:
    """Return the smooth twin of `min(x, y)`: a negated logsumexp of temperature `temperature`.

    Examples:
        >>> print(soft_minimum(3.0, 1e9, temperature=1.0))
        3.0
    """
    x, temperature = _floats(x, temperature)
    return -_maximum(-x, -jnp.asarray(y, jnp.result_type(x, y)), temperature)


def soft_clip(x: RealLike, low: RealLike, high: RealLike, temperature: RealLike) -> Array:
    """Return the smooth twin of `clip(x, low, high)`."""
    return soft_minimum(soft_maximum(x, low, temperature), high, temperature)


def soft_roofline(x: RealLike, y: RealLike, sharpness: float) -> Array:
    """Return `(x**p + y**p)**(1/p)` of times of at least 0: their maximum as `p` grows, their sum at 1.

    Not both are 0. The sharpness is a number, not an array; a whole one costs no logarithm for its powers.
    """
    dtype = jnp.result_type(float, x, y)
    return _roofline(jnp.asarray(x, dtype), jnp.asarray(y, dtype), sharpness)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _roofline(x: Array, y: Array, sharpness: float) -> Array:
    """Prevents: overflow of the powers of nanoseconds, by powers of their ratios, which are at most 1."""
    larger = jnp.maximum(x, y)
    power = 1.0 + (jnp.minimum(x, y) / larger) ** sharpness
    return larger * (jnp.sqrt(power) if sharpness == 2 else jnp.exp(jnp.log(power) / sharpness))


@_roofline.defjvp
def _roofline_jvp(sharpness, primals, tangents):
    x, y = primals
    roofline = _roofline(x, y, sharpness)
    by_x, by_y = ((time / roofline) ** (sharpness - 1) for time in (x, y))
    return roofline, by_x * tangents[0] + by_y * tangents[1]


def soft_excess(x: RealLike, threshold: RealLike, sharpness: float) -> Array:
    """Return `x**p / (x**p + threshold**p)` of positive numbers: from 0 far below a threshold to 1 far above.

    The logistic of `p * log(x / threshold)`. The sharpness is as that of `soft_roofline`.
    """
    dtype = jnp.result_type(float, x, threshold)
    return _excess(jnp.asarray(x, dtype), jnp.asarray(threshold, dtype), sharpness)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _excess(x: Array, threshold: Array, sharpness: float) -> Array:
    """Prevents: overflow of the powers, and `inf / inf` in the slope."""
    power = _power_of_ratio(x, threshold, sharpness)
    return jnp.where(x > threshold, 1.0, power) / (1.0 + power)


@_excess.defjvp
def _excess_jvp(sharpness, primals, tangents):
    x, threshold = primals
    power = _power_of_ratio(x, threshold, sharpness)
    slope = sharpness * power / jnp.square(1.0 + power)
    return _excess(x, threshold, sharpness), slope * (tangents[0] / x - tangents[1] / threshold)


def _power_of_ratio(x: Array, y: Array, sharpness: float) -> Array:
    return (jnp.minimum(x, y) / jnp.maximum(x, y)) ** sharpness


@jax.custom_jvp
def straight_through(hard: RealLike, soft: RealLike) -> Array:
    """Return the value of `hard` with the derivative of `soft`.

    Prevents: the rounding, and the `inf - inf`, of the usual `soft + stop_gradient(hard - soft)`.

    Args:
        hard: what was chosen, `[*batch]`: numbers, or truth values, which become 0 and 1.
        soft: its relaxation, `[*batch]`.

    Examples:
        >>> print(jax.grad(lambda x: straight_through(x > 0, soft_step(x, 1.0)))(0.0))
        0.25
    """
    return jnp.asarray(hard, jnp.result_type(soft))


@straight_through.defjvp
def _straight_through_jvp(primals, tangents):
    hard, soft = primals
    return straight_through(hard, soft), jnp.broadcast_to(tangents[1], jnp.shape(soft))


def log_softmin(
    costs: Float[Array | np.ndarray, "*batch n"],
    temperature: RealLike,
    log_availability: RealLike = 0.0,
) -> Float[Array, "*batch n"]:
    """Return the log-weights of a softmin over the last axis.

    Log-weight = `-cost / temperature + log_availability`, normalised. An entry with an infinite cost
    or a log-availability of minus infinity has log-weight minus infinity; if no entry is possible,
    all have. NaN in, NaN out.

    Prevents: NaN gradients from `inf - inf` at impossible entries, the temperature's included.
    """
    temperature = jnp.broadcast_to(_held(jnp.asarray(temperature)), costs.shape[:-1])[..., None]
    log_availability = jnp.broadcast_to(jnp.asarray(log_availability, costs.dtype), costs.shape)
    possible = ~(jnp.isposinf(costs) | jnp.isneginf(log_availability))
    costs = jnp.where(possible, costs, 0.0)
    log_availability = jnp.where(possible, log_availability, 0.0)
    best = jax.lax.stop_gradient(jnp.min(jnp.where(possible, costs, jnp.inf), -1, keepdims=True))
    best = jnp.where(jnp.isposinf(best), 0.0, best)
    logits = -(costs - best) / temperature + log_availability
    peak = jax.lax.stop_gradient(jnp.max(jnp.where(possible, logits, -jnp.inf), -1, keepdims=True))
    peak = jnp.where(jnp.isneginf(peak), 0.0, peak)
    exponentials = jnp.where(possible, jnp.exp(jnp.where(possible, logits - peak, 0.0)), 0.0)
    total = jnp.sum(exponentials, -1, keepdims=True)
    log_total = peak + jnp.log(jnp.where(total > 0, total, 1.0))
    return jnp.where(possible, logits - log_total, -jnp.inf)


def temperature_from_sd(sd: RealLike) -> RealLike:
    """Return the temperature at which a logistic has standard deviation `sd`: `sd * sqrt(3) / pi`.

    Examples:
        >>> round(float(temperature_from_sd(1.814)), 3)
        1.0
    """
    return sd / LOGISTIC_SD


def _floats(x: RealLike, temperature: RealLike) -> tuple[Array, Array]:
    """Return a value and its temperature as floats of one precision, the temperature held in range."""
    floats = [value for value in (x, temperature) if jnp.issubdtype(jnp.result_type(value), jnp.floating)]
    dtype = jnp.result_type(*floats) if floats else jnp.result_type(float)
    return jnp.asarray(x, dtype), _held(jnp.asarray(temperature, dtype))


def _held(temperature: Array) -> Array:
    """Return a temperature that can be squared and divided by without leaving the floats."""
    if not jnp.issubdtype(temperature.dtype, jnp.floating):
        temperature = temperature.astype(jnp.result_type(float))
    limits = jnp.finfo(temperature.dtype)
    return jnp.clip(temperature, float(limits.tiny) ** 0.25, float(limits.max) ** 0.5)


def _saturation(z: Array) -> float:
    """Return the argument from which on `exp(-z)` counts as nothing."""
    return 0.9 * math.log(float(jnp.finfo(z.dtype).max))


def _held_ratio(x: Array, temperature: Array) -> Array:
    limit = _saturation(x)
    return jnp.clip(x * (1.0 / temperature), -limit, limit)


def _log1p_exp(z: Array) -> Array:
    return jnp.log1p(jnp.exp(z))


@jax.custom_jvp
def _larger(x: RealLike, y: RealLike) -> Array:
    """Prevents: a division in the derivative of a maximum, which costs more than the formulas around it."""
    return jnp.maximum(x, y)


@_larger.defjvp
def _larger_jvp(primals, tangents):
    x, y = primals
    larger = _larger(x, y)
    share = jnp.where(x == y, 0.5, jnp.where(x > y, 1.0, 0.0)).astype(larger.dtype)
    return larger, share * tangents[0] + (1.0 - share) * tangents[1]


@dataclasses.dataclass(frozen=True)
class Exact:
    """The hard choices. Every method ignores the scale of its relaxation."""

    def relu(self, x, scale: RealLike | None = None):
        del scale
        return self.maximum(x, 0.0)

    def maximum(self, x, y, scale: RealLike | None = None):
        del scale
        return _larger(x, y)

    def clip(self, x, low, high, scale: RealLike | None = None):
        del scale
        return jnp.clip(x, low, high)

    def at_least(self, x, threshold, scale: RealLike | None = None):
        del scale
        return jnp.where(jnp.asarray(x) >= threshold, 1.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Smooth:
    """The same choices, relaxed by a temperature in nanoseconds.

    `maximum` compares nanoseconds unless a scale is given. Quantities of another unit are relaxed by
    `temperature / (temperature + scale)`, where `scale` is the cost in nanoseconds that they act on: it
    vanishes with the temperature and stays below 1 however hot it gets.
    """

    temperature_ns: RealLike

    def relu(self, x, scale: RealLike | None = None):
        return soft_relu(x, self._temperature(scale))

    def maximum(self, x, y, scale: RealLike | None = None):
        return soft_maximum(x, y, self._temperature(scale))

    def clip(self, x, low, high, scale: RealLike | None = None):
        return soft_clip(x, low, high, self._temperature(scale))

    def at_least(self, x, threshold, scale: RealLike | None = None):
        return soft_at_least(x, threshold, self._temperature(scale))

    def _temperature(self, scale: RealLike | None) -> RealLike:
        if scale is None:
            return self.temperature_ns
        return self.temperature_ns / (self.temperature_ns + scale)


def rules_at(temperature_ns: RealLike | None) -> Exact | Smooth:
    """Return the hard choices for None, else those of a temperature."""
    return Exact() if temperature_ns is None else Smooth(temperature_ns)
