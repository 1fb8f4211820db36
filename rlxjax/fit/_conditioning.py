"""Measured times condition a posterior, with no new fit: its unknowns in one step, and the spread of what is own.

A measured time, of one run or of several one after the other, is that of the prediction times `exp` of

    J d + scale of its probe + own error,

with `J` the derivatives of the prediction's logarithm by the unknowns, and `d` by how much these are off. What was
timed together, a probe, has one scale, of which nothing is known beforehand: the pace of a shared machine says nothing
of its model. The own error has the spread of the posterior.
"""

import dataclasses

import jax
import numpy as np
from jaxtyping import Float, Int

from rlxjax._checks import is_traced
from rlxjax._counts import Columns
from rlxjax._typing import RealLike

from ._latency_model import Runs
from ._minimise import HUBER_DELTA, on_cpu
from ._posterior import LatencyPosterior, estimate
from ._timings import Timings, filled_up

#: Probes that the prior counts as, and rounds of expectation and maximisation.
BELIEVED, MOST_EM_ROUNDS = 4.0, 100
#: Differences of a probe count as no further off than so many standard deviations each.
MOST_SDS = 3.0
#: Rounds in which the influence of outliers settles, to this much.
MOST_ROUNDS, SETTLED = 10, 1e-3


def condition(
    posterior: LatencyPosterior,
    runs: Runs,
    time_ns: RealLike | list[float],
    *,
    measurement: Columns | None = None,
    probe: Columns | None = None,
) -> LatencyPosterior:
    """Return what is known of a model's latencies once further times were measured.

    The prediction is taken as linear in the logarithms of the coefficients and the weights of the correction, around
    where the posterior has them; the posterior's covariance is their prior. A common factor of all times of a probe
    changes nothing, so that one time alone says nothing. Times far off what all others say count less, as by Huber's
    loss. Own errors are taken as independent: of what was timed several times, give one time. The model, its facts and
    the spreads stay as they are.

    Args:
        posterior: of the model, of numbers.
        runs: of the model, that were timed, `[r]`.
        time_ns: the times, `[m]`; without any, the posterior stays as it is.
        measurement: to which time each run belongs, from 0, `[r]`: a time is that of all of its runs, one after the
            other. One run a time unless given.
        probe: which times were taken together, interleaved, a whole number for each, `[m]`; all unless given.

    Returns:
        A posterior of the same model. No unknown, and no weighted sum of unknowns, has a larger variance than before.

    Raises:
        ValueError: a time that is not positive and finite; shapes that differ; numbers of measurements or probes that
            are not whole, or a measurement without a run; runs of another model, or of which the model gives no
            time; a spread of nothing; what is traced.

    References:
        C. E. Rasmussen, C. K. I. Williams, Gaussian Processes for Machine Learning, 2006, 2.1 and 2.7.

    Examples:
        >>> from rlxjax.fit import prior_posterior
        >>> from rlxjax.models import FFT
        >>> posterior = prior_posterior(FFT)
        >>> runs = Runs.checked(FFT, "fft", batch=[1, 64, 4096], n_fft=1024)
        >>> as_predicted_ns = np.asarray(estimate(posterior, runs).time_ns)
        >>> known = condition(posterior, runs, as_predicted_ns * [1.0, 1.0, 2.0])
        >>> ratio = np.asarray(estimate(known, runs).time_ns) / as_predicted_ns
        >>> bool(ratio[2] / ratio[1] > 1.5)
        True
    """
    if is_traced(*jax.tree.leaves((posterior, runs, time_ns, measurement, probe))):
        raise ValueError("condition: expected a posterior and timings of numbers, got traced ones")
    measured_ns, of_time, of_probe = _checked(posterior, runs, time_ns, measurement, probe)
    if not measured_ns.size:
        return posterior
    run_ns, run_scores, spread = estimates(posterior, runs)
    predicted_ns = _sums(run_ns, of_time, len(measured_ns))
    share = run_ns / predicted_ns[of_time]
    scores = _sums(share[:, None] * run_scores, of_time, len(measured_ns))
    variance = _sums((share * spread) ** 2, of_time, len(measured_ns))
    if not np.all(variance > 0):
        raise ValueError(f"spread: expected positive numbers, got {np.asarray(posterior.spread).tolist()}")
    move, root = _step(scores, np.log(measured_ns / predicted_ns), variance, of_probe)

    from scipy.linalg import solve_triangular  # loaded when first used

    factor = np.asarray(posterior.factor, np.float64)
    values, structure = jax.tree.flatten(posterior.coefficients)
    logs, weights = np.split(factor @ move, [len(values)])
    return dataclasses.replace(
        posterior,
        coefficients=structure.unflatten((np.asarray(values, np.float64) * np.exp(logs)).tolist()),
        weights=np.asarray(posterior.weights, np.float64) + weights.reshape(np.shape(posterior.weights)),
        # L @ inv(M) is triangular, as both are.
        factor=np.tril(solve_triangular(root, factor.T, lower=True, trans=1).T),
    )


def _step(
    scores: Float[np.ndarray, "m unknowns"],
    log_ratio: Float[np.ndarray, "m"],
    variance: Float[np.ndarray, "m"],
    probe: Int[np.ndarray, "m"],
) -> tuple[Float[np.ndarray, "unknowns"], Float[np.ndarray, "unknowns unknowns"]]:
    """Return the mean `z` of unknowns that are independent, of variance 1, beforehand, and `M` of their precision.

    The precision `M.T @ M`, with `M` lower triangular, is at least 1 along every direction, so that nothing is near
    singular, however little the times say.
    """
    from scipy.linalg import cho_solve  # loaded when first used

    sd, influence = np.sqrt(variance), np.ones_like(variance)
    move, lower = np.zeros(scores.shape[1]), np.eye(scores.shape[1])
    for _ in range(MOST_ROUNDS):
        counted = influence / variance
        centred, wanted = (_without_scale(values, counted, probe) for values in (scores, log_ratio[:, None]))
        weighted = centred * counted[:, None]
        precision = weighted.T @ centred + np.eye(scores.shape[1])
        # Of the unknowns in reverse, so that the factor read in reverse is `M.T`.
        lower = np.linalg.cholesky(precision[::-1, ::-1])
        move = cho_solve((lower, True), (weighted.T @ wanted[:, 0])[::-1])[::-1]
        left = _without_scale((log_ratio - scores @ move)[:, None], counted, probe)[:, 0]
        last, knee = influence, HUBER_DELTA * sd
        influence = knee / np.maximum(np.abs(left), knee)
        if np.max(np.abs(influence - last)) <= SETTLED:
            break
    return move, lower.T[::-1, ::-1]


def _without_scale(
    values: Float[np.ndarray, "m columns"], counted: Float[np.ndarray, "m"], probe: Int[np.ndarray, "m"]
) -> Float[np.ndarray, "m columns"]:
    """Return values less the mean of their probe: what a flat prior of a probe's scale leaves of them."""
    count = int(probe.max()) + 1
    share = counted / _sums(counted, probe, count)[probe]  # exactly 1 of one alone
    return values - _sums(share[:, None] * values, probe, count)[probe]


def _sums(values: np.ndarray, group: Int[np.ndarray, "n"], count: int) -> np.ndarray:
    """Return the sum of the rows of each group, of which none is empty, `[count, ...]`."""
    order = np.argsort(group, kind="stable")
    return np.add.reduceat(values[order], np.searchsorted(group[order], np.arange(count)), axis=0)


def estimates(posterior: LatencyPosterior, runs: Runs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the times in ns, the scores and the spreads of runs, `[r]`, in float64 on the host.

    Other numbers of runs seldom compile a program anew.
    """
    n = runs.shape[0]
    held = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, posterior)
    columns = jax.tree.map(lambda column: np.broadcast_to(np.asarray(column), (n,)), runs)
    filled, _ = filled_up(Timings(columns, np.ones(n)), np.ones(n))
    with on_cpu(), jax.ensure_compile_time_eval():
        found = estimate(held, dataclasses.replace(filled.runs, model=posterior.model))
    time_ns, scores, spread = (np.asarray(leaf, np.float64)[:n] for leaf in found)
    bad = np.flatnonzero(~(np.isfinite(time_ns) & np.isfinite(scores).all(-1)))
    if bad.size:
        name, got = posterior.model.variants[columns.variant[bad[0]]], time_ns[bad[0]]
        raise ValueError(f"runs[{bad[0]}]: expected a run that the model predicts, got {name!r} of {got} ns")
    return time_ns, scores, spread


def _checked(
    posterior: LatencyPosterior, runs: Runs, time_ns: object, measurement: object, probe: object
) -> tuple[Float[np.ndarray, "m"], Int[np.ndarray, "r"], Int[np.ndarray, "m"]]:
    """Return the times, the time of each run and the probe of each time, both counted from 0."""
    own, given = ((model.name, model.version) for model in (posterior.model, runs.model))
    if own != given:
        raise ValueError(f"runs: expected those of {own[0]!r} {own[1]}, got those of {given[0]!r} {given[1]}")
    times, shape = np.asarray(time_ns, np.float64), runs.shape
    if times.ndim != 1 or len(shape) != 1:
        raise ValueError(f"time_ns: expected times [m] of runs [r], got shape {times.shape} of runs {shape}")
    bad = np.flatnonzero(~(np.isfinite(times) & (times > 0)))
    if bad.size:
        raise ValueError(f"time_ns[{bad[0]}]: expected a positive finite number, got {times[bad[0]]}")
    if measurement is None and times.shape != shape:
        raise ValueError(f"time_ns: expected shape {shape}, one time a run, got {times.shape}; see `measurement`")
    of_time = np.arange(len(times)) if measurement is None else _whole("measurement", measurement, shape)
    if np.unique(of_time).tolist() != list(range(len(times))):
        raise ValueError(f"measurement: expected the places of {len(times)} times, from 0, each of a run at least")
    of_probe = np.zeros(len(times), int) if probe is None else _whole("probe", probe, times.shape)
    return times, of_time, np.unique(of_probe, return_inverse=True)[1]


def _whole(name: str, value: object, shape: tuple[int, ...]) -> Int[np.ndarray, "n"]:
    found = np.asarray(value)
    if found.shape != shape or (found.dtype.kind not in "iu" and found.size):
        raise ValueError(f"{name}: expected whole numbers of shape {shape}, got {found.dtype} of {found.shape}")
    return found.astype(int)


def learned_spread(
    posterior: LatencyPosterior,
    runs: Runs,
    log_ratio: Float[np.ndarray, "n"],
    probe: Int[np.ndarray, "n"],
) -> LatencyPosterior:
    """Return a posterior whose `spread` and `alike` are those that probes make likely; all else stays.

    A probe times one workload by several variants at one unknown pace, so that it shows differences of their errors,
    and no error by itself. What is a workload's own is a vector `d ~ N(0, S)` over the variants. Of a probe, with its
    differences `y = H d + e`, where `e` is what the coefficients leave unknown,

        d | y ~ N(K y, S - K H S),  K = S H' inv(H S H' + cov(e)).

    `S` has an inverse Wishart prior around what the posterior says, times one factor that all differences together make
    likely. The likeliest `S` comes by expectation and maximisation: it is the mean of the expected `d d'` of all probes
    and of the prior. What no probe shows stays as it was believed, but for that factor.

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
    for _ in range(MOST_EM_ROUNDS):
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
