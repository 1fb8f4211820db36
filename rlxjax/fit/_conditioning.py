"""Update a posterior with measured times in one step, without a new fit; estimate the spread of runs.

A probe is a set of times that were measured together. A time covers one run or several consecutive runs:

    log(measured / predicted) = J d + scale of the probe + residual.

`J` holds the derivatives of the log prediction by the unknowns, and `d` is the error of the unknowns. The scale of a
probe has a flat prior: it depends on how busy a shared machine is, which says nothing about the model. The standard
deviation of the residual is the posterior's `spread`.
"""

import dataclasses

import jax
import numpy as np
from jaxtyping import Float, Int

from rlxjax._checks import is_traced
from rlxjax._chunks import on_cpu
from rlxjax._counts import Columns
from rlxjax._typing import RealLike

from ._latency_model import Runs
from ._lists import places_of
from ._minimise import HUBER_DELTA, RELATIVE_SD
from ._posterior import CORRECTION_SD, LatencyPosterior, estimate
from ._timings import Timings, filled_up

#: The largest number of rounds in each of three loops: for the influence of outliers, for the spread, and for
#: expectation-maximisation. A loop ends earlier if a round changes its result by at most the share `SETTLED`.
HUBER_ROUNDS, SPREAD_ROUNDS, EM_ROUNDS, SETTLED = 10, 8, 100, 1e-3
#: The smallest spread of a variant's runs.
LEAST_SPREAD = 0.01
#: The median absolute value of a standard normal variable, and the number of standard deviations that clips errors.
MEDIAN_SDS, MOST_SDS = 0.6745, 3.0
#: The prior counts as much as `PSEUDO_WORKS` pieces of work in `alike_of`, or `BELIEVED` probes in `learned_spread`.
PSEUDO_WORKS = BELIEVED = 4.0
#: The share of errors that an interval covers, and half the width of this interval in standard deviations.
COVERED, COVERED_SDS = 0.9, 1.6449


def condition(
    posterior: LatencyPosterior,
    runs: Runs,
    time_ns: RealLike | list[float],
    *,
    measurement: Columns | None = None,
    probe: Columns | None = None,
) -> LatencyPosterior:
    """Update a posterior with new measured times, without a new fit.

    The given posterior serves as the prior. The log prediction is linearised around its coefficients and weights. Only
    the ratios of times within a probe matter, so a probe with a single time changes nothing. Outliers count less
    (Huber's loss). Errors of different times are taken as independent, so give a single time for a run that you
    timed repeatedly. The model, the facts and the spreads stay the same.

    Args:
        posterior: the posterior to update, with concrete numbers.
        runs: the timed runs of the model, `[r]`.
        time_ns: the measured times in ns, `[m]`. An empty list leaves the posterior unchanged.
        measurement: for each run, the index in `time_ns` of the time that includes the run, `[r]`. A time may include
            several consecutive runs. By default, each run has its own time.
        probe: a whole number for each time, `[m]`. Times with the same number belong to the same probe: their
            measurements were interleaved. By default, all times belong to the same probe.

    Returns:
        A posterior of the same model. No unknown, and no weighted sum of unknowns, has a larger variance than before.

    Raises:
        ValueError: a time is not positive and finite; shapes do not match; `measurement` or `probe` is not whole; a
            time has no run; a run is of another model or has no predicted time; a spread is 0; a value is traced.

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
        raise ValueError("condition: expected concrete numbers, got traced values; call condition outside jax.jit")
    measured_ns, of_time, of_probe = _checked(posterior, runs, time_ns, measurement, probe)
    if not measured_ns.size:
        return posterior
    run_ns, run_scores, spread = estimates(posterior, runs)
    predicted_ns = _sums(run_ns, of_time, len(measured_ns))
    share = run_ns / predicted_ns[of_time]
    scores = _sums(share[:, None] * run_scores, of_time, len(measured_ns))
    variance = _sums((share * spread) ** 2, of_time, len(measured_ns))
    if not np.all(variance > 0):
        raise ValueError(f"posterior.spread: expected positive numbers, got {np.asarray(posterior.spread).tolist()}")
    move, root = _step(scores, np.log(measured_ns / predicted_ns), variance, of_probe)

    from scipy.linalg import solve_triangular  # loaded when first used

    factor = np.asarray(posterior.factor, np.float64)
    values, structure = jax.tree.flatten(posterior.coefficients)
    logs, weights = np.split(factor @ move, [len(values)])
    return dataclasses.replace(
        posterior,
        coefficients=structure.unflatten((np.asarray(values, np.float64) * np.exp(logs)).tolist()),
        weights=np.asarray(posterior.weights, np.float64) + weights.reshape(np.shape(posterior.weights)),
        # L and M are lower triangular, so L @ inv(M) is too.
        factor=np.tril(solve_triangular(root, factor.T, lower=True, trans=1).T),
    )


def _step(
    scores: Float[np.ndarray, "m unknowns"],
    log_ratio: Float[np.ndarray, "m"],
    variance: Float[np.ndarray, "m"],
    probe: Int[np.ndarray, "m"],
) -> tuple[Float[np.ndarray, "unknowns"], Float[np.ndarray, "unknowns unknowns"]]:
    """Return the posterior mean of unknowns whose prior is standard normal, and a factor `M` of their precision."""
    from scipy.linalg import cho_solve  # loaded when first used

    count = int(probe.max()) + 1

    def without_scale(values):
        """Subtract each probe's weighted mean from its values, because a probe's scale has a flat prior."""
        share = counted / _sums(counted, probe, count)[probe]  # exactly 1 for a single time
        return values - _sums(share[:, None] * values, probe, count)[probe]

    sd, influence = np.sqrt(variance), np.ones_like(variance)
    move, lower = np.zeros(scores.shape[1]), np.eye(scores.shape[1])
    for _ in range(HUBER_ROUNDS):
        counted = influence / variance
        centred, wanted = without_scale(scores), without_scale(log_ratio[:, None])
        weighted = centred * counted[:, None]
        # All eigenvalues of the precision are at least 1, so the inverse is stable.
        precision = weighted.T @ centred + np.eye(scores.shape[1])
        # The Cholesky factor of the unknowns in reverse order, reversed back, is `M.T`; `M` is lower triangular.
        lower = np.linalg.cholesky(precision[::-1, ::-1])
        move = cho_solve((lower, True), (weighted.T @ wanted[:, 0])[::-1])[::-1]
        left = without_scale((log_ratio - scores @ move)[:, None])[:, 0]
        last, knee = influence, HUBER_DELTA * sd
        influence = knee / np.maximum(np.abs(left), knee)
        if np.max(np.abs(influence - last)) <= SETTLED:
            break
    return move, lower.T[::-1, ::-1]


def _sums(values: np.ndarray, group: Int[np.ndarray, "n"], count: int) -> np.ndarray:
    order = np.argsort(group, kind="stable")
    return np.add.reduceat(values[order], np.searchsorted(group[order], np.arange(count)), axis=0)


def estimates(posterior: LatencyPosterior, runs: Runs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the predicted times in ns, the scores and the spreads of runs, `[r]`, as float64 arrays of NumPy."""
    n = runs.shape[0]
    held = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, posterior)
    columns = runs.of_shape((n,))
    filled, _ = filled_up(Timings(columns, np.ones(n)), np.ones(n))
    with on_cpu(), jax.ensure_compile_time_eval():
        found = estimate(held, dataclasses.replace(filled.runs, model=posterior.model))
    time_ns, scores, spread = (np.asarray(leaf, np.float64)[:n] for leaf in found)
    bad = np.flatnonzero(~(np.isfinite(time_ns) & np.isfinite(scores).all(-1)))
    if bad.size:
        name, got = posterior.model.variants[np.asarray(columns.variant)[bad[0]]], time_ns[bad[0]]
        raise ValueError(f"runs[{bad[0]}]: the model cannot predict this run of {name!r} (predicted time: {got} ns)")
    return time_ns, scores, spread


def _checked(
    posterior: LatencyPosterior, runs: Runs, time_ns: object, measurement: object, probe: object
) -> tuple[Float[np.ndarray, "m"], Int[np.ndarray, "r"], Int[np.ndarray, "m"]]:
    """Check the arguments; return the times in ns, the index of each run's time, and the index of each time's probe."""

    def whole(name, value, shape):
        found = np.asarray(value)
        if found.shape != shape or (found.dtype.kind not in "iu" and found.size):
            got = f"{found.dtype} of shape {found.shape}"
            raise ValueError(f"{name}: expected whole numbers of shape {shape}, got {got}")
        return found.astype(int)

    own, given = ((model.name, model.version) for model in (posterior.model, runs.model))
    if own != given:
        expected, got = (f"model {name!r} version {version}" for name, version in (own, given))
        raise ValueError(f"runs: expected runs of {expected}, as the posterior has, got {got}")
    times, shape = np.asarray(time_ns, np.float64), runs.shape
    if times.ndim != 1 or len(shape) != 1:
        raise ValueError(f"time_ns, runs: expected one axis each, got the shapes {times.shape} and {shape}")
    bad = np.flatnonzero(~(np.isfinite(times) & (times > 0)))
    if bad.size:
        raise ValueError(f"time_ns[{bad[0]}]: expected a positive finite number, got {times[bad[0]]}")
    if measurement is None and times.shape != shape:
        raise ValueError(f"time_ns: expected a time for each of {shape[0]} runs, got {len(times)}; see `measurement`")
    of_time = np.arange(len(times)) if measurement is None else whole("measurement", measurement, shape)
    if np.unique(of_time).tolist() != list(range(len(times))):
        raise ValueError(f"measurement: expected every index from 0 to {len(times) - 1}, so that each time has a run")
    of_probe = np.zeros(len(times), int) if probe is None else whole("probe", probe, times.shape)
    return times, of_time, np.unique(of_probe, return_inverse=True)[1]


def spread_and_errors(
    features: np.ndarray, left: np.ndarray, influence: np.ndarray, groups: tuple[np.ndarray, ...], scatter: np.ndarray
) -> tuple[float, np.ndarray]:
    """Return the spread whose intervals cover the share `COVERED` of the errors on left-out folds; and the errors."""
    from scipy.special import stdtrit  # loaded when first used

    def products(rows):
        return features[rows].T @ (features[rows] * influence[rows][:, None])

    def ridge_covariance(squares, noise_sd):
        """Return the posterior covariance of the correction's weights, `[*folds, f, f]`, for noise of `noise_sd`."""
        return np.linalg.inv(squares / noise_sd**2 + np.eye(squares.shape[-1]) / CORRECTION_SD**2)

    outs, weighted = np.array([values == value for values in groups for value in np.unique(values)]), influence * left
    fold, row = np.nonzero(outs)
    squares = products(slice(None))
    without = squares - np.stack([products(out) for out in outs])
    moments = features.T @ weighted - np.stack([features[out].T @ weighted[out] for out in outs])

    covariance = ridge_covariance(squares, RELATIVE_SD)
    weights = covariance @ (features.T @ weighted) / RELATIVE_SD**2
    freedom = np.sum(covariance * squares) / RELATIVE_SD**2
    rest = np.abs(left - features @ weights) / scatter * np.sqrt(len(left) / max(len(left) - freedom, 1.0))
    least = max(LEAST_SPREAD, float(np.quantile(rest, COVERED)) / COVERED_SDS)
    found = np.einsum("kij,kj->ki", ridge_covariance(without, RELATIVE_SD), moments) / RELATIVE_SD**2
    errors = left[row] - np.sum(features[row] * found[fold], -1)
    needed_squares, spread = (errors / COVERED_SDS) ** 2, RELATIVE_SD
    for _ in range(SPREAD_ROUNDS):
        projected = (features @ ridge_covariance(without, spread))[fold, row]
        needed = np.sqrt(np.maximum(needed_squares - np.sum(projected * features[row], -1), 0.0)) / scatter[row]
        last, spread = spread, max(least, float(np.quantile(needed, COVERED)))
        if abs(spread - last) <= SETTLED * spread:
            break
    # Errors within a fold are correlated. Student's distribution, with the number of folds, widens the spread.
    widened = stdtrit(max(len(outs) - 1, 1), (1.0 + COVERED) / 2.0) / COVERED_SDS
    return spread * float(widened), errors


def alike_of(errors: Float[np.ndarray, "n"], runs: Runs, n_variants: int) -> Float[np.ndarray, "variants variants"]:
    """Return the correlation between the errors of two variants at the same work, that is, at equal inputs."""
    # With `z`, a variant's errors in robust standard deviations, clipped to `-3 .. 3`, the correlation is
    #     sum(z_i z_j) / (sqrt(sum(z_i**2) sum(z_j**2)) + 4)
    # over the work that was timed with both variants. Outliers and small samples therefore count little.
    if n_variants == 1:
        return np.ones((1, 1))
    variant = np.asarray(runs.variant)
    columns = map(np.asarray, runs.of_shape(variant.shape).inputs.values())
    inputs = np.stack([column if column.ndim == 1 else places_of(column) for column in columns], -1)
    work = np.unique(inputs, axis=0, return_inverse=True)[1].reshape(-1)
    shape = (int(work.max(initial=-1)) + 1, n_variants)
    counts, sums, scaled = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    np.add.at(counts, (work, variant), 1.0)
    np.add.at(sums, (work, variant), errors)
    timed, mean = counts > 0, sums / np.maximum(counts, 1.0)
    for code in np.flatnonzero(timed.any(0)):
        own = mean[timed[:, code], code]
        scale = max(float(np.median(np.abs(own))) / MEDIAN_SDS, LEAST_SPREAD)
        scaled[timed[:, code], code] = np.clip(own / scale, -MOST_SDS, MOST_SDS)
    squares = np.sqrt((scaled**2).T @ timed.astype(float))
    found = scaled.T @ scaled / (squares * squares.T + PSEUDO_WORKS)
    np.fill_diagonal(found, 1.0)
    # A correlation matrix has no negative eigenvalues and a diagonal of 1.
    values, vectors = np.linalg.eigh(found)
    valid = (vectors * np.maximum(values, 0.0)) @ vectors.T
    return _correlation((valid + valid.T) / 2.0, np.sqrt(np.diag(valid)))


def _correlation(covariance: np.ndarray, sds: np.ndarray) -> np.ndarray:
    found = np.clip(covariance / np.outer(sds, sds), -1.0, 1.0)
    np.fill_diagonal(found, 1.0)
    return found


def learned_spread(
    posterior: LatencyPosterior, runs: Runs, log_ratio: Float[np.ndarray, "n"], probe: Int[np.ndarray, "n"]
) -> LatencyPosterior:
    """Return the posterior with the `spread` and `alike` that are most likely given probes. Other fields do not change.

    A probe times several variants on the same workload. The machine's speed is unknown, so a probe shows differences
    between the variants' residuals, but no single residual. The vector `d` holds every variant's residual, and has the
    distribution `N(0, S)`. The differences are `y = H d + e`; the coefficients' uncertainty causes the error `e`. Then

        d | y ~ N(K y, S - K H S),  K = S H' inv(H S H' + cov(e)).

    `S` has an inverse Wishart prior. Its mean is the given posterior's `S` times a factor, estimated from all probes.
    Expectation-maximisation finds the most likely `S`. If no probe shows an entry of `S`, only the factor changes it.

    Args:
        posterior: the posterior before the probes.
        runs: the timed runs, `[n]`. The runs of a probe do the same work with different variants.
        log_ratio: `log(measured / predicted)` of each run, `[n]`. The predicted times are those of the posterior.
        probe: a whole number for each run, `[n]`, equal for runs of a probe. A probe with a single run changes nothing.

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
        if len(mine) > 1:
            to_first = np.hstack([-np.ones((len(mine) - 1, 1)), np.eye(len(mine) - 1)])
            of_scores = to_first @ scores[mine]
            shown = to_first @ np.eye(len(spread))[variant[mine]]
            probes.append((shown, to_first @ log_ratio[mine], of_scores @ of_scores.T))
    if not probes:
        return posterior

    def square(shown, seen, unknown):
        """Return the squared Mahalanobis distance of a probe's differences from 0."""
        return float(seen @ np.linalg.solve(shown @ covariance @ shown.T + unknown, seen))

    squares, most = [square(*own) for own in probes], [MOST_SDS**2 * len(own[1]) for own in probes]
    covariance = before = covariance * (BELIEVED + sum(map(min, squares, most))) / (BELIEVED + sum(most) / MOST_SDS**2)
    # A probe's differences count with at most `MOST_SDS` standard deviations each.
    limits = [min(1.0, MOST_SDS * np.sqrt(len(own[1]) / max(square(*own), 1e-12))) for own in probes]
    for _ in range(EM_ROUNDS):
        total = BELIEVED * before
        for limit, (shown, seen, unknown) in zip(limits, probes, strict=True):
            gain = np.linalg.solve(shown @ covariance @ shown.T + unknown, shown @ covariance).T
            own = gain @ (limit * seen)
            total = total + np.outer(own, own) + covariance - gain @ shown @ covariance
        last, covariance = covariance, total / (BELIEVED + len(probes))
        if np.max(np.abs(covariance - last)) <= SETTLED * np.max(last):
            break
    spread = np.sqrt(np.diag(covariance))
    return dataclasses.replace(posterior, spread=spread, alike=_correlation(covariance, spread))
