import numpy as np
import pytest

from calibrate import plan
from calibrate.design import (
    block_estimates,
    by_workload,
    design_posterior,
    estimates,
    preparation_order,
    seconds_of,
)
from calibrate.workloads import SHOWN_BATCHES, SHOWN_K, SHOWN_N_FFT, WITHOUT_MODEL, Cell, Grid, runs_model
from rlxjax import information_gain, typical_prior
from rlxjax.models import WELCH

#: Takes long: `make test-all` runs it.
pytestmark = pytest.mark.slow

GRID = Grid(
    batches=(1, 16, 64, 128, 1024),
    n_ffts=(64, 128, 256, 1024),
    ks=(4, 16),
    held_out_batches=(128,),
    held_out_n_ffts=(128,),
)
CELLS = GRID.cells([1024])
#: None of these is shown, runs a model or is held out.
PLAIN = [cell for cell in CELLS if cell.n_fft == 64 and cell.batch != 128]
PRIOR = typical_prior()
POSTERIOR = design_posterior(PRIOR, WELCH.facts)


def is_seen(key):
    return GRID.place(*key[:2]) == "fit"


@pytest.fixture(scope="module")
def order():
    return preparation_order(CELLS, GRID, POSTERIOR, np.random.default_rng(0))


@pytest.fixture(scope="module")
def plain_order():
    return preparation_order(PLAIN, GRID, POSTERIOR, np.random.default_rng(0))


def test_the_order_holds_every_cell_once_and_the_strategies_of_a_workload_together(order):
    assert sorted(order) == sorted(CELLS)
    assert [cell for block in by_workload(order).values() for cell in block] == order


def test_what_is_shown_comes_first_then_what_runs_a_model(order):
    blocks = by_workload(order)
    ranks = []
    for key, cells in blocks.items():
        is_shown = key[0] in SHOWN_BATCHES and key[1:] == (SHOWN_N_FFT, SHOWN_K)
        ranks.append(0 if is_shown else 1 if any(map(runs_model, cells)) else 2)
    assert ranks == sorted(ranks)
    assert set(ranks) == {0, 1, 2}


def test_each_third_place_of_the_others_is_a_held_out_workload(order):
    blocks = by_workload(order)
    chosen = [key for key, cells in blocks.items() if not any(map(runs_model, cells))]
    chosen = [key for key in chosen if key[1:] != (SHOWN_N_FFT, SHOWN_K) or key[0] not in SHOWN_BATCHES]
    count = 3 * min(sum(map(is_seen, chosen)) // 2, sum(not is_seen(key) for key in chosen))
    assert count >= 9
    assert [is_seen(key) for key in chosen[:count]] == [True, True, False] * (count // 3)


def test_the_seed_moves_held_out_workloads_alone(order):
    other = preparation_order(CELLS, GRID, POSTERIOR, np.random.default_rng(1))
    assert other != order
    assert list(filter(is_seen, by_workload(other))) == list(filter(is_seen, by_workload(order)))


def test_without_anything_shown_the_first_is_the_best_choice_for_its_time(plain_order):
    blocks = by_workload(PLAIN)
    whole = block_estimates(POSTERIOR, list(blocks.values()))
    best = int(np.argmax(information_gain(whole) / seconds_of(whole)))
    assert next(iter(by_workload(plain_order))) == list(blocks)[best]


def test_a_block_has_a_run_of_each_strategy_and_those_left_out_say_nothing():
    cells = [Cell(strategy, 64, 256, 16) for strategy in WITHOUT_MODEL]
    whole, part = block_estimates(POSTERIOR, [cells, cells[1:]]).spread
    assert np.isfinite(whole).all()
    assert np.isfinite(part).tolist() == [False, *[True] * (len(cells) - 1)]


def test_a_campaign_of_held_out_workloads_alone_has_an_order():
    cells = [cell for cell in CELLS if not is_seen(cell[1:]) and not runs_model(cell)]
    assert sorted(preparation_order(cells, GRID, POSTERIOR, np.random.default_rng(0))) == sorted(cells)


def test_times_so_far_make_the_posterior_surer_and_too_few_make_none():
    first = [cell for cell in CELLS if cell.n_fft == 64 and not runs_model(cell)]
    times_ns = {cell: int(time_ns) for cell, time_ns in zip(first, estimates(POSTERIOR, first).time_ns, strict=True)}
    found = plan.posterior_so_far(CELLS, times_ns, PRIOR, WELCH.facts)
    known = np.trace(np.asarray(found.factor) @ np.asarray(found.factor).T)
    assert known < np.trace(np.asarray(POSTERIOR.factor) @ np.asarray(POSTERIOR.factor).T)
    np.testing.assert_allclose(estimates(found, first).time_ns, list(times_ns.values()), rtol=0.05)
    few = dict(list(times_ns.items())[:3])
    assert plan.posterior_so_far(CELLS, few, PRIOR, WELCH.facts) is None


def test_what_is_timed_before_is_counted_as_if_it_had_been_chosen(plain_order):
    for count in (1, 6):  # before and after the workloads that are chosen for the unknowns
        place = count * len(WITHOUT_MODEL)
        timed, others = plain_order[:place], plain_order[place:]
        left = [cell for cell in PLAIN if cell in others]
        again = preparation_order(left, GRID, POSTERIOR, np.random.default_rng(0), timed=timed)
        assert again == others
