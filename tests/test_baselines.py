import numpy as np
import pytest

from calibrate import baselines
from calibrate.samples import timings_of
from calibrate.workloads import WITHOUT_MODEL, Cell, Grid
from rlxjax import typical_prior
from rlxjax._fit import predicted_ns
from rlxjax._prior import wide_prior

GRID = Grid(batches=(1, 64, 512, 4096), n_ffts=(64, 256, 1024), ks=(4, 16))
CELLS = GRID.cells()
NAMES = np.array([cell.strategy for cell in CELLS])
SEEN = np.array([cell.batch != 512 for cell in CELLS])


def test_the_constant_is_the_geometric_mean_of_the_seen_of_a_strategy():
    cells = [Cell("fast", 1, 64, 4), Cell("fast", 4, 64, 4), Cell("block", 1, 64, 4), Cell("fast", 8, 64, 4)]
    found = baselines.geometric_means_ns(
        cells, np.array([1.0, 100.0, 7.0, 9.0]), np.array([True, True, True, False])
    )
    np.testing.assert_allclose(found, [10.0, 10.0, 7.0, 10.0])


def test_linear_fits_find_non_negative_truth_where_it_is_linear():
    truth = np.array([5e4, 0.0, 90.0, 0.2, 0.05, 0.0, 0.3, 11.0])
    features = baselines.linear_features(CELLS)
    measured = features @ truth
    found = baselines.fit_linear(CELLS, measured, SEEN)
    np.testing.assert_allclose(found.time_ns, measured, rtol=1e-6)


def test_linear_fits_stay_non_negative_and_are_no_worse_than_a_constant():
    measured = 1e5 * np.exp(np.random.default_rng(0).normal(0.0, 1.0, len(CELLS)))
    found = baselines.fit_linear(CELLS, measured, SEEN)
    assert set(found.coefficients) == set(WITHOUT_MODEL)
    assert min(values.min() for values in found.coefficients.values()) == 0.0
    for name in WITHOUT_MODEL:
        mine = SEEN & (name == NAMES)
        squares = np.mean((found.time_ns[mine] / measured[mine] - 1.0) ** 2)
        constant = np.sum(1.0 / measured[mine]) / np.sum(measured[mine] ** -2.0)
        assert squares <= np.mean((constant / measured[mine] - 1.0) ** 2) + 1e-12


def test_what_is_not_seen_changes_no_baseline():
    prior = typical_prior()
    measured = np.asarray(predicted_ns(prior.median, timings_of(CELLS, np.ones(len(CELLS)))))
    other = np.where(SEEN, measured, 17.0 * measured)
    for fit in (
        baselines.geometric_means_ns,
        lambda *of: baselines.fit_linear(*of).time_ns,
        lambda *of: np.array(list(vars(baselines.fit_greedily(*of, prior, (2.0,)).coefficients).values())),
    ):
        np.testing.assert_array_equal(fit(CELLS, measured, SEEN), fit(CELLS, other, SEEN))


def test_the_greedy_search_takes_back_a_step_that_lies_on_its_way():
    prior = typical_prior()
    truth = vars(prior.median) | {"host_call_ns": 4.0 * prior.median.host_call_ns}
    measured = np.asarray(predicted_ns(type(prior.median)(**truth), timings_of(CELLS, np.ones(len(CELLS)))))
    found = baselines.fit_greedily(CELLS, measured, SEEN, wide_prior(prior.median), (4.0, 2.0))
    assert found.moves == 1
    assert found.error == pytest.approx(0.0, abs=1e-9)
    assert found.coefficients.host_call_ns == pytest.approx(truth["host_call_ns"])


def test_the_greedy_search_never_gets_worse():
    prior, rng = typical_prior(), np.random.default_rng(1)
    predicted = np.asarray(predicted_ns(prior.median, timings_of(CELLS, np.ones(len(CELLS)))))
    measured = predicted * np.exp(rng.normal(0.0, 0.5, len(CELLS)))
    first = np.mean(np.abs(predicted / measured - 1.0)[SEEN])
    errors = [baselines.fit_greedily(CELLS, measured, SEEN, prior, (2.0, 1.2)[:n]).error for n in (1, 2)]
    assert errors[1] <= errors[0] < first
