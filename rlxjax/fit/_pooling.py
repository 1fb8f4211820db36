"""What some machines say of another: partial pooling of their fits, or the transfer of their posteriors."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from ._coefficients import LatencyPrior, vector
from ._fit import DeviceFits, FitResult
from ._posterior import LatencyPosterior

C = TypeVar("C")

#: What one machine says of another: a standard deviation of the logarithm of coefficients, and the share of
#: the correction that is expected there too; `benchmarks/population_prior.py` judges both.
TRANSFERRED_LOG_SD, TRANSFERRED_SHARE = 1.0, 0.7


def pooled_prior(
    fits: DeviceFits[C] | Sequence[FitResult[C]] | Sequence[LatencyPosterior], prior: LatencyPrior[C]
) -> LatencyPrior[C]:
    """Return the log-normal prior of a further device's coefficients, from the fits of several devices.

    With `m_d` and `v_d` the mean and variance of a coefficient's logarithm after the fit of device d, and
    `m_0`, `v_0` those of the prior, which counts as one device more,

        mean = sum(m_d) / (D + 1),   variance = sum((m_d - mean)**2 + v_d) / (D + 1),   d from 0 to D

    which is a step of expectation and maximisation towards the likeliest mean and variance over devices.
    To take a further step, fit the devices again with the result, and pool with the first prior again.

    A coefficient that no device measured keeps the prior, and no variance is below `v_0 / (D + 1)`; one that
    differs more between devices than the prior expected becomes wider than it. Fits that did not converge
    are left out. Of posteriors, the correction is pooled too, as by `transferred_prior`; fits of terms have none.

    Args:
        fits: of the devices: of their terms, or posteriors.
        prior: what is believed without them, the model's own say.

    Raises:
        ValueError: no fit that converged.

    References:
        A. Gelman et al., Bayesian Data Analysis, 3rd edition, 2013, chapter 5 and section 13.6.

    Examples:
        >>> from rlxjax.fit import Timings, fit_latency
        >>> from rlxjax.models import FFT
        >>> batch, n_fft = np.repeat([32, 256, 2048], 4), np.tile([64, 256, 1024, 4096], 3)
        >>> def timings(call_ns):
        ...     time_ns = call_ns + 12.0 * batch * n_fft
        ...     return Timings.checked(FFT, variant="fft", batch=batch, n_fft=n_fft, time_ns=time_ns)
        >>> fits = [fit_latency(timings(call_ns)) for call_ns in (1e6, 2e6, 3e6)]
        >>> pooled = pooled_prior(fits, FFT.prior)
        >>> bool(6e4 < pooled.median.call_ns < 3e6)
        True
        >>> few = jax.tree.map(lambda column: column[:3], timings(4e6))
        >>> bool(abs(fit_latency(few, pooled, min_timings=3).coefficients.call_ns / 4e6 - 1) < 0.1)
        True
    """
    if not isinstance(fits, DeviceFits) and not fits:
        raise ValueError("fits: expected one at least, got none")
    correction, listed = 0.0, fits if isinstance(fits, DeviceFits) else [*fits]
    posteriors = [one for one in listed if isinstance(one, LatencyPosterior)]
    if isinstance(fits, DeviceFits):
        is_used = np.asarray(fits.converged)
        pairs = [[np.stack(jax.tree.leaves(part), -1)[is_used] for part in (fits.coefficients, fits.log_sd)]]
    elif posteriors:
        pairs = [[_leaves(one.coefficients), _leaves(one.coefficient_log_sd())] for one in posteriors]
        correction = _shared_correction(posteriors)
    else:
        ended = [one for one in fits if isinstance(one, FitResult) and one.converged]
        pairs = [[_leaves(one.coefficients), _leaves(one.log_sd)] for one in ended]
    if not pairs or not np.size(pairs[0][0]):
        raise ValueError("fits: expected one at least that converged, got none")
    structure, last = jax.tree.structure(prior.median), [_leaves(prior.median), _leaves(prior.log_sd)]
    values, sds = (np.vstack(part) for part in zip(*pairs, last, strict=True))
    means, variances = np.log(values), sds**2
    mean = means.mean(0)
    variance = np.mean((means - mean) ** 2 + variances, 0)
    medians, log_sds = (structure.unflatten(part.tolist()) for part in (np.exp(mean), np.sqrt(variance)))
    return LatencyPrior(medians, log_sds, correction)


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
    return LatencyPrior(medians, structure.unflatten(log_sd.tolist()), _shared_correction(posteriors))


def _leaves(tree: Any) -> np.ndarray:
    return np.array(jax.tree.leaves(tree), np.float64)


def _shared_correction(posteriors: Sequence[LatencyPosterior]) -> np.ndarray:
    """Return the part of the mean correction of some machines that is expected of another."""
    count = len(posteriors)
    share = count / (count + 1.0 / TRANSFERRED_SHARE - 1.0)
    return share * np.mean([np.asarray(one.weights) for one in posteriors], 0)
