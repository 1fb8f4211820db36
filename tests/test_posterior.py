"""The posterior: the correction, what is left to noise, intervals, and decisions with a probability."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import assert_gradient_is_the_finite_difference

import rlxjax as rx
from rlxjax import _posterior
from rlxjax._correction import KINDS, KNOTS, N_FEATURES, SLOPE_KNOTS, correction_features, kind_codes
from rlxjax._decision import decision
from rlxjax._latency import COEFFICIENT_NAMES, MAXIMA, TOP_K
from rlxjax.fit import LatencyEstimate, LatencyPosterior, corrected_terms_ns, estimate, fit_posterior

N_UNKNOWNS = len(COEFFICIENT_NAMES) + len(KINDS) * N_FEATURES
RNG = np.random.default_rng(0)
POSTERIOR = LatencyPosterior(
    coefficients=rx.typical_prior().median,
    weights=RNG.normal(0, 0.05, (len(KINDS), N_FEATURES)),
    factor=np.tril(RNG.normal(0, 0.02, (N_UNKNOWNS, N_UNKNOWNS))),
    spread=np.array([0.02, 0.04, 0.06, 0.08]),
)
#: Columns (path, batch, n_fft, k, n_segments, selection).
RUNS = (
    np.array([0, 1, 1, 2, 0, 1]),
    np.array([1.0, 64.0, 3000.0, 256.0, 9000.0, 8192.0]),
    np.array([64.0, 256.0, 400.0, 4096.0, 1024.0, 128.0]),
    np.array([4.0, 16.0, 64.0, 16.0, 1.0, 200.0]),
    np.array([2.0, 2.0, 1.0, 2.0, 4.0, 2.0]),
    np.array([MAXIMA, MAXIMA, TOP_K, MAXIMA, TOP_K, MAXIMA]),
)
KIND = kind_codes(RUNS[0], RUNS[5])


def log_ns(unknowns, run):
    """Return the logarithm of one run's prediction, given logarithms of coefficients and weights."""
    logs, weights = jnp.split(unknowns, [len(COEFFICIENT_NAMES)])
    coefficients = jax.tree.unflatten(jax.tree.structure(POSTERIOR.coefficients), list(jnp.exp(logs)))
    own = LatencyPosterior(coefficients, weights.reshape(len(KINDS), -1), POSTERIOR.factor, POSTERIOR.spread)
    return jnp.log(corrected_terms_ns(own, *run).total_ns())


def single_precision(column):
    return column.astype(np.int32 if column.dtype.kind == "i" else np.float32)


#: Where the features of shared work stand, before the slopes in k and the level.
TOWARDS_SHARING, SHARED = N_FEATURES - len(SLOPE_KNOTS) - 4, N_FEATURES - len(SLOPE_KNOTS) - 3


def unknowns():
    return np.concatenate([np.log(jax.tree.leaves(POSTERIOR.coefficients)), np.ravel(POSTERIOR.weights)])


def test_coefficients_are_as_sure_as_the_covariance_of_all_unknowns_says():
    covariance = POSTERIOR.factor @ POSTERIOR.factor.T
    expected = np.sqrt(np.diag(covariance)[: len(COEFFICIENT_NAMES)])
    np.testing.assert_allclose(jax.tree.leaves(POSTERIOR.coefficient_log_sd()), expected, rtol=1e-12)


def test_features_are_the_knots_passed_of_each_size_slopes_in_k_and_a_level():
    features = np.asarray(correction_features(KIND, *RUNS[1:5]))
    assert features.shape == (len(RUNS[0]), N_FEATURES)
    batch, n_fft, k, n_segments = RUNS[1:5]
    start = 0
    for size, (first, last, step) in zip((batch * n_fft * n_segments, batch, n_fft), KNOTS, strict=True):
        count = round((last - first) / step)
        knots = np.clip((np.log2(size) - first) / step, 0, count)
        np.testing.assert_allclose(features[:, start : start + count].sum(-1), knots - count // 2, atol=1e-12)
        start += count
    slope, *of_rows, of_length, level = features[:, start + 2 :].T
    np.testing.assert_allclose(slope, np.log2(k / 16) / 2)
    for found, low, high in zip(of_rows, SLOPE_KNOTS, SLOPE_KNOTS[1:], strict=False):
        np.testing.assert_allclose(found, slope * np.interp(np.log2(batch), [low, high], [0, 1]), atol=1e-12)
    np.testing.assert_allclose(of_length, slope * (np.clip(np.log2(n_fft), 6, 14) / 4 - 2.5), atol=1e-12)
    np.testing.assert_array_equal(level, 1.0)


@pytest.mark.parametrize(
    ("kind", "least_shared"), [("host", 2**17), ("maxima", 2**16), ("top_k", 2**16), ("block", 2**17)]
)
def test_a_correction_rises_towards_the_onset_of_sharing_and_has_a_level_beyond(kind, least_shared):
    samples = least_shared * np.array([1e-3, 0.25, 0.5, 1.0, 1.01, 64.0])
    features = np.asarray(correction_features(KINDS.index(kind), samples / 512, 256.0, 16.0, 2.0))
    np.testing.assert_allclose(features[:, TOWARDS_SHARING], [0, 0, 0.5, 1, 0, 0], atol=1e-12)
    np.testing.assert_array_equal(features[:, SHARED], [0, 0, 0, 0, 1, 1])
    few_rows = correction_features(KINDS.index(kind), 8.0, 2.0**20, 16.0, 2.0)
    assert few_rows[SHARED] == (
        kind == "host"
    )  # a device's tile of rows is not shared, however long they are


def test_a_correction_rises_by_its_weight_from_knot_to_knot_and_stays_level_beyond_the_last():
    (first, last, step), *_ = KNOTS
    count = round((last - first) / step)
    places = np.array([-1.0, 0.0, 1.0, 1.5, count, count + 1.0])
    samples = 2.0 ** (first + step * places)
    features = np.asarray(correction_features(0, samples / 64, 64.0, 16.0, 1.0))[:, :count]
    from_first = features - features[1]
    np.testing.assert_allclose(from_first[[0, 4, 5]], np.array([[0.0], [1.0], [1.0]]) * np.ones(count))
    np.testing.assert_allclose(from_first[[2, 3], :3], [[1, 0, 0], [1, 0.5, 0]], atol=1e-12)


def test_features_of_numpys_arrays_are_numpys_and_equal_those_of_jaxs():
    path, *sizes, selection = RUNS
    kind, features = kind_codes(path, selection), correction_features(KIND, *sizes)
    assert isinstance(kind, np.ndarray)
    assert isinstance(features, np.ndarray)
    traced_kind = jax.jit(kind_codes)(path, selection)
    traced = jax.jit(correction_features)(traced_kind, *sizes)
    np.testing.assert_array_equal(traced_kind, kind)
    np.testing.assert_allclose(traced, features, atol=1e-12)


def test_kinds_tell_forms_of_the_selection_apart_on_the_fused_path_alone():
    paths = [path.code for path in (rx.Path.HOST, rx.Path.FUSED, rx.Path.BLOCK)]
    for selection, fused in ((MAXIMA, "maxima"), (TOP_K, "top_k")):
        assert [KINDS[code] for code in kind_codes(np.array(paths), selection)] == ["host", fused, "block"]


def test_the_parts_sum_to_the_prediction_and_the_correction_is_a_factor_of_the_terms():
    terms = corrected_terms_ns(POSTERIOR, *RUNS)
    alone = rx.predict_latency_ns(POSTERIOR.coefficients, *RUNS)
    weights = POSTERIOR.weights[np.asarray(kind_codes(RUNS[0], RUNS[5]))]
    factor = np.exp(np.sum(np.asarray(correction_features(KIND, *RUNS[1:5])) * weights, -1))
    np.testing.assert_allclose(terms.total_ns(), alone * factor, rtol=1e-12)
    np.testing.assert_allclose(estimate(POSTERIOR, *RUNS).time_ns, alone * factor, rtol=1e-12)


def test_scores_are_the_derivatives_by_the_unknowns_times_the_factor():
    scores = np.asarray(estimate(POSTERIOR, *RUNS).scores)
    for index in range(len(RUNS[0])):
        run = [column[index] for column in RUNS]
        gradient = jax.grad(log_ns)(unknowns(), run)
        np.testing.assert_allclose(scores[index], gradient @ POSTERIOR.factor, rtol=1e-9, atol=1e-12)


def test_the_gradient_by_the_unknowns_is_that_of_finite_differences():
    each = np.tile(unknowns(), (len(RUNS[0]), 1))
    assert_gradient_is_the_finite_difference(lambda values: jax.vmap(log_ns)(values, RUNS), each)


def test_what_two_runs_share_cancels_in_their_difference():
    one, other = (estimate(POSTERIOR, *(column[i] for column in RUNS)) for i in (1, 5))
    found = decision(one, other)
    both = np.stack([one.time_ns * one.scores, other.time_ns * other.scores])
    covariance = both @ both.T + np.diag(
        [(one.time_ns * one.spread) ** 2, (other.time_ns * other.spread) ** 2]
    )
    difference = np.array([-1.0, 1.0])
    np.testing.assert_allclose(found.margin_sd_ns, np.sqrt(difference @ covariance @ difference), rtol=1e-9)
    np.testing.assert_allclose(found.margin_ns, other.time_ns - one.time_ns)
    np.testing.assert_allclose(found.temperature_ns * np.pi / np.sqrt(3), found.margin_sd_ns)
    np.testing.assert_allclose(found.probability, jax.nn.sigmoid(found.margin_ns / found.temperature_ns))


def test_a_run_against_itself_is_undecided_and_the_probabilities_of_both_sides_sum_to_one():
    one, other = (estimate(POSTERIOR, *(column[i] for column in RUNS)) for i in (0, 4))
    assert float(decision(one, one).probability) == 0.5
    assert decision(one, one).verdict() == "undecided"
    both = decision(one, other).probability + decision(other, one).probability
    np.testing.assert_allclose(both, 1.0)


def test_verdicts_follow_the_probability():
    times = jnp.array([1.0, 1.0, 1.0])
    exact = LatencyEstimate(times, jnp.zeros((3, 1)), jnp.full(3, 0.1))
    other = LatencyEstimate(jnp.array([2.0, 1.0, 0.4]), jnp.zeros((3, 1)), jnp.full(3, 0.1))
    assert decision(exact, other).verdict().tolist() == ["fuse", "undecided", "keep"]
    with pytest.raises(ValueError, match="sure: expected a probability above 0.5, got 0.5"):
        decision(exact, other).verdict(0.5)


@pytest.fixture(scope="module")
def timings():
    """Timings of a machine that is the typical one with a correction, 3 % noisy."""
    rows, lengths = 2.0 ** np.arange(13), (64.0, 256.0, 1024.0)
    grid = [
        (path, form, b, n) for path, form in ((0, 0), (1, 0), (1, 1), (2, 0)) for b in rows for n in lengths
    ]
    path, form, batch, n_fft = (np.array(column) for column in zip(*grid, strict=True))
    sizes = (batch, n_fft, np.full(len(grid), 16.0), np.full(len(grid), 2.0))
    truth = corrected_terms_ns(POSTERIOR, path, *sizes, form).total_ns()
    noisy = np.asarray(truth) * np.exp(np.random.default_rng(1).normal(0, 0.03, len(grid)))
    checked = rx.Timings.checked(
        path=path, batch=batch, n_fft=n_fft, k=sizes[2], n_segments=sizes[3], time_ns=noisy
    )
    return dataclasses.replace(checked, selection=form.astype(np.int32)), np.asarray(truth)


@pytest.fixture(scope="module")
def fitted(timings):
    return fit_posterior(timings[0])


def runs_of(timings):
    sizes = (timings.batch, timings.n_fft, timings.k, timings.n_segments)
    return (timings.path, *sizes, timings.selection)


def test_the_whole_is_nearer_the_truth_than_the_terms_alone_and_than_the_noise(timings, fitted):
    measured, truth = timings
    whole = np.asarray(estimate(fitted.posterior, *runs_of(measured)).time_ns)
    alone = np.asarray(rx.predict_latency_ns(fitted.terms.coefficients, *runs_of(measured)))
    errors = [np.abs(times / truth - 1).mean() for times in (whole, alone, measured.time_ns)]
    assert errors[0] < errors[1]
    assert errors[0] < errors[2]


def test_intervals_cover_what_they_say(timings, fitted):
    measured, truth = timings
    found = estimate(fitted.posterior, *runs_of(measured))
    again = truth * np.exp(np.random.default_rng(2).normal(0, 0.03, len(truth)))
    z = np.log(again / np.asarray(found.time_ns)) / np.asarray(found.log_sd())
    assert 0.85 <= np.mean(np.abs(z) <= _posterior.COVERED_SDS) <= 0.99


def test_a_known_correction_is_taken_off_the_times_and_added_to_what_is_found(timings):
    measured, _ = timings
    known = rx.transferred_prior(POSTERIOR)
    path, *sizes, form = runs_of(measured)
    features = np.asarray(correction_features(kind_codes(path, form), *sizes))
    factors = np.exp(np.sum(features * known.correction[np.asarray(kind_codes(path, form))], -1))
    shifted = dataclasses.replace(measured, time_ns=measured.time_ns / factors)
    found = fit_posterior(measured, known)
    plain = fit_posterior(shifted, known._replace(correction=0.0))
    np.testing.assert_allclose(found.posterior.weights, plain.posterior.weights + known.correction, atol=1e-9)
    np.testing.assert_allclose(
        jax.tree.leaves(found.posterior.coefficients),
        jax.tree.leaves(plain.posterior.coefficients),
        rtol=1e-9,
    )
    np.testing.assert_allclose(found.posterior.factor, plain.posterior.factor, atol=1e-9)
    np.testing.assert_array_equal(rx.prior_posterior(known).weights, known.correction)


def test_few_timings_do_better_with_what_a_like_machine_says(timings):
    measured, truth = timings
    weights = np.zeros(len(truth))
    weights[np.random.default_rng(3).permutation(len(truth))[:24]] = 1.0
    errors = [
        np.abs(np.asarray(estimate(fit.posterior, *runs_of(measured)).time_ns) / truth - 1)[weights == 0]
        for fit in (
            fit_posterior(measured, prior, weights) for prior in (None, rx.transferred_prior(POSTERIOR))
        )
    ]
    assert errors[1].mean() < 0.7 * errors[0].mean()


def test_left_out_timings_change_nothing(timings):
    measured, _ = timings
    weights = np.where(measured.batch == 64, 0.0, 1.0)
    spoiled = dataclasses.replace(measured, time_ns=np.where(weights > 0, measured.time_ns, 1e12))
    one, other = fit_posterior(measured, weights=weights), fit_posterior(spoiled, weights=weights)
    jax.tree.map(np.testing.assert_array_equal, one.posterior, other.posterior)


def test_one_timing_a_thousandfold_off_barely_moves_the_predictions(timings, fitted):
    measured, _ = timings
    wild = np.array(measured.time_ns)
    wild[20] *= 1000.0
    found = fit_posterior(dataclasses.replace(measured, time_ns=wild))
    before, after = (
        np.asarray(estimate(fit.posterior, *runs_of(measured)).time_ns) for fit in (fitted, found)
    )
    assert np.abs(after / before - 1).mean() < 0.01


def test_a_kind_without_timings_is_unknown(timings, fitted):
    measured, _ = timings
    weights = np.where(measured.path == rx.Path.BLOCK.code, 0.0, 1.0)
    found = fit_posterior(measured, weights=weights)
    assert np.isnan(found.left_out_error[KINDS.index("block")])
    assert found.posterior.spread[KINDS.index("block")] == _posterior.UNKNOWN_SPREAD
    assert not np.any(found.posterior.weights[KINDS.index("block")])
    sds = [np.asarray(estimate(fit.posterior, *runs_of(measured)).log_sd()) for fit in (found, fitted)]
    assert np.all(sds[0][weights == 0] > sds[1][weights == 0])


def test_estimates_are_the_same_jitted_mapped_and_in_single_precision():
    eager = estimate(POSTERIOR, *RUNS)
    mapped = jax.vmap(lambda *run: estimate(POSTERIOR, *run))(*RUNS)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-12), eager, mapped)
    with jax.enable_x64(False):
        single = estimate(jax.tree.map(np.float32, POSTERIOR), *map(single_precision, RUNS))
    np.testing.assert_allclose(single.time_ns, eager.time_ns, rtol=1e-4)
    np.testing.assert_allclose(single.log_sd(), eager.log_sd(), rtol=1e-3)
