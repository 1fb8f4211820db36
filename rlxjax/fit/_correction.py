"""The correction: what the terms of a model miss, a small smooth factor that is log-linear in its features.

Each variant has its own weights, each with the prior `N(0, CORRECTION_SD**2)`.
"""

import numpy as np
from jaxtyping import Array, Float

from rlxjax._numerics import namespace_of
from rlxjax._typing import Code, RealLike

from ._model import Facts, LatencyModel, Runs

#: Prior standard deviation of a weight: the correction is meant to be small, and to change little.
CORRECTION_SD = 0.05
#: What the correction is called among the parts of a prediction.
TERM = "correction_ns"


def weight_shape(model: LatencyModel, facts: Facts) -> tuple[int, int]:
    """Return the shape of the weights, `(variants, features)`."""
    least = {name: max(entry.least, 1.0) for name, entry in model.inputs.items()}
    features = model.features(Runs(model, 0, least), facts)
    return len(model.variants), np.shape(features)[-1]


def correction_log_factor(
    features: Float[Array, "*batch features"] | np.ndarray,
    weights: Float[Array, "variants features"] | np.ndarray,
    variant: Code,
) -> RealLike:
    """Return the logarithm of what the correction multiplies predictions by, `[*batch]`."""
    xp = namespace_of(features, weights, variant)
    return xp.sum(features * xp.asarray(weights)[variant], -1)


def joint_jacobian(jacobian, features, variant, n_variants: int) -> Float[Array | np.ndarray, "*batch unknowns"]:
    """Return the derivatives by the coefficients' logarithms, then by the weights of every variant."""
    xp = namespace_of(jacobian, features, variant)
    variant = xp.asarray(variant)
    own = variant[..., None] == np.arange(n_variants, dtype=variant.dtype).reshape(*[1] * variant.ndim, -1)
    by_variant = xp.where(own[..., None], features[..., None, :], 0.0)
    return xp.concatenate([jacobian, by_variant.reshape(*by_variant.shape[:-2], -1)], axis=-1)
