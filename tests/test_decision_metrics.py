import itertools
import math

import numpy as np
import pytest
from scipy import stats

from benchmarks import decision_metrics as metrics
from calibrate.workloads import SAME_RESULT, Cell, Grid
from rlxjax.fit import COVERED_SDS, LatencyEstimate

RNG = np.random.default_rng(0)
SHAPE = (60, len(SAME_RESULT))
MEASURED = np.exp(RNG.normal(0.0, 0.5, SHAPE))
MEASURED[:10, 2] = np.nan
PREDICTED = MEASURED * np.exp(RNG.normal(0.0, 0.2, SHAPE))
NOISE = RNG.uniform(0.0, 0.1, SHAPE)


def estimate_of(log_ns, scores, spread):
    return LatencyEstimate(np.exp(log_ns), np.asarray(scores), np.asarray(spread))


def test_workloads_hold_the_cells_of_the_same_result_in_their_columns():
    cells = Grid().cells()
    found = metrics.workloads_of(cells)
    assert len(found.sizes) == len({cell[1:] for cell in cells})
    for sizes, row in zip(found.sizes, found.place, strict=True):
        assert [cells[i] for i in row] == [Cell(name, *sizes) for name in SAME_RESULT]


def test_a_workload_with_one_alternative_leaves_nothing_to_pick():
    cells = [Cell("fast", 1, 64, 4), Cell("ultra", 1, 64, 4), Cell("fast", 4, 64, 4), Cell("block", 4, 64, 4)]
    found = metrics.workloads_of(cells)
    assert found.sizes.tolist() == [[4, 64, 4]]
    np.testing.assert_array_equal(found.table(np.arange(4.0)), [[2.0, np.nan, np.nan, 3.0]])


def test_errors_are_means_by_strategy():
    cells = [Cell("fast", 1, 64, 4), Cell("block", 1, 64, 4), Cell("fast", 4, 64, 4)]
    found = metrics.errors_by_strategy(cells, np.array([110.0, 50.0, 70.0]), np.full(3, 100.0))
    assert found == pytest.approx({"fast": 0.2, "block": 0.5})


def test_regret_is_that_of_a_loop():
    expected = []
    for mine, timed in zip(PREDICTED, MEASURED, strict=True):
        there = [i for i in range(len(timed)) if not math.isnan(timed[i])]
        pick = min(there, key=lambda i: mine[i])
        expected.append(timed[pick] / min(timed[i] for i in there) - 1.0)
    np.testing.assert_allclose(metrics.regrets(np.where(np.isnan(MEASURED), np.nan, PREDICTED), MEASURED), expected)


def test_ordering_is_that_of_a_loop():
    right = total = 0
    for mine, timed, noisy in zip(PREDICTED, MEASURED, NOISE, strict=True):
        for i, j in itertools.combinations(range(len(timed)), 2):
            if math.isnan(timed[i]) or math.isnan(timed[j]):
                continue
            low, high = sorted((timed[i], timed[j]))
            if high / low - 1.0 > max(0.03, 2.0 * noisy[i], 2.0 * noisy[j]):
                total += 1
                right += (mine[i] - mine[j]) * (timed[i] - timed[j]) > 0
    found = metrics.ordering(PREDICTED, MEASURED, NOISE)
    assert found == pytest.approx((right / total, total))
    assert 0.5 < found.share < 1.0


def test_a_perfect_prediction_has_no_regret_and_the_right_order():
    assert metrics.Spread.of(metrics.regrets(MEASURED, MEASURED)) == (0.0, 0.0, 0.0)
    assert metrics.ordering(MEASURED, MEASURED, NOISE).share == 1.0
    assert metrics.rank_correlation(MEASURED, MEASURED) == pytest.approx((1.0, 1.0))


def test_the_reverse_of_a_perfect_prediction_has_all_wrong():
    assert metrics.ordering(1.0 / MEASURED, MEASURED, NOISE).share == 0.0
    assert metrics.rank_correlation(1.0 / MEASURED, MEASURED) == pytest.approx((-1.0, -1.0))


def test_a_tie_orders_nothing():
    assert metrics.ordering(np.ones(SHAPE), MEASURED, NOISE).share == 0.0
    assert metrics.rank_correlation(np.ones(SHAPE), MEASURED) == (0.0, 0.0)


def test_the_rank_correlation_within_workloads_is_the_mean_of_theirs():
    rows = [
        stats.spearmanr(mine[~np.isnan(timed)], timed[~np.isnan(timed)]).statistic
        for mine, timed in zip(PREDICTED, MEASURED, strict=True)
    ]
    assert metrics.rank_correlation(PREDICTED, MEASURED).within == pytest.approx(np.mean(rows))


def test_brier_and_reliability_are_those_of_a_loop():
    probability = RNG.uniform(0.0, 1.0, 500)
    happened = RNG.uniform(0.0, 1.0, 500) < probability
    expected = sum((p - y) ** 2 for p, y in zip(probability, happened, strict=True)) / 500
    assert metrics.brier_score(probability, happened) == pytest.approx(expected)
    bins = metrics.reliability(probability, happened)
    assert sum(found.decisions for found in bins) == 500
    for found in bins:
        mine = [
            (max(p, 1 - p), (p >= 0.5) == y)
            for p, y in zip(probability, happened, strict=True)
            if found.low <= max(p, 1 - p) < found.high
        ]
        assert found.decisions == len(mine)
        np.testing.assert_allclose((found.said, found.happened), np.mean(np.array(mine, float), axis=0))
        assert found.low <= found.said < found.high


def test_certain_and_right_has_a_brier_score_of_zero_and_lies_in_the_last_bin():
    happened = np.array([True, False, True])
    assert metrics.brier_score(happened.astype(float), happened) == 0.0
    assert metrics.reliability(happened.astype(float), happened) == [(0.99, 1.0, 3, 1.0, 1.0)]


def world(rows=400, seed=0):
    """Return an estimate of cells, and times drawn from it."""
    rng = np.random.default_rng(seed)
    cells = [Cell(name, batch, 64, 4) for batch in range(1, rows + 1) for name in SAME_RESULT]
    log_ns = rng.normal(10.0, 0.15, len(cells))
    scores, spread = rng.normal(0.0, 0.02, (len(cells), 5)), np.full(len(cells), 0.08)
    # A draw of its own for each workload, so that many draws of the shared part are seen.
    shared = np.repeat(rng.standard_normal((rows, 5)), len(SAME_RESULT), axis=0)
    own = spread * rng.standard_normal(len(cells))
    times_ns = np.exp(log_ns + np.sum(scores * shared, -1) + own)
    return cells, estimate_of(log_ns, scores, spread), times_ns


def test_draws_from_the_model_are_covered_and_its_probabilities_come_true():
    cells, found, times_ns = world()
    covered = metrics.coverage(found, times_ns)
    assert covered.timings == len(cells)
    assert covered.p_value > 0.05
    workloads = metrics.workloads_of(cells)
    measured = workloads.table(times_ns)
    pairs = metrics.pairs_of(measured)
    assert len(pairs.workload) == 6 * len(measured)
    probability = metrics.faster_probability(found, workloads, pairs)
    one, other = pairs.of(measured)
    certain = np.subtract(*pairs.of(workloads.table(found.time_ns))) < 0
    score = metrics.brier_score(probability, one < other)
    assert score < metrics.brier_score(certain.astype(float), one < other)
    for found_bin in metrics.reliability(probability, one < other):
        assert found_bin.happened == pytest.approx(found_bin.said, abs=4.0 * 0.5 / math.sqrt(found_bin.decisions))


def test_intervals_too_narrow_do_not_pass():
    _, found, times_ns = world()
    narrow = LatencyEstimate(found.time_ns, found.scores / 2, found.spread / 2)
    assert metrics.coverage(narrow, times_ns).p_value < 1e-6


def test_coverage_counts_what_lies_within_the_bounds():
    found = estimate_of(np.zeros(4), np.zeros((4, 1)), np.full(4, 0.1))
    times_ns = np.exp(0.1 * COVERED_SDS * np.array([0.0, 0.99, -0.99, 1.01]))
    assert metrics.coverage(found, times_ns)[:2] == (0.75, 4)
