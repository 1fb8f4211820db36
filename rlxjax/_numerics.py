"""Smooth functions and safe gradients. "Prevents" in a docstring names what goes wrong with a simpler formula.

The smooth form of a choice has a temperature `T`. In the limit `T -> 0`, it equals the hard choice.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._checks import check_at_least, check_positive, check_real
from ._typing import RealLike

#: The standard deviation of a logistic distribution of temperature 1.
LOGISTIC_SD = math.pi / math.sqrt(3.0)


def namespace_of(*arguments: Any) -> ModuleType:
    """Return `jax.numpy` if an argument is a JAX array, else `numpy`. NumPy compiles nothing."""
    return jnp if any(isinstance(argument, jax.Array) for argument in arguments) else np


def times(count: RealLike, rate: RealLike) -> Array:
    """Return `count * rate`; the product is 0 for a count of 0 and an infinite rate.

    Prevents: NaN from `0 * inf`. Prevents also that XLA fuses the product with a following sum and rounds only once;
    eager and jitted decisions would then differ. The added zero prevents this rounding if the count is a constant.
    """
    zero = 0.0 * jnp.where(jnp.isfinite(rate), rate, 0.0)
    product = jnp.asarray(count * rate) + zero
    return jnp.where(jnp.asarray(count) == 0, jnp.zeros_like(product), product)


def dot(counts: Sequence[RealLike], rates: Sequence[RealLike]) -> Array:
    """Return the sum over all counts of the count times its rate, `[*batch]`."""
    dtype = jnp.result_type(*counts, *rates)
    return _dot(*([jnp.asarray(factor, dtype) for factor in factors] for factors in (counts, rates)))


@jax.custom_jvp
def _dot(counts: list[Array], rates: list[Array]) -> Array:
    """Return `dot` of arrays. The derivative by a count with an infinite rate is 0. Prevents: NaN as the derivative."""
    # The selection in the last line prevents a fused rounding, as the selection in `times` does.
    *products, last = map(times, counts, rates)
    total = functools.reduce(jnp.add, products, jnp.zeros((), last.dtype))
    return jnp.where(jnp.isnan(total), total, total + last)


@_dot.defjvp
def _dot_jvp(primals, tangents):
    counts, rates = primals
    slopes = [jnp.where(jnp.isinf(rate), 0.0, rate) for rate in rates]
    changes = map(jnp.multiply, [*counts, *slopes], [*tangents[1], *tangents[0]])
    return _dot(counts, rates), functools.reduce(jnp.add, changes)


def logistic(x: RealLike) -> Array:
    """Return `1 / (1 + exp(-x))`."""
    tail = _tail(x)
    return jnp.where(jnp.signbit(tail), 1.0 + tail, tail)


@jax.custom_jvp
def _tail(x: RealLike) -> Array:
    """Return the logistic of `x`, `p`, if `x` is at most 0. Otherwise return `p - 1`.

    Prevents: a derivative `p * (1 - p)` that is exactly zero in float32 for `x` of 17 or more.
    """
    return 1.0 / (jnp.where(x > 0, -1.0, 1.0) * (1.0 + jnp.exp(jnp.abs(x))))


@_tail.defjvp
def _tail_jvp(primals, tangents):
    tail = _tail(*primals)
    return tail, jnp.abs(tail) * (1.0 - jnp.abs(tail)) * tangents[0]


def log_odds(x: RealLike, temperature: RealLike) -> Array:
    """Return `x / temperature`, clipped. Prevents: an infinite quotient, and NaN as the temperature's derivative."""
    x, temperature = _floats(x, temperature)
    most = 0.5 * float(jnp.finfo(x.dtype).max) ** 0.5 * temperature
    held = jnp.clip(x, -most, most)
    return straight_through(held, jnp.broadcast_to(x, held.shape)) / temperature


def soft_step(x: RealLike, temperature: RealLike) -> Array:
    """Return the smooth form of `x >= 0`: the logistic of `x / temperature`.

    Args:
        x: the numbers to compare with 0, `[*batch]`.
        temperature: positive, in the unit of `x`.

    Raises:
        ValueError: `temperature` is not positive.

    Examples:
        >>> print(soft_step(0.0, 2.0))
        0.5
    """
    check_positive(temperature, "temperature")
    return logistic(log_odds(x, temperature))


def log_soft_step(x: RealLike, temperature: RealLike) -> Array:
    """Return the logarithm of `soft_step`, without underflow if `x` is very negative."""
    return jax.nn.log_sigmoid(log_odds(x, temperature))


def soft_maximum(x: RealLike, y: RealLike, temperature: RealLike) -> Array:
    """Return the smooth form of `max(x, y)`: `temperature * log(exp(x / temperature) + exp(y / temperature))`.

    Args:
        x: the first number, `[*batch]`.
        y: the second number, `[*batch]`.
        temperature: positive, in the unit of `x` and `y`.

    Raises:
        ValueError: `temperature` is not positive.

    Examples:
        >>> float(soft_maximum(3.0, 1e9, temperature=1.0))
        1000000000.0
    """
    check_positive(temperature, "temperature")
    check_real(y=y)
    x, temperature = _floats(x, temperature)
    return _maximum(x, jnp.asarray(y, jnp.result_type(x, y)), temperature)


@jax.custom_jvp
def _maximum(x: Array, y: Array, temperature: Array) -> Array:
    """Return `soft_maximum` of arrays. Prevents: NaN from `inf - inf`, and lost digits if `x` and `y` are large."""
    odds = log_odds(_gap(x, y), temperature)
    return jnp.maximum(x, y) + temperature * jnp.log1p(jnp.exp(-jnp.abs(odds)))


@_maximum.defjvp
def _maximum_jvp(primals, tangents):
    """Return the value and its change. The derivative with respect to the temperature is the entropy of the choice."""
    x, y, temperature = primals
    odds = log_odds(_gap(x, y), temperature)
    entropy = jnp.log1p(jnp.exp(-jnp.abs(odds))) + jnp.abs(odds) * logistic(-jnp.abs(odds))
    change = logistic(odds) * tangents[0] + logistic(-odds) * tangents[1] + entropy * tangents[2]
    return _maximum(x, y, temperature), change


def _gap(x: Array, y: Array) -> Array:
    return jnp.where(x == y, 0.0, x - y)


def soft_relu(x: RealLike, temperature: RealLike) -> Array:
    """Return the smooth form of `max(x, 0)`: `temperature * softplus(x / temperature)`.

    The arguments and errors are those of `soft_maximum`.

    Examples:
        >>> print(soft_relu(0.0, temperature=1.0).round(4))
        0.6931
    """
    return soft_maximum(x, 0.0, temperature)


def soft_minimum(x: RealLike, y: RealLike, temperature: RealLike) -> Array:
    """Return the smooth form of `min(x, y)`. The arguments and errors are those of `soft_maximum`.

    Examples:
        >>> print(soft_minimum(3.0, 1e9, temperature=1.0))
        3.0
    """
    check_real(x=x, y=y)
    return -soft_maximum(-jnp.asarray(x), -jnp.asarray(y), temperature)


def soft_roofline(x: RealLike, y: RealLike, sharpness: float) -> Array:
    """Return `(x**p + y**p)**(1/p)` for two times, not both 0: the sum if `p = 1`, about the larger if `p` is large."""
    dtype = jnp.result_type(float, x, y)
    return _roofline(jnp.asarray(x, dtype), jnp.asarray(y, dtype), sharpness)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _roofline(x: Array, y: Array, sharpness: float) -> Array:
    """Prevents: overflow of powers of times in ns. The formula takes powers of ratios, which are at most 1."""
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
    """Return `x**p / (x**p + threshold**p)` for positive numbers, without overflow. It rises from 0 to 1 with `x`."""
    dtype = jnp.result_type(float, x, threshold)
    x, threshold = jnp.asarray(x, dtype), jnp.asarray(threshold, dtype)
    return logistic(sharpness * (jnp.log(x) - jnp.log(threshold)))


@jax.custom_jvp
def straight_through(hard: RealLike, soft: RealLike) -> Array:
    """Return the value of `hard` with the derivative of `soft`.

    Prevents: the rounding errors and the `inf - inf` of the usual formula `soft + stop_gradient(hard - soft)`.

    Args:
        hard: the chosen values, `[*batch]`: numbers, or booleans, which become 0 and 1.
        soft: the smooth form of the chosen values, `[*batch]`.

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
    costs: Float[Array | np.ndarray, "*batch n"], temperature: RealLike, log_availability: RealLike = 0.0
) -> Float[Array, "*batch n"]:
    """Return log-weights over the last axis: `-cost / temperature + log_availability`, normalised.

    An entry with an infinite cost or a log-availability of minus infinity has the log-weight minus infinity, even if
    the row has no other entry. NaN gives NaN. Prevents: NaN gradients from `inf - inf`.
    """
    temperature = jnp.broadcast_to(_held(jnp.asarray(temperature)), costs.shape[:-1])[..., None]
    log_availability = jnp.broadcast_to(jnp.asarray(log_availability, costs.dtype), costs.shape)
    possible = ~(jnp.isposinf(costs) | jnp.isneginf(log_availability))
    costs = jnp.where(possible, costs, 0.0)
    log_availability = jnp.where(possible, log_availability, 0.0)
    best = jax.lax.stop_gradient(jnp.min(jnp.where(possible, costs, jnp.inf), -1, keepdims=True))
    best = jnp.where(jnp.isposinf(best), 0.0, best)
    logits = -(costs - best) / temperature + log_availability
    impossible = jnp.where(jnp.any(possible, -1, keepdims=True), -jnp.inf, 0.0)
    return jnp.where(possible, jax.nn.log_softmax(jnp.where(possible, logits, impossible)), -jnp.inf)


def temperature_from_sd(sd: RealLike) -> RealLike:
    """Return the temperature of the logistic distribution whose standard deviation is `sd`: `sd * sqrt(3) / pi`.

    Args:
        sd: the standard deviation, `[*batch]`.

    Raises:
        ValueError: `sd` is negative or NaN.

    Examples:
        >>> round(float(temperature_from_sd(1.814)), 3)
        1.0
    """
    check_at_least(sd, "sd", 0, "standard deviation", most=math.inf)
    return sd / LOGISTIC_SD


def _floats(x: RealLike, temperature: RealLike) -> tuple[Array, Array]:
    """Return a value and its temperature as floats of the same precision; `_held` clips the temperature."""
    check_real(x=x)
    floats = [value for value in (x, temperature) if jnp.issubdtype(jnp.result_type(value), jnp.floating)]
    dtype = jnp.result_type(*floats) if floats else jnp.result_type(float)
    return jnp.asarray(x, dtype), _held(jnp.asarray(temperature, dtype))


def _held(temperature: Array) -> Array:
    """Return a temperature as a float, clipped so that its square and its inverse are finite and positive."""
    if not jnp.issubdtype(temperature.dtype, jnp.floating):
        temperature = temperature.astype(jnp.result_type(float))
    limits = jnp.finfo(temperature.dtype)
    return jnp.clip(temperature, float(limits.tiny) ** 0.25, float(limits.max) ** 0.5)


@dataclasses.dataclass(frozen=True)
class Choices:
    """Four kinds of choice: hard if the temperature is None, else smooth. In this way, one formula serves both cases.

    A quantity whose unit is not ns has the temperature `temperature_ns / (temperature_ns + scale)`; `scale` is the cost
    in ns that the quantity affects. `jnp.maximum` would be slow, because its derivative divides row by row.
    """

    temperature_ns: RealLike | None = None

    def relu(self, x, scale: RealLike | None = None):
        return 0.5 * (x + jnp.abs(x)) if self.temperature_ns is None else soft_relu(x, self._temperature(scale))

    def maximum(self, x, y, scale: RealLike | None = None):
        if self.temperature_ns is None:
            return jnp.where(y > x, y, x)
        return soft_maximum(x, y, self._temperature(scale))

    def clip(self, x, low, high, scale: RealLike | None = None):
        if self.temperature_ns is None:
            return jnp.clip(x, low, high)
        temperature = self._temperature(scale)
        return soft_minimum(soft_maximum(x, low, temperature), high, temperature)

    def at_least(self, x, threshold, scale: RealLike | None = None):
        if self.temperature_ns is None:
            return jnp.where(jnp.asarray(x) >= threshold, 1.0, 0.0)
        # The shift by the square root of the temperature makes the limit 1 at a tie, as in the hard choice.
        x, temperature = _floats(x, self._temperature(scale))
        return soft_step(x - threshold + jnp.sqrt(temperature), temperature)

    def _temperature(self, scale: RealLike | None) -> Any:
        known: Any = self.temperature_ns
        return known if scale is None else known / (known + scale)
