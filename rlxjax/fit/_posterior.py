"""What is known of a machine's latencies, and how surely: coefficients, the correction, and their covariance."""

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rlxjax._typing import Nanoseconds, RealLike
from rlxjax._values import by_value

from ._correction import CORRECTION_SD, TERM, correction_log_factor, joint_jacobian, weight_shape
from ._model import Facts, LatencyModel, Runs
from ._names import vector
from ._predict import log_prediction_and_jacobian
from ._prior import LatencyPrior

#: The spread of the runs of every variant before any was timed.
PRIOR_SPREAD = 0.05
#: What one machine says of another: a standard deviation of the logarithm of coefficients, and the share of
#: the correction that is expected there too; `benchmarks/population_prior.py` judges both.
TRANSFERRED_LOG_SD, TRANSFERRED_SHARE = 1.0, 0.7


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatencyPosterior:
    """The calibrated latency of a model's runs, and how sure it is: `log time ~ N(log prediction, sd**2)`.

    The unknowns are the logarithms of the coefficients, then the weights of the correction by variant.

    Attributes:
        model: whose runs they are.
        facts: how the machine schedules.
        coefficients: of the model.
        weights: of the correction, `[variants, features]`.
        factor: lower triangular `L` with `L @ L.T` the covariance of the unknowns, `[unknowns, unknowns]`.
        spread: standard deviation of the logarithm of what a workload takes beyond all that the unknowns
            explain, timing noise included, by variant, `[variants]`.
    """

    model: LatencyModel = dataclasses.field(metadata={"static": True})
    facts: Facts
    coefficients: Any
    weights: Float[Array, "variants features"] | np.ndarray
    factor: Float[Array, "unknowns unknowns"] | np.ndarray
    spread: Float[Array, "variants"] | np.ndarray

    def coefficient_log_sd(self) -> Any:
        """Return the standard deviation of each coefficient's logarithm, whatever the correction is."""
        leaves, structure = jax.tree.flatten(self.coefficients)
        factor = np.asarray(self.factor)[: len(leaves)]
        return structure.unflatten(np.sqrt(np.sum(factor**2, -1)).tolist())


@by_value
class LatencyEstimate(NamedTuple):
    """What a posterior says of runs, `[*batch]`.

    Attributes:
        time_ns: the prediction.
        scores: derivatives of its logarithm by the unknowns, times `L`: `[*batch, unknowns]`. The product
            of two runs' scores is the covariance of their logarithms.
        spread: standard deviation of the logarithm that is a run's own.
    """

    time_ns: Nanoseconds
    scores: Float[Array, "*batch unknowns"]
    spread: Float[Array, "*batch"]

    def log_sd(self) -> Float[Array, "*batch"]:
        """Return the standard deviation of the logarithm of a new workload's time."""
        return jnp.sqrt(jnp.sum(jnp.asarray(self.scores) ** 2, -1) + jnp.asarray(self.spread) ** 2)


def corrected_terms_ns(posterior: LatencyPosterior, runs: Runs) -> Mapping[str, Nanoseconds]:
    """Return the parts of runs' predicted latency in ns, the correction among them, `[*batch]` each.

    Args:
        posterior: of the machine.
        runs: of its model.
    """
    return _corrected_terms_ns(posterior, runs)


@jax.jit
def _corrected_terms_ns(posterior: LatencyPosterior, runs: Runs) -> OrderedDict[str, Nanoseconds]:
    runs = runs.together()
    terms = posterior.model.terms_ns(posterior.coefficients, runs, posterior.facts)
    features = posterior.model.features(runs, posterior.facts)
    factor = jnp.expm1(correction_log_factor(features, posterior.weights, runs.variant))
    total_ns = jnp.asarray(sum(terms.values()))
    # What cannot be is infinite, whatever its correction says.
    parts = {**terms, TERM: jnp.where(jnp.isinf(total_ns), 0.0, total_ns) * factor}
    # Of a plain dictionary JAX would sort the names.
    return OrderedDict(zip(parts, jnp.broadcast_arrays(*parts.values()), strict=True))


@jax.jit
def estimate(posterior: LatencyPosterior, runs: Runs) -> LatencyEstimate:
    """Return the estimate of runs, `[*batch]`.

    Args:
        posterior: of the machine.
        runs: of its model.

    Examples:
        >>> from rlxjax.models import FFT
        >>> found = estimate(prior_posterior(FFT), Runs.checked(FFT, "fft", batch=[64, 4096], n_fft=256))
        >>> found.time_ns.shape, found.scores.shape
        ((2,), (2, 5))
    """
    runs = runs.together()
    log_ns, jacobian = log_prediction_and_jacobian(posterior.coefficients, runs, posterior.facts)
    features = jnp.asarray(posterior.model.features(runs, posterior.facts))
    log_factor = correction_log_factor(features, posterior.weights, runs.variant)
    unknowns = joint_jacobian(jacobian, features, runs.variant, len(posterior.model.variants))
    scores = jnp.asarray(unknowns) @ jnp.asarray(posterior.factor)
    return LatencyEstimate(jnp.exp(log_ns + log_factor), scores, jnp.asarray(posterior.spread)[runs.variant])


def prior_posterior(
    model: LatencyModel,
    prior: LatencyPrior[Any] | None = None,
    spread: float = PRIOR_SPREAD,
    correction_sd: float = CORRECTION_SD,
    facts: Facts | None = None,
) -> LatencyPosterior:
    """Return what is known before any timing: the medians of the prior, and its correction.

    Their covariance is diagonal: `log_sd**2` of coefficients' logarithms, `correction_sd**2` of weights.

    Args:
        model: of the runs.
        prior: of the coefficients; the model's own unless given.
        spread: that the runs of every variant are expected to have.
        correction_sd: prior standard deviation of the correction's weights.
        facts: how the machine schedules; the model's own unless given.

    Examples:
        >>> from rlxjax.models import FFT
        >>> posterior = prior_posterior(FFT, spread=0.1)
        >>> found = estimate(posterior, Runs.checked(FFT, "fft", batch=[64, 4096], n_fft=256))
        >>> bool(jnp.all(found.log_sd() > 0.1))
        True
    """
    prior = model.prior if prior is None else prior
    facts = dict(model.facts if facts is None else facts)
    known = prior_weights(model, prior, facts)
    sds = prior_sds(prior, known.size, correction_sd)
    spreads = np.full(len(model.variants), float(spread))
    return LatencyPosterior(model, facts, prior.median, known, np.diag(sds), spreads)


def transferred_prior(*posteriors: LatencyPosterior) -> LatencyPrior[Any]:
    """Return what the calibrations of some machines say of another, or of one on another day.

    With `m_d` the logarithm of a coefficient on machine d of D,

        median = exp(sum(m_d) / D),   log_sd**2 = (sum((m_d - sum(m_d) / D)**2) + 1) / D

    which is the likeliest mean, and a variance that one machine alone leaves at 1; no larger than the model's own
    prior has it. What the terms miss belongs to the programs as well as to the machine, so that most of the correction
    is expected there too: of one machine's 0.7, of several ones' mean more.

    Args:
        *posteriors: of the other machines, of one model and one version of it.

    Raises:
        ValueError: no posterior, or posteriors of different models.

    References:
        A. Gelman et al., Bayesian Data Analysis, 3rd edition, 2013, chapter 5.

    Examples:
        >>> from rlxjax.models import FFT
        >>> prior = transferred_prior(prior_posterior(FFT))
        >>> round(prior.median.call_ns), prior.log_sd.call_ns
        (60000, 1.0)
    """
    if len({(one.model.name, one.model.version) for one in posteriors}) != 1:
        raise ValueError("posteriors: expected one at least, all of one model")
    known, count = posteriors[0].model.prior, len(posteriors)
    logs = np.log([vector(one.coefficients) for one in posteriors])
    squares = np.sum((logs - logs.mean(0)) ** 2, 0) + TRANSFERRED_LOG_SD**2
    log_sd = np.minimum(np.sqrt(squares / count), np.asarray(vector(known.log_sd)))
    structure = jax.tree.structure(known.median)
    share = count / (count + 1.0 / TRANSFERRED_SHARE - 1.0)
    return LatencyPrior(
        structure.unflatten(np.exp(logs.mean(0)).tolist()),
        structure.unflatten(log_sd.tolist()),
        share * np.mean([np.asarray(one.weights) for one in posteriors], 0),
    )


def prior_sds(prior: LatencyPrior, n_weights: int, correction_sd: RealLike = CORRECTION_SD) -> np.ndarray:
    """Return the standard deviations of the unknowns, `[unknowns]`."""
    return np.concatenate([np.asarray(vector(prior.log_sd)), np.full(n_weights, float(correction_sd))])


def prior_weights(model: LatencyModel, prior: LatencyPrior, facts: Facts) -> np.ndarray:
    """Return the prior mean of the correction's weights, `[variants, features]`."""
    return np.broadcast_to(np.asarray(prior.correction, np.float64), weight_shape(model, facts))
