import numpy as np
import pytest

from calibrate.workloads import STRATEGIES, WITHOUT_MODEL, Cell, Grid, Signals, split_by_memory

GRID = Grid()


def workloads_of(cells, strategy):
    return {cell[1:] for cell in cells if cell.strategy == strategy}


def test_every_strategy_that_needs_no_model_measures_the_same_workloads():
    assert {*WITHOUT_MODEL, "learned"} == set(STRATEGIES)
    assert len({frozenset(workloads_of(GRID.cells(), strategy)) for strategy in WITHOUT_MODEL}) == 1
    assert not workloads_of(GRID.cells(), "learned")


def test_models_are_measured_at_their_segment_length_and_nowhere_else():
    cells = GRID.cells([256, 2048])
    assert {cell.n_fft for cell in cells if cell.strategy == "learned"} == {256, 2048}
    same = {workload for workload in workloads_of(cells, "fused-maxima") if workload[1] == 256}
    assert {workload for workload in workloads_of(cells, "learned") if workload[1] == 256} == same
    assert [cell for cell in cells if cell.strategy != "learned"] == GRID.cells()


def test_maxima_are_timed_where_they_may_select():
    assert GRID.cells((), "gpu") == [cell for cell in GRID.cells() if cell.strategy != "fused-maxima"]


def test_no_cell_exceeds_the_bound_on_samples():
    assert max(cell.batch * cell.n_fft for cell in GRID.cells()) <= GRID.max_samples


@pytest.mark.parametrize("place", ["fit", "interior", "edge"])
def test_the_grid_has_workloads_of_every_place(place):
    assert any(GRID.place(cell.batch, cell.n_fft) == place for cell in GRID.cells())


@pytest.mark.parametrize(
    ("values", "held_out"),
    [(GRID.batches, GRID.held_out_batches), (GRID.n_ffts, GRID.held_out_n_ffts)],
)
def test_whole_values_are_held_out_inside_the_range(values, held_out):
    assert set(held_out) < set(values)
    assert any(min(values) < value < max(values) for value in held_out)


def test_lengths_that_people_use_are_seen_and_held_out_whether_powers_of_two_or_not():
    assert {96, 160, 384, 400, 480, 1000, 1200, 1536} < set(GRID.n_ffts)
    for held_out in (True, False):
        lengths = {n_fft for n_fft in GRID.n_ffts if (n_fft in GRID.held_out_n_ffts) == held_out}
        assert {bool(n_fft & (n_fft - 1)) for n_fft in lengths} == {True, False}
    assert (min(GRID.batches), max(GRID.batches)) == (1, 131_072)
    assert (min(GRID.ks), max(GRID.ks)) == (1, 64)


def test_a_workload_is_fitted_exactly_if_neither_of_its_values_is_held_out():
    for cell in GRID.cells():
        out = cell.batch in GRID.held_out_batches or cell.n_fft in GRID.held_out_n_ffts
        assert (GRID.place(cell.batch, cell.n_fft) == "fit") == (not out)


def test_memory_splits_cells_at_the_limit_and_loses_none():
    cells = GRID.cells()
    limit = sorted(cell.working_bytes for cell in cells)[len(cells) // 2]
    fitting, too_large = split_by_memory(cells, limit)
    assert sorted(fitting + too_large) == sorted(cells)
    assert all(cell.working_bytes <= limit for cell in fitting)
    assert all(cell.working_bytes > limit for cell in too_large)


def test_signals_are_float32_rows_of_the_cell():
    cells = [Cell("ultra", 3, 64, 4), Cell("fast", 5, 64, 4), Cell("fused-top_k", 2, 128, 4)]
    cells += [Cell("fast", batch, 66, 4) for batch in (3, 40)]
    signals = Signals(cells)
    for cell in cells * 5:
        signal = signals.of(cell)
        assert signal.shape == (cell.batch, cell.params.frame_len)
        assert signal.dtype == np.float32
        assert signal.flags.c_contiguous
        assert np.isfinite(signal).all()


def test_a_cell_gets_other_rows_each_time_until_all_have_been_used():
    few, many = Cell("fast", 3, 64, 4), Cell("fast", 8, 64, 4)
    signals = Signals([few, many])
    rows = signals.of(many)
    for first in (0, 3, 0, 3):
        np.testing.assert_array_equal(signals.of(few), rows[first : first + 3])
    np.testing.assert_array_equal(signals.of(many), rows)


def test_signals_repeat_with_the_same_seed():
    cell = Cell("fast", 4, 64, 4)
    first, again, other = (Signals([cell], seed).of(cell) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
