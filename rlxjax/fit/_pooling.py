"""Partial pooling: what the fits of several devices say of the next one."""

from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np

from ._devices import DeviceFits
from ._fit import FitResult
from ._prior import LatencyPrior

C = TypeVar("C")


def pooled_prior(fits: DeviceFits[C] | Sequence[FitResult[C]], prior: LatencyPrior[C]) -> LatencyPrior[C]:
    """Return the log-normal prior of a further device's coefficients, from the fits of several devices.

    With `m_d` and `v_d` the mean and variance of a coefficient's logarithm after the fit of device d, and
    `m_0`, `v_0` those of the prior, which counts as one device more,

        mean = sum(m_d) / (D + 1),   variance = sum((m_d - mean)**2 + v_d) / (D + 1),   d from 0 to D

    which is a step of expectation and maximisation towards the likeliest mean and variance over devices.
    To take a further step, fit the devices again with the result, and pool with the first prior again.

    A coefficient that no device measured keeps the prior, and no variance is below `v_0 / (D + 1)`; one that
    differs more between devices than the prior expected becomes wider than it. Fits that did not converge
    are left out.

    Args:
        fits: of the devices.
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
    means, variances, is_used = _moments(fits)
    if not is_used.any():
        raise ValueError("fits: expected one at least that converged, got none")
    structure = jax.tree.structure(prior.median)
    median, log_sd = (np.array(jax.tree.leaves(part), np.float64) for part in prior[:2])
    means = np.vstack([means[is_used], np.log(median)])
    variances = np.vstack([variances[is_used], log_sd**2])
    mean = means.mean(0)
    variance = np.mean((means - mean) ** 2 + variances, 0)
    return LatencyPrior(structure.unflatten(np.exp(mean).tolist()), structure.unflatten(np.sqrt(variance).tolist()))


def _moments(fits) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the logarithms' means and variances, `[devices, c]`, and which fits converged, `[devices]`."""
    if isinstance(fits, DeviceFits):
        means, sds = (np.stack(jax.tree.leaves(part), -1) for part in (fits.coefficients, fits.log_sd))
        is_used = np.asarray(fits.converged)
    elif fits:
        means, sds = (
            np.array([jax.tree.leaves(part) for part in parts])
            for parts in ([fit.coefficients for fit in fits], [fit.log_sd for fit in fits])
        )
        is_used = np.array([fit.converged for fit in fits])
    else:
        raise ValueError("fits: expected one at least, got none")
    return np.log(means.astype(np.float64)), sds.astype(np.float64) ** 2, is_used
