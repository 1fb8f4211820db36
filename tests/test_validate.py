import numpy as np
import pytest

from calibrate.validate import built_in_ns, error_summaries
from calibrate.workloads import WITHOUT_MODEL, Cell, Grid
from rlxjax import (
    LatencyEstimate,
    block_graph_ns,
    fused_graph_ns,
    host_path_ns,
)

GRID = Grid()
CELLS = GRID.cells()


def test_built_in_predictions_are_the_references_formulas():
    formulas = {"host": host_path_ns, "fused": fused_graph_ns, "block": block_graph_ns}
    some = CELLS[::23]
    expected = [formulas[c.variant.split("_")[0]]("cpu", *c[1:], n_segments=c.n_segments) for c in some]
    np.testing.assert_allclose(built_in_ns(some), expected, rtol=1e-12)


def known(times_ns, spread):
    """Return an estimate whose uncertainty is each run's own."""
    return LatencyEstimate(times_ns, np.zeros((len(times_ns), 1)), np.full(len(times_ns), spread))


def test_errors_are_means_over_the_cells_of_each_place():
    measured = np.full(len(CELLS), 100.0)
    off = {"fit": 1.0, "interior": 2.0, "edge": 4.0}
    predicted = np.array([100.0 + off[GRID.place(c.batch, c.n_fft)] for c in CELLS])
    noise = np.linspace(0.0, 0.1, len(CELLS))
    seen = np.array([GRID.place(c.batch, c.n_fft) == "fit" for c in CELLS])
    terms_alone = measured * 1.08
    summaries = error_summaries(CELLS, measured, known(predicted, 0.03), terms_alone, noise, GRID, seen)
    assert list(summaries) == list(WITHOUT_MODEL)
    for strategy, summary in summaries.items():
        mine = [c for c in CELLS if c.strategy == strategy]
        out = [GRID.place(c.batch, c.n_fft) for c in mine if GRID.place(c.batch, c.n_fft) != "fit"]
        assert summary.fit == pytest.approx(0.01)
        assert summary.interior == pytest.approx(0.02)
        assert summary.edge == pytest.approx(0.04)
        assert summary.held_out == pytest.approx(np.mean([off[place] / 100 for place in out]))
        assert summary.held_out_cells == len(out)
        assert summary.terms_alone == pytest.approx(0.08)
        # 4.9 % either way hold nine tenths of what has a standard deviation of 3 %.
        assert summary.covered == 1.0
        assert summary.noise_floor == pytest.approx(noise[[c.strategy == strategy for c in CELLS]].mean())


def test_a_place_without_cells_has_no_error_rather_than_zero():
    cells = [Cell("fast", 1, 64, 4), Cell("fast", 4, 64, 4)]
    ones = np.ones(2)
    summary = error_summaries(cells, ones, known(ones, 0.1), ones, np.zeros(2), GRID, ones > 0)["fast"]
    assert (summary.interior, summary.edge, summary.held_out, summary.held_out_cells) == (None, None, None, 0)
