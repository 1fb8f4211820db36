import numpy as np
import pytest

from calibrate.samples import PACE_VISITS, Visits, noise_floor, quantile_ns

CELL_NS = np.array([1e4, 3e5, 2e6, 5e3, 7e4])


def shuffled(n_rounds, cells=CELL_NS, seed=0, counts=None):
    """Return rounds of the cells in a new order each, at a constant pace."""
    rng = np.random.default_rng(seed)
    once = np.repeat(np.arange(len(cells)), counts if counts is not None else 1)
    cell = np.concatenate([rng.permutation(once) for _ in range(n_rounds)])
    return Visits(np.repeat(np.arange(n_rounds), len(once)), cell, cells[cell], len(cells))


def at_pace(visits, pace):
    return Visits(visits.round, visits.cell, visits.time_ns * pace, visits.n_cells)


def relative(time_ns):
    """Return times in parts of their geometric mean."""
    return time_ns / np.exp(np.mean(np.log(time_ns)))


def plain_quartiles(visits):
    logs = [np.log(visits.time_ns[visits.cell == cell]) for cell in range(visits.n_cells)]
    return np.exp([np.quantile(one, 0.25) for one in logs])


def test_a_constant_pace_gives_the_times_and_a_scale_scales_them():
    one_cell, one_round = shuffled(6, CELL_NS[:1]), Visits.of_rounds(CELL_NS[None])
    for visits in (shuffled(6), one_cell, one_round):
        np.testing.assert_allclose(quantile_ns(visits), CELL_NS[: visits.n_cells], rtol=1e-12)
    visits = shuffled(40)
    noisy = at_pace(visits, np.random.default_rng(0).lognormal(0.0, 0.1, 200))
    np.testing.assert_allclose(quantile_ns(at_pace(noisy, 3.0)), 3.0 * quantile_ns(noisy), rtol=1e-12)


@pytest.mark.parametrize("counts", [None, [1, 1, 1, 4, 4]])
def test_slow_and_quick_spells_change_no_cell_against_another(counts):
    """Whatever pace a spell has, it is the same for all of its visits."""
    visits = shuffled(200, counts=counts)
    spells = np.random.default_rng(1).lognormal(0.0, 0.5, 1 + len(visits.cell) // (4 * PACE_VISITS))
    slow = at_pace(visits, np.repeat(spells, 4 * PACE_VISITS)[: len(visits.cell)])
    np.testing.assert_allclose(relative(quantile_ns(slow)), relative(CELL_NS), rtol=0.01)


def test_a_pace_that_drifts_is_taken_out_where_a_plain_quartile_keeps_it():
    visits = shuffled(40)
    drift = at_pace(visits, np.exp(0.5 * np.sin(np.arange(len(visits.cell)) / 20)))
    with_pace, without = (
        np.max(np.abs(relative(of(drift)) / relative(CELL_NS) - 1)) for of in (quantile_ns, plain_quartiles)
    )
    assert with_pace < 0.02 < 0.04 < without


def test_the_times_are_in_the_mean_as_long_as_the_quartiles_of_the_visits():
    rng = np.random.default_rng(2)
    noisy = at_pace(shuffled(50), rng.lognormal(0.0, 0.3, 250))
    means = [np.mean(np.log(times)) for times in (quantile_ns(noisy), plain_quartiles(noisy))]
    assert means[0] == pytest.approx(means[1], rel=1e-12)


def test_rare_quick_and_rare_slow_times_of_a_cell_say_nothing():
    times = np.tile(CELL_NS, (50, 1))
    times[::10, 2] *= 0.5
    times[5::10, 2] *= 1000.0
    np.testing.assert_allclose(quantile_ns(Visits.of_rounds(times)), CELL_NS, rtol=1e-12)


def test_the_quartile_is_that_of_all_visits_of_a_cell():
    """Cells that say that the pace is constant stand beside one whose times vary."""
    counts = [4, 8, 8, 8, 8]
    visits = shuffled(30, counts=counts)
    varied = np.where(visits.cell == 0, np.random.default_rng(3).lognormal(0.0, 0.2, visits.cell.shape), 1.0)
    assert quantile_ns(at_pace(visits, varied))[0] == pytest.approx(
        plain_quartiles(at_pace(visits, varied))[0], rel=1e-9
    )


def test_two_halves_agree_better_than_quartiles_that_know_of_no_pace():
    """Spells of 60 visits, a quarter slower each, over the timings' own noise."""
    rng = np.random.default_rng(4)
    visits = shuffled(80, np.full(40, 1e5))
    spells = np.repeat(rng.lognormal(0.0, 0.25, 54), 60)[: len(visits.cell)]
    noisy = at_pace(visits, spells * rng.lognormal(0.0, 0.05, visits.cell.shape))
    halves = [noisy.in_rounds(np.arange(first, 80, 2)) for first in (0, 1)]
    with_pace, without = (np.std(np.log(of(halves[0]) / of(halves[1]))) for of in (quantile_ns, plain_quartiles))
    assert with_pace < without / 2


def test_rounds_are_taken_whole_and_in_order():
    visits = shuffled(4, counts=[1, 2, 1, 1, 3])
    np.testing.assert_array_equal(visits.rounds(), np.arange(4))
    some = visits.in_rounds(np.array([3, 1]))
    kept = np.isin(visits.round, [1, 3])
    np.testing.assert_array_equal(some.rounds(), [1, 3])
    np.testing.assert_array_equal(some.cell, visits.cell[kept])
    visits = Visits.of_rounds(np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    np.testing.assert_array_equal(visits.round, [0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(visits.cell, [0, 1, 0, 1, 0, 1])
    np.testing.assert_array_equal(visits.time_ns, [1, 2, 3, 4, 5, 6])


def test_noise_floor_compares_even_and_odd_rounds_as_many_of_each():
    times = np.array([[4.0, 9.0, 5.0], [8.0, 3.0, 6.0], [2.0, 9.0, 5.0], [6.0, 9.0, 7.0], [1.0, 1.0, 1.0]])
    even, odd = (quantile_ns(Visits.of_rounds(times[rows])) for rows in ([0, 2], [1, 3]))
    expected = np.abs(np.log(even / odd))
    assert np.all(expected > 0)
    np.testing.assert_allclose(noise_floor(Visits.of_rounds(times)), expected, rtol=1e-12)
    twice = Visits.of_rounds(np.repeat(times, 2, axis=0))
    np.testing.assert_allclose(noise_floor(twice), 0.0, atol=1e-12)
    assert np.isnan(noise_floor(Visits.of_rounds(np.ones((1, 3))))).all()
