"""Posteriors of a machine's latencies, predictions with uncertainty, and the decision which of two runs is faster.

The correction is a factor that covers effects outside a model's terms. The factor's logarithm is linear in the model's
features. Each variant has its own weights, each with the prior `N(0, CORRECTION_SD**2)`.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rlxjax._checks import is_traced
from rlxjax._numerics import namespace_of, temperature_from_sd
from rlxjax._typing import Code, Nanoseconds, RealLike
from rlxjax._values import by_value

from ._latency_model import Facts, LatencyModel, LatencyPrior, Runs, vector
from ._lists import as_lists

#: The prior standard deviation of a weight of the correction.
CORRECTION_SD = 0.05
#: The correction's name among the terms of a prediction.
TERM = "correction_ns"
#: The smallest probability of a decision. With a smaller probability, the verdict is "undecided".
SURE = 0.9
#: The log standard deviation of a coefficient between two machines, and the share of a correction common to both.
TRANSFERRED_LOG_SD, TRANSFERRED_SHARE = 1.0, 0.7
#: Entries of a factor up to this number times `CORRECTION_SD` count as 0.
ROUNDING = 1e-9
#: The spread of every variant's runs before any timing.
PRIOR_SPREAD = 0.05


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatencyPosterior:
    """A model's latencies on a machine, with uncertainty: `log time ~ N(log prediction, sd**2)`.

    The unknowns are the logarithms of the coefficients, then the weights of the correction by variant. The residual of
    a run is the part of its log time that the unknowns do not explain, including timing noise.

    Attributes:
        model: the model of the runs.
        facts: the machine's scheduling facts.
        coefficients: the model's coefficients.
        weights: the correction's weights, `[variants, features]`.
        factor: lower triangular `L`; `L @ L.T` is the covariance of the unknowns, `[unknowns, unknowns]`.
        spread: standard deviation of the residual by variant, `[variants]`, before the model's factor `scatter`.
        alike: correlation of the residuals of variants that do the same work, `[variants, variants]`; None means 0.
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
class LatencyEstimate(NamedTuple):
    """A posterior's prediction of runs, `[*batch]`.

    Attributes:
        time_ns: the predicted time in ns, `[*batch]`.
        scores: `J @ L`, with `J` the derivatives of the log prediction with respect to the unknowns, `[*batch,
            unknowns]`. The dot product of the scores of two runs is the covariance of their log predictions.
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
    """Return the predicted terms of runs, and the correction as a term, in ns by name, `[*batch]` each."""
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
def estimate(posterior: LatencyPosterior, runs: Runs) -> LatencyEstimate:
    """Predict the times of runs with uncertainty, `[*batch]`.

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
    return LatencyEstimate(jnp.exp(log_ns + log_factor), scores, spread)


@jax.jit
def estimate_of_variant(posterior: LatencyPosterior, runs: Runs) -> LatencyEstimate:
    """Predict runs like `estimate`, with fewer scores, for a posterior with `has_separate_weights`.

    All runs have the same variant. The scores cover only the coefficients, `[*batch, coefficients]`. The spread
    includes the uncertainty of the weights, because no other variant shares these weights.
    """
    log_ns, jacobian = log_prediction_and_jacobian(posterior.coefficients, runs, posterior.facts)
    # The barrier makes XLA store the features as an array. Recomputing the features in each product is slower.
    features = jax.lax.optimization_barrier(jnp.asarray(posterior.model.features(runs, posterior.facts)))
    log_factor = features @ jnp.asarray(posterior.weights)[runs.variant]
    count, shape, factor = jacobian.shape[-1], np.shape(posterior.weights), jnp.asarray(posterior.factor)
    by_coefficient = factor[count:, :count].reshape(*shape, count)[runs.variant]
    by_weight = factor[count:, count:].reshape(*shape, *shape)[runs.variant, :, runs.variant]
    scores = jacobian @ factor[:count, :count] + features @ by_coefficient
    spread = jnp.asarray(posterior.spread)[runs.variant] * posterior.model.scatter(runs, posterior.facts)
    variance = jnp.sum((features @ by_weight) ** 2, -1) + spread**2
    return LatencyEstimate(jnp.exp(log_ns + log_factor), scores, jnp.sqrt(variance))


def has_separate_weights(posterior: LatencyPosterior) -> bool:
    """Return whether the weights of different variants are independent of each other, given the coefficients.

    This is so after a fit, but not after `condition` with a time of several runs. The result is False for tracers.
    """
    if is_traced(*jax.tree.leaves(posterior)):
        return False
    factor, shape = np.asarray(posterior.factor), np.shape(posterior.weights)
    count = len(factor) - np.size(posterior.weights)
    blocks = factor[count:, count:].reshape(*shape, *shape)
    others = np.moveaxis(blocks, 2, 1)[~np.eye(shape[0], dtype=bool)]
    return bool(np.all(np.abs(others) <= ROUNDING * CORRECTION_SD))


def own_correlation(posterior: LatencyPosterior, one: Code, other: Code) -> RealLike:
    """Return the correlation between the residuals of two variants that do the same work, `[*batch]`.

    `one` and `other` are indices of variants, `[*batch]`. The result is 0 for equal indices, because two runs of the
    same variant have different inputs.
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
    """Return the posterior before any timing, which holds the prior's medians and correction.

    The covariance is diagonal: `log_sd**2` for the coefficients' logarithms, `correction_sd**2` for the weights.

    Args:
        model: the model of the runs.
        prior: the prior of the coefficients; by default, the model's own.
        spread: the spread of every variant.
        correction_sd: prior standard deviation of the correction's weights.
        facts: the machine's scheduling facts; by default, the model's own.

    Examples:
        >>> from rlxjax.models import FFT
        >>> posterior = prior_posterior(FFT, spread=0.1)
        >>> found = estimate(posterior, Runs.checked(FFT, "fft", batch=[64, 4096], n_fft=256))
        >>> bool(jnp.all(found.log_sd() > 0.1))
        True
    """
    prior = model.prior if prior is None else prior
    facts = dict(model.facts if facts is None else facts)
    least = as_lists(model.inputs, {name: max(entry.least, 1.0) for name, entry in model.inputs.items()})
    count = np.shape(model.features(Runs(model, 0, least), facts))[-1]
    known = np.broadcast_to(np.asarray(prior.correction, np.float64), (len(model.variants), count))
    sds = [*map(float, jax.tree.leaves(prior.log_sd)), *[float(correction_sd)] * known.size]
    spreads = np.full(len(model.variants), float(spread))
    return LatencyPosterior(model, facts, prior.median, known, np.diag(sds), spreads)


def transferred_prior(*posteriors: LatencyPosterior) -> LatencyPrior[Any]:
    """Return the prior for a new machine, or for the same machine on another day, from machines' posteriors.

    `m_d` is the logarithm of a coefficient on machine d of D. Then

        median = exp(sum(m_d) / D),   log_sd**2 = (sum((m_d - sum(m_d) / D)**2) + 1) / D.

    `log_sd` is at most the model's own. With a single machine, the prior's correction is 0.7 times the machine's
    correction. With more machines, the factor on their mean correction is closer to 1.

    Args:
        *posteriors: posteriors of other machines, all of the same version of the same model.

    Raises:
        ValueError: no posterior is given, or the posteriors' models differ.

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


def total_ns(posterior: LatencyPosterior, runs: Runs) -> Nanoseconds:
    """Return predicted times in ns, `[*batch]`; infinite if the variant does not give the requested result."""
    time_ns = sum(corrected_terms_ns(posterior, runs).values())
    return jnp.where(is_candidate(posterior, runs), time_ns, jnp.inf)


def is_candidate(posterior: LatencyPosterior, runs: Runs) -> Bool[Array, "*batch"]:
    """Return whether each run's variant gives the requested result, so that `pick` may choose it, `[*batch]`."""
    is_same = jnp.asarray(posterior.model.same_result(runs, posterior.facts))
    return jnp.any(is_same & is_own_variant(runs.variant, runs.shape, is_same.shape[-1]), -1)


def predicted_ns(coefficients: Any, runs: Runs, facts: Facts) -> Float[Array, "*batch"]:
    """Return the predicted time of each run in ns without correction, `[*batch]`: the sum of the model's terms.

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
    """Return the log prediction without correction, and its derivatives in the coefficients' logarithms."""
    structure, values = jax.tree.structure(coefficients), vector(coefficients)
    if any(entry.is_list for entry in runs.model.inputs.values()):  # factors `[*batch]` would not broadcast

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
    """Return the logarithm of the correction's factor, `[*batch]`."""
    xp = namespace_of(features, weights, variant)
    return xp.sum(features * xp.asarray(weights)[variant], -1)


def joint_jacobian(jacobian, features, variant, n_variants: int) -> Float[Array | np.ndarray, "*batch unknowns"]:
    """Return derivatives in all unknowns: the coefficients' logarithms, then the weights of every variant."""
    xp = namespace_of(jacobian, features, variant)
    is_own = is_own_variant(variant, np.shape(variant), n_variants)
    by_variant = xp.where(is_own[..., None], features[..., None, :], 0.0)
    return xp.concatenate([jacobian, by_variant.reshape(*by_variant.shape[:-2], -1)], axis=-1)


def is_own_variant(variant: Code, shape: tuple[Any, ...], n_variants: int) -> Bool[Array | np.ndarray, "*batch v"]:
    """Return the variants as one-hot booleans."""
    xp = namespace_of(variant)
    codes = xp.broadcast_to(xp.asarray(variant), shape)[..., None]
    return codes == np.arange(n_variants, dtype=codes.dtype).reshape(*[1] * len(shape), -1)


@by_value
class Decision(NamedTuple):
    """The decision whether to fuse, `[*batch]`.

    Attributes:
        fused_ns: predicted time with fusion, in ns.
        kept_ns: predicted time without fusion, in ns.
        margin_ns: `kept_ns - fused_ns`; positive if fusing saves time.
        margin_sd_ns: standard deviation of `margin_ns`.
        probability: probability that the fused run is faster: `sigmoid(margin_ns / temperature_ns)`.
        in_domain: whether the workload lies within the measured domain. None means that the domain is unknown.
    """

    fused_ns: Nanoseconds
    kept_ns: Nanoseconds
    margin_ns: Nanoseconds
    margin_sd_ns: Nanoseconds
    probability: Float[Array, "*batch"]
    in_domain: bool | np.ndarray | Array | None = None

    @property
    def temperature_ns(self) -> Nanoseconds:
        """The temperature of the logistic distribution with the margin's standard deviation: `sd * sqrt(3) / pi`."""
        return jnp.asarray(temperature_from_sd(self.margin_sd_ns))

    def verdict(self, sure: float = SURE) -> str | np.ndarray:
        """Return "fuse", "keep" or "undecided", or an array of these words, `[*batch]`.

        Args:
            sure: the smallest probability of "fuse" or "keep", above 0.5.

        Raises:
            ValueError: `sure` is not a probability above 0.5.
        """
        if not 0.5 < sure <= 1.0:
            raise ValueError(f"sure: expected a probability above 0.5, got {sure}")
        probability = np.asarray(self.probability)
        words = np.where(probability >= sure, "fuse", np.where(probability <= 1.0 - sure, "keep", "undecided"))
        return words if words.ndim else str(words)


@jax.jit
def decision(fused: LatencyEstimate, kept: LatencyEstimate, alike: RealLike = 0.0) -> Decision:
    """Decide which of two runs on a machine is faster, `[*batch]`; errors that both estimates share cancel.

    Args:
        fused: the estimate with fusion.
        kept: the estimate without fusion.
        alike: correlation of the runs' residuals, from -1 to 1; see `own_correlation`.

    Examples:
        >>> from rlxjax.fit import Runs, estimate, prior_posterior
        >>> from rlxjax.models import FFT
        >>> posterior = prior_posterior(FFT)
        >>> small, large = (estimate(posterior, Runs.checked(FFT, "fft", batch=b, n_fft=256)) for b in (1, 10**6))
        >>> bool(decision(fused=small, kept=large).probability > 0.5)
        True
    """
    margin_ns = kept.time_ns - fused.time_ns
    shared = kept.time_ns[..., None] * kept.scores - fused.time_ns[..., None] * fused.scores
    kept_own, fused_own = kept.time_ns * kept.spread, fused.time_ns * fused.spread
    # This form of `kept_own**2 + fused_own**2 - 2 alike kept_own fused_own` cannot become negative by rounding.
    own = (kept_own - fused_own) ** 2 + 2.0 * (1.0 - alike) * kept_own * fused_own
    sd_ns = jnp.sqrt(jnp.sum(shared**2, -1) + own)
    probability = jax.nn.sigmoid(margin_ns / temperature_from_sd(sd_ns))
    return Decision(fused.time_ns, kept.time_ns, margin_ns, sd_ns, probability)
