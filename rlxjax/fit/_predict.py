"""What the terms of a model predict, and how that depends on the coefficients: traced code."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._model import Facts, Runs
from ._names import vector


def predicted_ns(coefficients: Any, runs: Runs, facts: Facts) -> Float[Array, "*batch"]:
    """Return the sum of a model's terms in ns, `[*batch]`: the prediction of each run.

    Args:
        coefficients: of the runs' model.
        runs: scalars or `[*batch]`.
        facts: how the machine schedules.

    Examples:
        >>> from rlxjax.models import FFT
        >>> one = Runs.checked(FFT, "fft", batch=64, n_fft=256)
        >>> bool(predicted_ns(FFT.prior.median, one, FFT.facts) > FFT.prior.median.call_ns)
        True
    """
    return functools.reduce(jnp.add, map(jnp.asarray, runs.model.terms_ns(coefficients, runs, facts).values()))


def log_prediction_and_jacobian(
    coefficients: Any, runs: Runs, facts: Facts
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch c"]]:
    """Return the logarithm of the terms' prediction, and its derivatives by those of the coefficients."""
    structure = jax.tree.structure(coefficients)
    logs = jnp.log(vector(coefficients))
    # Every run has coefficients of its own, so that one pull-back gives all the derivatives.
    columns = jnp.broadcast_to(logs.reshape(-1, *[1] * len(runs.shape)), (logs.size, *runs.shape))

    def log_ns(columns):
        return jnp.log(predicted_ns(structure.unflatten(list(jnp.exp(columns))), runs, facts))

    values, pull_back = jax.vjp(log_ns, columns)
    return values, jnp.moveaxis(pull_back(jnp.ones_like(values))[0], 0, -1)
