"""Measured times condition a posterior: by the dense formula, whatever a probe's scale, little moved by outliers."""

import dataclasses

import jax
import numpy as np
import pytest
from _compilations import compilations
from _models import LINE, LINE_TRUTH, TILED, TILED_TRUTH, certain, random_posterior, runs_of, true_ns, two_models

from rlxjax.fit import Runs, Timings, condition, estimate, learned_spread, prior_posterior
from rlxjax.models import FFT

RUNS = runs_of(TILED, 2.0 ** np.arange(4, 12), depth=2.0)
COUNT = RUNS.shape[0]
PROBE = np.arange(COUNT) % 3
_LOOSE = random_posterior(TILED, TILED_TRUTH)
POSTERIOR = dataclasses.replace(_LOOSE, factor=np.linalg.cholesky(_LOOSE.factor @ _LOOSE.factor.T))
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def predicted(posterior, runs=RUNS):
    """Return predictions in ns and the standard deviations of their logarithms, the own error left out."""
    found = estimate(posterior, runs)
    return np.asarray(found.time_ns), np.sqrt(np.sum(np.asarray(found.scores) ** 2, -1))


def logs_of(posterior):
    """Return the unknowns: logarithms of the coefficients, then weights."""
    return np.concatenate([np.log(jax.tree.leaves(posterior.coefficients)), np.ravel(posterior.weights)])


def measured(posterior, runs=RUNS, sd=0.02, seed=0, probe=None):
    """Return times near the predicted ones, each probe at a pace of its own."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(0.0, sd, runs.shape)
    return predicted(posterior, runs)[0] * np.exp(noise + (0.0 if probe is None else rng.normal(0.0, 1.0, 9)[probe]))


def jacobian_of(posterior, runs):
    """Return how the logarithms of predictions change with the unknowns, by differences."""
    steps, count = 1e-5, len(jax.tree.leaves(posterior.coefficients))

    def log_ns(move):
        values, structure = jax.tree.flatten(posterior.coefficients)
        moved = structure.unflatten((np.array(values) * np.exp(move[:count])).tolist())
        weights = posterior.weights + move[count:].reshape(posterior.weights.shape)
        return np.log(estimate(dataclasses.replace(posterior, coefficients=moved, weights=weights), runs).time_ns)

    return np.stack([(log_ns(e) - log_ns(-e)) / (2 * steps) for e in steps * np.eye(len(posterior.factor))], -1)


def dense(posterior, jacobian, log_ratio, variance, probe):
    """Return the mean and covariance of the unknowns, each probe's scale an unknown of its own with a flat prior."""
    scales = (probe[:, None] == np.unique(probe)).astype(float)
    design, noise = np.hstack([jacobian, scales]), np.diag(1.0 / variance)
    precision = design.T @ noise @ design
    size = len(posterior.factor)
    precision[:size, :size] += np.linalg.inv(posterior.factor @ posterior.factor.T)
    covariance = np.linalg.inv(precision)
    return (covariance @ design.T @ noise @ log_ratio)[:size], covariance[:size, :size]


@pytest.mark.parametrize("runs_a_time", [1, 2])
def test_the_step_is_the_dense_formula_with_every_scale_an_unknown_of_times_of_several_runs_too(runs_a_time):
    factor, found, count = POSTERIOR.factor, estimate(POSTERIOR, RUNS), COUNT // runs_a_time
    jacobian = np.linalg.solve(factor.T, np.asarray(found.scores).T).T
    if runs_a_time == 1:
        np.testing.assert_allclose(jacobian, jacobian_of(POSTERIOR, RUNS), atol=1e-8)
    of_time, probe = np.arange(COUNT) // runs_a_time, PROBE[:count]
    sums_ns = np.bincount(of_time, found.time_ns)
    shares = (of_time == np.arange(count)[:, None]) * np.asarray(found.time_ns) / sums_ns[:, None]
    rng = np.random.default_rng(0)
    time_ns = sums_ns * np.exp(rng.normal(0.0, 0.02, count) + rng.normal(0.0, 1.0, 9)[probe])
    known = condition(POSTERIOR, RUNS, time_ns, measurement=of_time, probe=probe)
    variance = shares**2 @ np.asarray(found.spread) ** 2
    mean, covariance = dense(POSTERIOR, shares @ jacobian, np.log(time_ns / sums_ns), variance, probe)
    np.testing.assert_allclose(logs_of(known) - logs_of(POSTERIOR), mean, **EXACT)
    np.testing.assert_allclose(known.factor @ known.factor.T, covariance, **EXACT)
    assert np.all(np.triu(known.factor, 1) == 0.0)
    assert np.all(np.diag(known.factor) > 0.0)
    kept = {"coefficients": POSTERIOR.coefficients, "weights": POSTERIOR.weights, "factor": POSTERIOR.factor}
    assert dataclasses.replace(known, **kept) == POSTERIOR


def linear_posterior():
    """Return a posterior whose coefficients are known: its predictions' logarithms are linear in the weights."""
    found = certain(TILED, TILED_TRUTH, sd=0.05, spread=0.1)
    sds = np.full(len(found.factor), 0.05)
    sds[: len(TILED_TRUTH)] = 1e-12
    return dataclasses.replace(found, factor=np.diag(sds))


def test_probes_one_after_the_other_in_any_order_say_what_they_say_at_once():
    before = linear_posterior()
    time_ns = measured(before, sd=0.05, probe=PROBE)
    at_once = condition(before, RUNS, time_ns, probe=PROBE)
    assert np.max(np.abs(logs_of(at_once) - logs_of(before))) > 1e-3
    for order in ([0, 1, 2], [2, 0, 1]):
        known = before
        for mine in (probe == PROBE for probe in order):
            runs = jax.tree.map(lambda column: np.broadcast_to(column, COUNT)[mine], RUNS)  # noqa: B023 - used at once
            known = condition(known, runs, time_ns[mine])
        np.testing.assert_allclose(logs_of(known), logs_of(at_once), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(known.factor, at_once.factor, rtol=1e-8, atol=1e-12)


def test_one_factor_of_all_times_of_a_probe_and_one_time_alone_say_nothing():
    time_ns = measured(POSTERIOR)
    paces = (1.0, np.array([3.0, 0.2, 50.0])[PROBE])
    one, other = (condition(POSTERIOR, RUNS, time_ns * pace, probe=PROBE) for pace in paces)
    np.testing.assert_allclose(logs_of(one), logs_of(other), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(one.factor, other.factor, rtol=1e-10, atol=1e-14)
    assert condition(POSTERIOR, RUNS, measured(POSTERIOR, sd=0.5), probe=np.arange(COUNT)) == POSTERIOR
    assert condition(POSTERIOR, runs_of(TILED, np.zeros(0)), []) is POSTERIOR


def test_times_as_predicted_move_nothing_and_make_every_prediction_surer():
    time_ns, sds = predicted(POSTERIOR)
    known = condition(POSTERIOR, RUNS, time_ns)
    np.testing.assert_allclose(logs_of(known), logs_of(POSTERIOR), rtol=1e-12, atol=1e-12)
    assert np.sum(np.log(np.diag(known.factor))) < np.sum(np.log(np.diag(POSTERIOR.factor))) - 1.0
    # Whatever was measured, no sum of unknowns is less sure.
    assert np.all(predicted(known)[1] <= sds * (1 + 1e-12))
    for posterior in (known, condition(POSTERIOR, RUNS, measured(POSTERIOR, sd=0.3), probe=PROBE)):
        gain = POSTERIOR.factor @ POSTERIOR.factor.T - posterior.factor @ posterior.factor.T
        assert np.linalg.eigvalsh(gain).min() > -1e-12


def test_one_time_that_is_far_off_moves_little():
    time_ns = predicted(POSTERIOR)[0]
    off = time_ns * np.where(np.arange(COUNT) == 5, 3.0, 1.0)
    near = time_ns * np.where(np.arange(COUNT) == 5, np.exp(2.5 * 0.03), 1.0)  # past where the loss is linear
    moved, little = (np.log(predicted(condition(POSTERIOR, RUNS, its))[0] / time_ns) for its in (off, near))
    others = np.arange(COUNT) != 5
    assert np.max(np.abs((moved - moved.mean())[others])) < 0.03
    assert np.max(np.abs(moved)) < 2.0 * np.max(np.abs(little))


def test_weakly_known_machines_are_learnt_from_a_prior():
    batch, n_fft = (grid.ravel() for grid in np.meshgrid(4.0 ** np.arange(6), [64.0, 512.0, 4096.0]))
    runs, before = Runs.checked(FFT, "fft", batch=batch, n_fft=n_fft), prior_posterior(FFT)
    structure, values = jax.tree.structure(before.coefficients), np.array(jax.tree.leaves(before.coefficients))
    truth = structure.unflatten((values * np.linspace(0.8, 1.25, len(values))).tolist())
    time_ns = true_ns(truth, runs) * 7.0
    known = condition(before, runs, time_ns)
    errors = [np.std(np.log(time_ns / predicted(posterior, runs)[0])) for posterior in (before, known)]
    assert errors[1] < 0.2 * errors[0]


def test_a_calibration_follows_the_measured_ratio_and_its_other_models_stay():
    made, posterior = two_models(), certain(LINE, LINE_TRUTH, sd=0.2, spread=0.01)
    own = dataclasses.replace(made.of("line"), posterior=posterior)
    before = dataclasses.replace(made, models={**made.models, "line": own})
    runs, at = runs_of(LINE, [1000.0, 4000.0, 2.0**15]), 4000.0
    # The second variant takes 1.2 times as long beside the first as it is said to, the machine half as long again.
    time_ns = 1.5 * predicted(posterior, runs)[0] * np.where(np.asarray(runs.variant) == 1, 1.2, 1.0)
    timings = Timings.checked(LINE, variant=runs.variant, n=runs.inputs["n"], time_ns=time_ns)
    after = before.updated(timings)
    ratios = [
        now.predict_ns("blocked", at, model="line") / now.predict_ns("plain", at, model="line")
        for now in (before, after)
    ]
    assert 1.05 < ratios[1] / ratios[0] < 1.21
    assert after.of("tiled") is before.of("tiled")
    assert [*after.models] == [*before.models]
    line, known = after.of("line"), before.of("line")
    assert (line.provenance, line.held_out, line.cautions) == (known.provenance, known.held_out, known.cautions)
    inside = [of.in_domain(size) for of in (known, line) for size in (2.0**14, 2.0**16)]
    assert inside == [False, False, True, False]
    # Times that say nothing leave all as it is.
    assert before.updated(timings, probe=np.arange(len(time_ns))) == before


OTHER = Timings.checked(FFT, variant="fft", batch=[8, 64], n_fft=[256, 256], time_ns=[1e5, 2e5])
BEYOND = Runs(TILED, 0, {"n": np.array([8.0, np.inf]), "depth": 1.0})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(
            ({"time_ns": np.where(np.arange(COUNT) == 2, bad, 1.0)}, r"time_ns\[2\]: expected a positive finite number")
            for bad in (0.0, -1.0, np.nan, np.inf)
        ),
        ({"time_ns": np.ones(3)}, f"time_ns: expected a time for each of {COUNT} runs, got 3; see `measurement`"),
        ({"time_ns": np.ones((COUNT, 1))}, "time_ns, runs: expected one axis each, got the shapes"),
        ({"probe": np.zeros(2, int)}, "probe: expected whole numbers of shape"),
        ({"probe": np.full(COUNT, 0.5)}, "probe: expected whole numbers"),
        ({"measurement": [0, 1]}, "measurement: expected whole numbers"),
        ({"measurement": np.zeros(COUNT, int)}, "measurement: expected every index from"),
        ({"runs": runs_of(LINE)}, "runs: expected .*model 'tiled' version 3, .* got model 'line' version 1"),
        (
            {"posterior": dataclasses.replace(POSTERIOR, spread=np.zeros(3))},
            "posterior.spread: expected positive numbers, got",
        ),
        (
            {"runs": BEYOND, "time_ns": np.ones(2)},
            r"runs\[1\]: the model cannot predict this run of 'loop' \(predicted time: inf ns\)",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(given, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        condition(**{"posterior": POSTERIOR, "runs": RUNS, "time_ns": np.ones(COUNT), **given})


def test_traced_times_and_those_of_a_model_that_is_not_held_are_refused():
    with pytest.raises(ValueError, match="^condition: expected .*, got traced values"):
        jax.jit(lambda time_ns: condition(POSTERIOR, RUNS, time_ns))(np.ones(COUNT))
    with pytest.raises(ValueError, match="^model: expected one of line, tiled, got 'fft'"):
        two_models().updated(OTHER)


def probes_of(posterior, errors):
    """Return probes of one workload each: runs of all variants, and the logarithms of their errors, each at a pace."""
    count, variants = errors.shape
    batch = np.repeat(np.arange(1.0, count + 1.0), variants)
    runs = Runs(posterior.model, np.tile(np.arange(variants), count), {"n": batch, "depth": np.ones(count * variants)})
    pace = np.random.default_rng(9).normal(0.0, 1.0, count)
    return runs, (errors + pace[:, None]).ravel(), np.repeat(np.arange(count), variants)


def test_spread_and_what_is_alike_follow_from_how_far_off_probes_were():
    before = dataclasses.replace(POSTERIOR, factor=1e-6 * np.eye(len(POSTERIOR.factor)), spread=np.full(3, 0.2))
    alike = np.array([[1.0, 0.8, 0.0], [0.8, 1.0, 0.0], [0.0, 0.0, 1.0]])
    truth = np.array([0.1, 0.1, 0.05])[:, None] * alike * np.array([0.1, 0.1, 0.05])
    errors = np.random.default_rng(0).multivariate_normal(np.zeros(3), truth, 1000)
    runs, log_ratio, probe = probes_of(before, errors)
    found = learned_spread(before, runs, log_ratio, probe)
    np.testing.assert_allclose(found.alike, found.alike.T)
    np.testing.assert_array_equal(np.diag(found.alike), 1.0)
    assert np.linalg.eigvalsh(found.alike).min() > -1e-12
    # Differences alone are seen: the variance of each is what it should be.
    own = found.spread[:, None] * found.alike * found.spread
    for i, j in ((0, 1), (0, 2), (1, 2)):
        seen, real = (square[i, i] + square[j, j] - 2.0 * square[i, j] for square in (own, truth))
        assert abs(seen / real - 1.0) < 0.15
    kept = {"spread": before.spread, "alike": before.alike}
    assert dataclasses.replace(found, **kept) == before
    # Neither the pace of a probe nor a probe of one time says anything.
    slower = learned_spread(before, runs, log_ratio + 5.0 * np.sin(probe), probe)
    np.testing.assert_allclose(slower.spread, found.spread, rtol=1e-9)
    assert learned_spread(before, runs, log_ratio, np.arange(len(probe))) is before


def test_few_probes_say_little_and_one_far_off_says_no_more_than_three_standard_deviations():
    before = dataclasses.replace(POSTERIOR, factor=1e-6 * np.eye(len(POSTERIOR.factor)), spread=np.full(3, 0.1))
    few = probes_of(before, np.zeros((2, 3)))
    little = learned_spread(before, *few)
    assert np.all((little.spread > 0.06) & (little.spread < 0.1))
    off, further = (probes_of(before, np.array([[0.0, size, 0.0]])) for size in (1.0, 100.0))
    wide, wider = (learned_spread(before, *own).spread for own in (off, further))
    assert np.all(wide > before.spread)
    np.testing.assert_allclose(wide, wider, rtol=1e-6)


def test_another_probe_compiles_nothing():
    before = dataclasses.replace(POSTERIOR, factor=1e-6 * np.eye(len(POSTERIOR.factor)))
    some, more = (probes_of(before, np.zeros((count, 3))) for count in (20, 21))

    def learn(runs, log_ratio, probe):
        known = condition(before, runs, 1e5 * np.exp(log_ratio), probe=probe)
        return learned_spread(known, runs, log_ratio, probe)

    learn(*some)
    compiled = len(compilations)
    learn(*more)
    assert len(compilations) == compiled
