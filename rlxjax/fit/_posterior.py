"""What is known of a machine's latencies, how surely, and which of two runs is faster.

The correction is what the terms of a model miss: a small smooth factor that is log-linear in the model's features. Each
variant has its own weights, each with the prior `N(0, CORRECTION_SD**2)`.
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

#: Prior standard deviation of a weight: the correction is meant to be small, and to change little.
CORRECTION_SD = 0.05
#: What the correction is called among the parts of a prediction.
TERM = "correction_ns"
#: A decision is one way or the other from this probability on, and undecided below.
SURE = 0.9
#: What one machine says of another: a standard deviation of the logarithm of coefficients, and the share of the
#: correction that is expected there too.
TRANSFERRED_LOG_SD, TRANSFERRED_SHARE = 1.0, 0.7
#: A factor's entry of no more, in units of `CORRECTION_SD`, is a rounded 0.
ROUNDING = 1e-9
#: The spread of the runs of every variant before any was timed.
PRIOR_SPREAD = 0.05


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
            explain, timing noise included, by variant, `[variants]`; times the model's `scatter` of a run.
        alike: correlation of that between the variants that do one piece of work, `[variants, variants]`; None where
            nothing is known of it: independent.
    """

    model: LatencyModel = dataclasses.field(metadata={"static": True})
    facts: Facts
    coefficients: Any
    weights: Float[Array, "variants features"] | np.ndarray
    factor: Float[Array, "unknowns unknowns"] | np.ndarray
    spread: Float[Array, "variants"] | np.ndarray
    alike: Float[Array, "variants variants"] | np.ndarray | None = None

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

    def log_sd(self) -> Float[Array | np.ndarray, "*batch"]:
        """Return the standard deviation of the logarithm of a new workload's time."""
        xp = namespace_of(self.scores, self.spread)
        return xp.sqrt(xp.sum(self.scores**2, -1) + self.spread**2)


@jax.jit
def corrected_terms_ns(posterior: LatencyPosterior, runs: Runs) -> Mapping[str, Nanoseconds]:
    """Return the parts of what a machine's posterior says of runs in ns, the correction among them, `[*batch]` each."""
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
    """Return what a machine's posterior says of runs of its model, `[*batch]`.

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
    if is_of_one_variant and runs.shape:  # nothing depends on the weights of others
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
    """Return the estimate of runs of one variant where `has_separate_weights` holds, with few scores, `[*batch]`.

    The scores are those of the coefficients, `[*batch, coefficients]`. What the weights leave unknown is part of the
    spread: it is of no other variant.
    """
    log_ns, jacobian = log_prediction_and_jacobian(posterior.coefficients, runs, posterior.facts)
    # As an array of its own: products with its parts, one by one, take longer.
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
    """Return whether variants share coefficients alone: given these, no weight of one says anything of another's.

    So it is after a fit, and not once times of several runs were conditioned on; False of a posterior that is traced.
    """
    if is_traced(*jax.tree.leaves(posterior)):
        return False
    factor, shape = np.asarray(posterior.factor), np.shape(posterior.weights)
    count = len(factor) - np.size(posterior.weights)
    blocks = factor[count:, count:].reshape(*shape, *shape)
    others = np.moveaxis(blocks, 2, 1)[~np.eye(shape[0], dtype=bool)]
    return bool(np.all(np.abs(others) <= ROUNDING * CORRECTION_SD))


def own_correlation(posterior: LatencyPosterior, one: Code, other: Code) -> RealLike:
    """Return the correlation of what is a workload's own where two variants do it, `[*batch]`.

    Two runs of one variant are of different inputs, and independent, or one run twice.

    Args:
        posterior: of the machine.
        one: the variant that one run has, `[*batch]`.
        other: the one that the other run has.
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
    least = as_lists(model.inputs, {name: max(entry.least, 1.0) for name, entry in model.inputs.items()})
    count = np.shape(model.features(Runs(model, 0, least), facts))[-1]
    known = np.broadcast_to(np.asarray(prior.correction, np.float64), (len(model.variants), count))
    sds = [*map(float, jax.tree.leaves(prior.log_sd)), *[float(correction_sd)] * known.size]
    spreads = np.full(len(model.variants), float(spread))
    return LatencyPosterior(model, facts, prior.median, known, np.diag(sds), spreads)


def transferred_prior(*posteriors: LatencyPosterior) -> LatencyPrior[Any]:
    """Return what the calibrations of some machines say of another, or of one on another day.

    With `m_d` the logarithm of a coefficient on machine d of D,

        median = exp(sum(m_d) / D),   log_sd**2 = (sum((m_d - sum(m_d) / D)**2) + 1) / D

    which is the likeliest mean, and a variance that one machine alone leaves at 1, no larger than the model's own
    prior has it. Most of the correction is expected there too: of one machine's 0.7, of several ones' mean more.

    Args:
        *posteriors: of the other machines, of one model and one version of it.

    Raises:
        ValueError: no posterior, or posteriors of different models.

    References:
        A. Gelman et al., Bayesian Data Analysis, 3rd edition, 2013, chapter 5.

    Examples:
        >>> from rlxjax.fit import prior_posterior
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
    medians = structure.unflatten(np.exp(logs.mean(0)).tolist())
    return LatencyPrior(medians, structure.unflatten(log_sd.tolist()), mean_correction(posteriors))


def mean_correction(posteriors: Sequence[LatencyPosterior]) -> np.ndarray:
    """Return the part of the mean correction of some machines that is expected of another."""
    count = len(posteriors)
    share = count / (count + 1.0 / TRANSFERRED_SHARE - 1.0)
    return share * np.mean([np.asarray(one.weights) for one in posteriors], 0)


def total_ns(posterior: LatencyPosterior, runs: Runs) -> Nanoseconds:
    """Return the predictions in ns, `[*batch]`, infinite where a variant does not give the result that is asked for."""
    time_ns = sum(corrected_terms_ns(posterior, runs).values())
    return jnp.where(is_candidate(posterior, runs), time_ns, jnp.inf)


def is_candidate(posterior: LatencyPosterior, runs: Runs) -> Bool[Array, "*batch"]:
    """Return whether the variants of runs give the result that is asked for, so that a pick may choose them."""
    is_same = jnp.asarray(posterior.model.same_result(runs, posterior.facts))
    return jnp.any(is_same & is_own_variant(runs.variant, runs.shape, is_same.shape[-1]), -1)


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
    return jnp.asarray(runs.model.time_ns(coefficients, runs, facts))


def log_prediction_and_jacobian(
    coefficients: Any, runs: Runs, facts: Facts
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch c"]]:
    """Return the logarithm of the terms' prediction, and its derivatives by those of the coefficients."""
    structure, values = jax.tree.structure(coefficients), vector(coefficients)
    if any(entry.is_list for entry in runs.model.inputs.values()):  # a coefficient goes beside all entries of a run

        def of_one(factors, run):
            return jnp.log(predicted_ns(structure.unflatten(list(values * factors)), run, facts))

        each = jax.value_and_grad(of_one)
        for _ in runs.shape:
            each = jax.vmap(each, (None, 0))
        return each(jnp.ones_like(values), runs.together())
    # Every run has factors of its own, of 1, so that one pull-back gives all the derivatives.
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
    """Return the logarithm of what the correction multiplies predictions by, `[*batch]`."""
    xp = namespace_of(features, weights, variant)
    return xp.sum(features * xp.asarray(weights)[variant], -1)


def joint_jacobian(jacobian, features, variant, n_variants: int) -> Float[Array | np.ndarray, "*batch unknowns"]:
    """Return the derivatives by the coefficients' logarithms, then by the weights of every variant."""
    xp = namespace_of(jacobian, features, variant)
    is_own = is_own_variant(variant, np.shape(variant), n_variants)
    by_variant = xp.where(is_own[..., None], features[..., None, :], 0.0)
    return xp.concatenate([jacobian, by_variant.reshape(*by_variant.shape[:-2], -1)], axis=-1)


def is_own_variant(variant: Code, shape: tuple[Any, ...], n_variants: int) -> Bool[Array | np.ndarray, "*batch v"]:
    """Return which of a model's variants each run has."""
    xp = namespace_of(variant)
    codes = xp.broadcast_to(xp.asarray(variant), shape)[..., None]
    return codes == np.arange(n_variants, dtype=codes.dtype).reshape(*[1] * len(shape), -1)


@by_value
class Decision(NamedTuple):
    """Whether fusing pays, `[*batch]`.

    Attributes:
        fused_ns: predicted latency if fused.
        kept_ns: predicted latency if not.
        margin_ns: what fusing saves, negative if it costs.
        margin_sd_ns: standard deviation of that.
        probability: that the fused run is the faster one: `sigmoid(margin_ns / temperature_ns)`.
        in_domain: whether the workload lies within what was measured; if not, all of this is extrapolated.
            None where that was not asked.
    """

    fused_ns: Nanoseconds
    kept_ns: Nanoseconds
    margin_ns: Nanoseconds
    margin_sd_ns: Nanoseconds
    probability: Float[Array, "*batch"]
    in_domain: bool | np.ndarray | Array | None = None

    @property
    def temperature_ns(self) -> Nanoseconds:
        """Of a sigmoid with the margin's standard deviation: `sd * sqrt(3) / pi`."""
        return jnp.asarray(temperature_from_sd(self.margin_sd_ns))

    def verdict(self, sure: float = SURE) -> str | np.ndarray:
        """Return "fuse", "keep" or "undecided"; an array of these for arrays.

        Args:
            sure: the probability from which on it is decided, more than a half.

        Raises:
            ValueError: a probability that is none, or too small to tell.
        """
        if not 0.5 < sure <= 1.0:
            raise ValueError(f"sure: expected a probability above 0.5, got {sure}")
        probability = np.asarray(self.probability)
        words = np.where(probability >= sure, "fuse", np.where(probability <= 1.0 - sure, "keep", "undecided"))
        return words if words.ndim else str(words)


@jax.jit
def decision(fused: LatencyEstimate, kept: LatencyEstimate, alike: RealLike = 0.0) -> Decision:
    """Return the decision between two estimates of one machine, `[*batch]`: what they share cancels.

    Args:
        fused: of the run to take if it is faster.
        kept: of the run to keep otherwise.
        alike: correlation of what is each run's own, from -1 to 1: that of `LatencyPosterior.alike` where both do one
            piece of work.

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
    # That is `kept_own**2 + fused_own**2 - 2 alike kept_own fused_own`, and never less than nothing by rounding.
    own = (kept_own - fused_own) ** 2 + 2.0 * (1.0 - alike) * kept_own * fused_own
    sd_ns = jnp.sqrt(jnp.sum(shared**2, -1) + own)
    probability = jax.nn.sigmoid(margin_ns / temperature_from_sd(sd_ns))
    return Decision(fused.time_ns, kept.time_ns, margin_ns, sd_ns, probability)
