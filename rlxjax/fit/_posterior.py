"""Posteriors of a machine's latencies, predictions with uncertainty, and the decision which of two runs is faster.

The correction is a factor on predicted times, for effects that a model's terms leave out. The factor's logarithm is a
weighted sum of the model's features. Each variant has its own weights, each with the prior `N(0, CORRECTION_SD**2)`.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rlxjax._numerics import namespace_of, temperature_from_sd
from rlxjax._typing import Code, Nanoseconds, RealLike
from rlxjax._values import by_value

from ._latency_model import Facts, LatencyModel, LatencyPrior, Runs, smallest_run, vector

#: The prior standard deviation of a weight of the correction.
CORRECTION_SD = 0.05
#: The correction's name among the terms of a prediction.
TERM = "correction_ns"
#: The smallest probability with which a verdict is "fuse" or "keep". With a smaller one, the verdict is "undecided".
SURE = 0.9
#: The standard deviation of a coefficient's logarithm between machines, and the share of a correction common to two.
TRANSFERRED_LOG_SD, TRANSFERRED_SHARE = 1.0, 0.7
#: The spread of every variant before any timing: the standard deviation of the residuals of log times.
PRIOR_SPREAD = 0.05


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatencyPosterior:
    """A model's posterior on a machine. The logarithm of a run's time has the distribution `N(log prediction, sd**2)`.

    The unknowns are the coefficients' logarithms, then the correction's weights, variant by variant. The residual of a
    run is the part of its log time that the unknowns do not explain, including timing noise.

    Attributes:
        model: the model of the runs.
        facts: the facts that describe how the machine schedules programs.
        coefficients: the median of each coefficient of the model.
        weights: the correction's weights, `[variants, features]`.
        factor: a lower triangular matrix `L`, `[unknowns, unknowns]`. `L @ L.T` is the covariance of the unknowns.
        spread: standard deviation of each variant's residuals, `[variants]`. The model's `scatter` multiplies it.
        alike: correlation between two variants' residuals at the same work, `[variants, variants]`; None means 0.
    """

    model: LatencyModel = dataclasses.field(metadata={"static": True})
    facts: Facts
    coefficients: Any
    weights: Float[Array, "variants features"] | np.ndarray
    factor: Float[Array, "unknowns unknowns"] | np.ndarray
    spread: Float[Array, "variants"] | np.ndarray
    alike: Float[Array, "variants variants"] | np.ndarray | None = None

    def coefficient_log_sd(self) -> Any:
        """Return the marginal standard deviation of each coefficient's logarithm."""
        leaves, structure = jax.tree.flatten(self.coefficients)
        factor = np.asarray(self.factor)[: len(leaves)]
        return structure.unflatten(np.sqrt(np.sum(factor**2, -1)).tolist())


@by_value
class Estimate(NamedTuple):
    """The predicted times of runs, `[*batch]`, with their uncertainty.

    Attributes:
        time_ns: the predicted time in ns, `[*batch]`.
        scores: `J @ L`, `[*batch, unknowns]`: `J` holds the log prediction's derivatives by the unknowns, and `L` is
            the posterior's `factor`. The dot product of two runs' scores is the covariance of their log predictions.
        spread: standard deviation of each run's residual, `[*batch]`.
    """

    time_ns: Nanoseconds
    scores: Float[Array, "*batch unknowns"]
    spread: Float[Array, "*batch"]

    def log_sd(self) -> Float[Array | np.ndarray, "*batch"]:
        """Return the standard deviation of the logarithm of each run's time, `[*batch]`."""
        xp = namespace_of(self.scores, self.spread)
        return xp.sqrt(xp.sum(self.scores**2, -1) + self.spread**2)


@jax.jit
def corrected_terms_ns(posterior: LatencyPosterior, runs: Runs) -> Mapping[str, Nanoseconds]:
    """Return the predicted terms of runs in ns, by name, `[*batch]`. The term `correction_ns` is the correction."""
    runs = runs.together()
    terms = posterior.model.terms_ns(posterior.coefficients, runs, posterior.facts)
    features = posterior.model.features(runs, posterior.facts)
    factor = jnp.expm1(correction_log_factor(features, posterior.weights, runs.variant))
    total_ns = jnp.asarray(sum(terms.values()))
    # An impossible run takes infinite time, and infinity times a factor of 0 would be NaN.
    parts = {**terms, TERM: jnp.where(jnp.isinf(total_ns), 0.0, total_ns) * factor}
    # JAX would sort the names of a plain dictionary.
    return OrderedDict(zip(parts, jnp.broadcast_arrays(*parts.values()), strict=True))


@jax.jit
def estimate(posterior: LatencyPosterior, runs: Runs) -> Estimate:
    """Predict the times of runs, `[*batch]`, and the uncertainty of the predictions.

    Examples:
        >>> from rlxjax.models import FFT
        >>> found = estimate(prior_posterior(FFT), Runs.checked(FFT, "fft", batch=[64, 4096], n_fft=256))
        >>> found.time_ns.shape, found.scores.shape
        ((2,), (2, 5))
    """
    is_of_one_variant = np.ndim(runs.variant) == 0
    runs = runs.together()
    log_ns, jacobian = log_prediction_and_jacobian(posterior.coefficients, runs, posterior.facts)
    features = jnp.asarray(posterior.model.features(runs, posterior.facts))
    log_factor = correction_log_factor(features, posterior.weights, runs.variant)
    factor, n_variants = jnp.asarray(posterior.factor), len(posterior.model.variants)
    if is_of_one_variant and runs.shape:  # the other variants' weights do not matter
        n_coefficients, n_features = jacobian.shape[-1], features.shape[-1]
        own = factor[n_coefficients:].reshape(n_variants, n_features, len(factor))[jnp.ravel(runs.variant)[0]]
        scores = jacobian @ factor[:n_coefficients] + features @ own
    else:
        scores = jnp.asarray(joint_jacobian(jacobian, features, runs.variant, n_variants)) @ factor
    known = posterior.model.own_log_sd(posterior.coefficients, runs, posterior.facts)
    spread = jnp.asarray(posterior.spread)[runs.variant] * posterior.model.scatter(runs, posterior.facts)
    spread = jnp.hypot(spread, known) if np.ndim(known) else spread
    return Estimate(jnp.exp(log_ns + log_factor), scores, spread)


@jax.jit
def estimate_of_variant(posterior: LatencyPosterior, runs: Runs) -> Estimate:
    """Predict runs of a single variant like `estimate`, but with fewer scores, `[*batch, coefficients]`.

    The scores cover only the coefficients. The spread includes the uncertainty of the correction's weights, which no
    other variant shares: given the coefficients, a fit makes the weights of different variants independent.
    """
    log_ns, jacobian = log_prediction_and_jacobian(posterior.coefficients, runs, posterior.facts)
    # The barrier makes XLA store the features as an array. Recomputing the features in each product is slower.
    features = jax.lax.optimization_barrier(jnp.asarray(posterior.model.features(runs, posterior.facts)))
    log_factor = features @ jnp.asarray(posterior.weights)[runs.variant]
    count, shape, factor = (
        jacobian.shape[-1],
        np.shape(posterior.weights),
        jnp.asarray(posterior.factor),
    )
    by_coefficient = factor[count:, :count].reshape(*shape, count)[runs.variant]
    by_weight = factor[count:, count:].reshape(*shape, *shape)[runs.variant, :, runs.variant]
    scores = jacobian @ factor[:count, :count] + features @ by_coefficient
    spread = jnp.asarray(posterior.spread)[runs.variant] * posterior.model.scatter(runs, posterior.facts)
    known = posterior.model.own_log_sd(posterior.coefficients, runs, posterior.facts)
    variance = jnp.sum((features @ by_weight) ** 2, -1) + spread**2 + jnp.square(known)
    return Estimate(jnp.exp(log_ns + log_factor), scores, jnp.sqrt(variance))


def own_correlation(posterior: LatencyPosterior, one: Code, other: Code) -> RealLike:
    """Return the correlation between the residuals of two variants that do the same work, `[*batch]`.

    `one` and `other` are indices of variants, `[*batch]`. For equal indices, the result is 0, because two runs
    of the same variant do different work.
    """
    if posterior.alike is None:
        return 0.0
    one, other = jnp.asarray(one), jnp.asarray(other)
    return jnp.where(one == other, 0.0, jnp.asarray(posterior.alike)[one, other])


def prior_posterior(
    model: LatencyModel,
    prior: LatencyPrior[Any] | None = None,
    spread: float = PRIOR_SPREAD,
    correction_sd: float = CORRECTION_SD,
    facts: Facts | None = None,
) -> LatencyPosterior:
    """Return the posterior before any timing. The prior gives its coefficients and the weights of its correction.

    The unknowns' covariance is diagonal: `log_sd**2` for logarithms of coefficients, `correction_sd**2` for weights.

    Args:
        model: the model of the runs.
        prior: the prior of the coefficients; by default, `model.prior`.
        spread: the standard deviation of the residuals of every variant.
        correction_sd: the prior standard deviation of each weight of the correction.
        facts: the facts that describe how the machine schedules programs; by default, `model.facts`.

    Examples:
        >>> from rlxjax.models import FFT
        >>> posterior = prior_posterior(FFT, spread=0.1)
        >>> found = estimate(posterior, Runs.checked(FFT, "fft", batch=[64, 4096], n_fft=256))
        >>> bool(jnp.all(found.log_sd() > 0.1))
        True
    """
    prior = model.prior if prior is None else prior
    facts = dict(model.facts if facts is None else facts)
    count = np.shape(model.features(smallest_run(model), facts))[-1]
    known = np.broadcast_to(np.asarray(prior.correction, np.float64), (len(model.variants), count))
    sds = [*map(float, jax.tree.leaves(prior.log_sd)), *[float(correction_sd)] * known.size]
    spreads = np.full(len(model.variants), float(spread))
    return LatencyPosterior(model, facts, prior.median, known, np.diag(sds), spreads)


def transferred_prior(*posteriors: LatencyPosterior) -> LatencyPrior[Any]:
    """Return a prior for a new machine, or for a known machine on another day, from posteriors of known machines.

    Let `m_d` be the logarithm of a coefficient on machine d, from 1 to D. The coefficient's prior has

        median = exp(sum(m_d) / D),   log_sd**2 = (sum((m_d - sum(m_d) / D)**2) + 1) / D.

    `log_sd` is at most the `log_sd` of the model's prior. The new prior's correction is a share of the mean of the
    machines' corrections: 0.7 for a single machine, and closer to 1 for more machines.

    Args:
        *posteriors: posteriors of known machines, all of the same version of the same model.

    Raises:
        ValueError: no posterior is given, or the posteriors differ in model or version.

    Examples:
        >>> from rlxjax.fit import prior_posterior
        >>> from rlxjax.models import FFT
        >>> prior = transferred_prior(prior_posterior(FFT))
        >>> round(prior.median.call_ns), prior.log_sd.call_ns
        (60000, 1.0)
    """
    if len({(one.model.name, one.model.version) for one in posteriors}) != 1:
        raise ValueError("posteriors: expected at least one posterior, all of the same model and version")
    known, count = posteriors[0].model.prior, len(posteriors)
    logs = np.log([vector(one.coefficients) for one in posteriors])
    squares = np.sum((logs - logs.mean(0)) ** 2, 0) + TRANSFERRED_LOG_SD**2
    log_sd = np.minimum(np.sqrt(squares / count), np.asarray(vector(known.log_sd)))
    structure = jax.tree.structure(known.median)
    medians = structure.unflatten(np.exp(logs.mean(0)).tolist())
    return LatencyPrior(medians, structure.unflatten(log_sd.tolist()), mean_correction(posteriors))


def mean_correction(posteriors: Sequence[LatencyPosterior]) -> np.ndarray:
    """Return the expected correction of a new machine: a share of the given machines' mean correction."""
    count = len(posteriors)
    share = count / (count + 1.0 / TRANSFERRED_SHARE - 1.0)
    return share * np.mean([np.asarray(one.weights) for one in posteriors], 0)


def is_candidate(posterior: LatencyPosterior, runs: Runs) -> Bool[Array, "*batch"]:
    """Return, for each run, `[*batch]`, whether its variant gives the requested result. If so, `pick` may choose it."""
    is_same = jnp.asarray(posterior.model.same_result(runs, posterior.facts))
    return jnp.any(is_same & is_own_variant(runs.variant, runs.shape, is_same.shape[-1]), -1)


def predicted_ns(coefficients: Any, runs: Runs, facts: Facts) -> Float[Array, "*batch"]:
    """Return the predicted time of each run in ns, `[*batch]`: the sum of the model's terms, without the correction.

    Examples:
        >>> from rlxjax.models import FFT
        >>> one = Runs.checked(FFT, "fft", batch=64, n_fft=256)
        >>> bool(predicted_ns(FFT.prior.median, one, FFT.facts) > FFT.prior.median.call_ns)
        True
    """
    return jnp.asarray(runs.model.time_ns(coefficients, runs, facts))


def log_prediction_and_jacobian(
    coefficients: Any, runs: Runs, facts: Facts
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch c"]]:
    """Return the logarithm of `predicted_ns`, and its derivatives with respect to the coefficients' logarithms."""
    structure, values = jax.tree.structure(coefficients), vector(coefficients)
    if runs.kernels:  # factors `[*batch]` would not broadcast

        def of_one(factors, run):
            return jnp.log(predicted_ns(structure.unflatten(list(values * factors)), run, facts))

        each = jax.value_and_grad(of_one)
        for _ in runs.shape:
            each = jax.vmap(each, (None, 0))
        return each(jnp.ones_like(values), runs.together())
    # Each run has its own factors of 1, so a single pull-back gives the derivatives of all runs.
    factors = [jnp.ones(runs.shape, values.dtype)] * values.size

    def log_ns(factors):
        own = structure.unflatten([value * factor for value, factor in zip(values, factors, strict=True)])
        return jnp.log(predicted_ns(own, runs, facts))

    log_times, pull_back = jax.vjp(log_ns, factors)
    return log_times, jnp.stack(pull_back(jnp.ones_like(log_times))[0], -1)


def correction_log_factor(
    features: Float[Array, "*batch features"] | np.ndarray,
    weights: Float[Array, "variants features"] | np.ndarray,
    variant: Code,
) -> RealLike:
    """Return the logarithm of each run's correction, `[*batch]`. The correction is a factor on the run's time."""
    xp = namespace_of(features, weights, variant)
    return xp.sum(features * xp.asarray(weights)[variant], -1)


def joint_jacobian(jacobian, features, variant, n_variants: int) -> Float[Array | np.ndarray, "*batch unknowns"]:
    """Return the log prediction's derivatives by all unknowns: coefficients' logarithms, then all variants' weights."""
    xp = namespace_of(jacobian, features, variant)
    is_own = is_own_variant(variant, np.shape(variant), n_variants)
    by_variant = xp.where(is_own[..., None], features[..., None, :], 0.0)
    return xp.concatenate([jacobian, by_variant.reshape(*by_variant.shape[:-2], -1)], axis=-1)


def is_own_variant(variant: Code, shape: tuple[Any, ...], n_variants: int) -> Bool[Array | np.ndarray, "*batch v"]:
    """Return, for each run and each variant, whether the run is of this variant, `[*batch, v]`."""
    xp = namespace_of(variant)
    codes = xp.broadcast_to(xp.asarray(variant), shape)[..., None]
    return codes == np.arange(n_variants, dtype=codes.dtype).reshape(*[1] * len(shape), -1)


@by_value
class Decision(NamedTuple):
    """The decision whether to fuse: a comparison of a run with fusion and a run without fusion, `[*batch]`.

    Attributes:
        fused_ns: predicted time with fusion, in ns.
        kept_ns: predicted time without fusion, in ns.
        margin_ns: `kept_ns - fused_ns`; positive if fusing saves time.
        margin_sd_ns: standard deviation of `margin_ns`.
        probability: probability that the fused run is faster, see `faster_probability`.
        in_domain: whether the workload lies in the range of the measured workloads. None means an unknown range.
    """

    fused_ns: Nanoseconds
    kept_ns: Nanoseconds
    margin_ns: Nanoseconds
    margin_sd_ns: Nanoseconds
    probability: Float[Array, "*batch"]
    in_domain: bool | np.ndarray | Array | None = None

    @property
    def temperature_ns(self) -> Nanoseconds:
        """The temperature in ns at which the sigmoid of `margin_ns` is `probability`."""
        return jnp.asarray(temperature_from_sd(self.margin_sd_ns))

    def verdict(self, sure: float = SURE) -> str | np.ndarray:
        """Return "fuse", "keep" or "undecided" for a single decision, or an array of these words, `[*batch]`, for many.

        Args:
            sure: the smallest probability with which the verdict is "fuse" or "keep"; must be above 0.5.

        Raises:
            ValueError: `sure` is not a probability above 0.5.
        """
        if not 0.5 < sure <= 1.0:
            raise ValueError(f"sure: expected a probability above 0.5, got {sure}")
        probability = np.asarray(self.probability)
        words = np.where(probability >= sure, "fuse", np.where(probability <= 1.0 - sure, "keep", "undecided"))
        return words if words.ndim else str(words)


def faster_probability(margin_ns: RealLike, sd_ns: RealLike) -> RealLike:
    """Return the probability that a margin of time is positive, `[*batch]`, from its standard deviation.

    The distribution is logistic. The probability is 1/2 for a margin of 0, and for an infinite standard deviation.
    """
    xp = namespace_of(margin_ns, sd_ns)
    is_spread = (sd_ns > 0.0) & xp.isfinite(sd_ns)
    log_odds = xp.where(is_spread, margin_ns, 0.0) / temperature_from_sd(xp.where(is_spread, sd_ns, 1.0))
    probability = jax.nn.sigmoid(log_odds) if xp is jnp else 0.5 + 0.5 * np.tanh(0.5 * log_odds)
    return xp.where(sd_ns == 0.0, 0.5 + 0.5 * xp.sign(margin_ns), probability)


@jax.jit
def compare(fused: Estimate, kept: Estimate, alike: RealLike = 0.0) -> Decision:
    """Compare two runs on a machine, `[*batch]`. An error common to both estimates cancels out.

    Args:
        fused: the estimate of the run with fusion.
        kept: the estimate of the run without fusion.
        alike: the correlation between the residuals of the two runs, from -1 to 1; see `own_correlation`.

    Examples:
        >>> from rlxjax.fit import Runs, estimate, prior_posterior
        >>> from rlxjax.models import FFT
        >>> posterior = prior_posterior(FFT)
        >>> small, large = (estimate(posterior, Runs.checked(FFT, "fft", batch=b, n_fft=256)) for b in (1, 10**6))
        >>> bool(compare(fused=small, kept=large).probability > 0.5)
        True
    """
    margin_ns = kept.time_ns - fused.time_ns
    shared = kept.time_ns[..., None] * kept.scores - fused.time_ns[..., None] * fused.scores
    kept_own, fused_own = kept.time_ns * kept.spread, fused.time_ns * fused.spread
    # This form of `kept_own**2 + fused_own**2 - 2 alike kept_own fused_own` cannot become negative by rounding.
    own = (kept_own - fused_own) ** 2 + 2.0 * (1.0 - alike) * kept_own * fused_own
    sd_ns = jnp.sqrt(jnp.sum(shared**2, -1) + own)
    probability: Any = faster_probability(margin_ns, sd_ns)
    return Decision(fused.time_ns, kept.time_ns, margin_ns, sd_ns, probability)
