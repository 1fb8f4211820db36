"""Coefficients by name, units in the names, and what is believed of them before timings: log-normal priors."""

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rlxjax._values import by_value

C = TypeVar("C")

#: A log-sd of 2 lets timings move a coefficient by a factor of 50.
WIDE_LOG_SD = 2.0


def unit_of(name: str) -> str:
    """Return the unit of a coefficient, as its name says.

    Examples:
        >>> unit_of("upload_bytes_per_ns"), unit_of("host_parallel_gain")
        ('bytes/ns', '1')
    """
    for suffix, unit in (
        ("bytes_per_ns", "bytes/ns"),
        ("flop_per_ns", "FLOP/ns"),
        ("steps_per_ns", "steps/ns"),
        ("_ns", "ns"),
        ("_bytes", "bytes"),
        ("_rows", "rows"),
    ):
        if name.endswith(suffix):
            return unit
    return "1"


def coefficient_names(coefficients: Any) -> list[str]:
    """Return the names of coefficients in the order of their leaves: of a dataclass its fields, of a dict its keys.

    Examples:
        >>> coefficient_names({"b_ns": 1.0, "a_ns": 2.0})
        ['a_ns', 'b_ns']
    """
    paths = jax.tree_util.tree_leaves_with_path(coefficients)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def named(coefficients: Any) -> Mapping[str, Any]:
    """Return coefficients by name."""
    return dict(zip(coefficient_names(coefficients), jax.tree.leaves(coefficients), strict=True))


def vector(coefficients: Any) -> Float[Array, "c"]:
    """Return coefficients as one vector, in the order of their names."""
    return jnp.stack([jnp.asarray(leaf, jnp.result_type(float)) for leaf in jax.tree.leaves(coefficients)])


@by_value
class LatencyPrior(NamedTuple, Generic[C]):
    """What is believed before timings: a log-normal prior of every coefficient, and of the correction.

    Attributes:
        median: of the coefficients: a dictionary or dataclass of floats.
        log_sd: standard deviation of each coefficient's logarithm, of the same structure.
        correction: prior mean of the correction's weights, `[variants, features]`, or 0 for none; the terms
            alone have no use for it.
    """

    median: C
    log_sd: C
    correction: Float[np.ndarray, "variants features"] | float = 0.0


def wide_prior(median: C, **narrower: float) -> LatencyPrior[C]:
    """Return the prior that knows each coefficient's order of magnitude and no more.

    Args:
        median: of the coefficients.
        **narrower: standard deviations of the logarithms of some of them, by name.

    Examples:
        >>> wide_prior({"call_ns": 1e4, "bytes_per_ns": 10.0}, call_ns=0.5).log_sd
        {'bytes_per_ns': 2.0, 'call_ns': 0.5}
    """
    names = coefficient_names(median)
    sds = [narrower.get(name, WIDE_LOG_SD) for name in names]
    return LatencyPrior(median, jax.tree.structure(median).unflatten(sds))


def check_prior(prior: LatencyPrior) -> None:
    """Check that medians and standard deviations are positive and finite."""
    for part in ("median", "log_sd"):
        for name, value in named(getattr(prior, part)).items():
            numbers = np.asarray(value, np.float64)
            if not np.all(np.isfinite(numbers) & (numbers > 0)):
                raise ValueError(f"prior.{part}.{name}: expected positive finite numbers, got {value}")
