"""How far off predictions turn out to be: the covariance of what is a workload's own, by probes of it.

A probe times one workload by several variants at one unknown pace, so that it shows differences of their errors, and no
error by itself. What is a workload's own is a vector `d ~ N(0, S)` over the variants. Of a probe, with its differences
`y = H d + e`, where `e` is what the coefficients leave unknown,

    d | y ~ N(K y, S - K H S),  K = S H' inv(H S H' + cov(e)).

`S` has an inverse Wishart prior around what the posterior says, times one factor that all differences together make
likely. The likeliest `S` comes by expectation and maximisation: it is the mean of the expected `d d'` of all probes and
of the prior. What no probe shows stays as it was believed, but for that factor.
"""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from ._conditioning import estimates
from ._model import Runs
from ._posterior import LatencyPosterior

#: Probes that the prior counts as, rounds of expectation and maximisation, and where they have settled.
BELIEVED, MOST_ROUNDS, SETTLED = 4.0, 100, 1e-3
#: Differences of a probe count as no further off than so many standard deviations each.
MOST_SDS = 3.0


def learned_spread(
    posterior: LatencyPosterior,
    runs: Runs,
    log_ratio: Float[np.ndarray, "n"],
    probe: Int[np.ndarray, "n"],
) -> LatencyPosterior:
    """Return a posterior whose `spread` and `alike` are those that probes make likely; all else stays.

    Args:
        posterior: before them.
        runs: that were timed, `[n]`; those of a probe are of one workload, by different variants.
        log_ratio: logarithm of each measured time by what was predicted of it before it was measured, `[n]`.
        probe: which runs were timed together, `[n]`; one that is alone says nothing.

    References:
        A. P. Dempster, N. M. Laird, D. B. Rubin, Maximum Likelihood from Incomplete Data via the EM Algorithm, 1977.

    Examples:
        >>> from rlxjax.fit import prior_posterior
        >>> from rlxjax.models import WELCH
        >>> before = prior_posterior(WELCH, spread=0.3)
        >>> runs = Runs.checked(WELCH, ["host", "block"] * 40, batch=np.repeat(np.arange(1, 41), 2), n_fft=256, k=8)
        >>> after = learned_spread(before, runs, np.zeros(80), np.repeat(np.arange(40), 2))
        >>> bool(np.all(after.spread < before.spread))
        True
    """
    scores, variant = estimates(posterior, runs)[1], np.broadcast_to(np.asarray(runs.variant), runs.shape)
    spread = np.asarray(posterior.spread, np.float64)
    alike = np.eye(len(spread)) if posterior.alike is None else np.asarray(posterior.alike, np.float64)
    covariance, probes = spread[:, None] * alike * spread, []
    for number in np.unique(probe):
        mine = np.flatnonzero(probe == number)
        to_first = np.hstack([-np.ones((len(mine) - 1, 1)), np.eye(len(mine) - 1)])
        of_scores = to_first @ scores[mine]
        shown = to_first @ np.eye(len(spread))[variant[mine]]
        probes.append((shown, to_first @ log_ratio[mine], of_scores @ of_scores.T))
    probes = [own for own in probes if len(own[1])]
    if not probes:
        return posterior
    squares, most = [_square(covariance, *own) for own in probes], [MOST_SDS**2 * len(own[1]) for own in probes]
    covariance = before = covariance * (BELIEVED + sum(map(min, squares, most))) / (BELIEVED + sum(most) / MOST_SDS**2)
    limits = [min(1.0, MOST_SDS * np.sqrt(len(own[1]) / max(_square(before, *own), 1e-12))) for own in probes]
    for _ in range(MOST_ROUNDS):
        total = BELIEVED * before
        for limit, (shown, seen, unknown) in zip(limits, probes, strict=True):
            gain = np.linalg.solve(shown @ covariance @ shown.T + unknown, shown @ covariance).T
            own = gain @ (limit * seen)
            total = total + np.outer(own, own) + covariance - gain @ shown @ covariance
        last, covariance = covariance, total / (BELIEVED + len(probes))
        if np.max(np.abs(covariance - last)) <= SETTLED * np.max(last):
            break
    spread = np.sqrt(np.diag(covariance))
    alike = np.clip(covariance / np.outer(spread, spread), -1.0, 1.0)
    np.fill_diagonal(alike, 1.0)
    return dataclasses.replace(posterior, spread=spread, alike=alike)


def _square(covariance: np.ndarray, shown: np.ndarray, seen: np.ndarray, unknown: np.ndarray) -> float:
    """Return the squared distance of a probe's differences from none, in units of their covariance."""
    return float(seen @ np.linalg.solve(shown @ covariance @ shown.T + unknown, seen))
