"""What a fit is worth: errors by group, intervals that hold, and what is said of a calibration and of its machine."""

import types

import numpy as np
import pytest
from _campaigns import SUITE, toy_cell

from calibrate.judge import error_summaries, said_of_pace, verdict_on, what_pays, widened_spread
from rlxjax.calibration import ErrorSummary, Pace
from rlxjax.fit import COVERED, COVERED_SDS, Estimate


def known(times_ns, spread):
    """Return an estimate whose uncertainty is each run's own."""
    return Estimate(times_ns, np.zeros((len(times_ns), 1)), np.full(len(times_ns), spread))


def test_errors_are_means_over_the_cells_of_each_group_seen_and_not():
    cells = SUITE.cells()
    seen, measured = np.array([not cell.held_out for cell in cells]), np.full(len(cells), 100.0)
    predicted, noise = np.where(seen, 101.0, 104.0), np.linspace(0.0, 0.1, len(cells))
    summaries = error_summaries(cells, measured, known(predicted, 0.03), 1.08 * measured, noise, seen)
    assert list(summaries) == list(SUITE.model.variants)
    for group, summary in summaries.items():
        mine = np.array([cell.group == group for cell in cells])
        # 4.9 % either way hold nine tenths of what has a standard deviation of 3 %.
        expected = {"fit": 0.01, "held_out": 0.04, "terms_alone": 0.08, "covered": 1.0}
        expected |= {"held_out_cells": np.sum(mine & ~seen), "noise_floor": noise[mine].mean()}
        assert summary.model_dump() == pytest.approx(expected)
    ones = np.ones(2)  # a group without held-out cells has no error rather than 0
    summary = error_summaries([toy_cell(1, 4), toy_cell(2, 4)], ones, known(ones, 0.1), ones, ones, ones > 0)["at_once"]
    assert (summary.held_out, summary.covered, summary.held_out_cells) == (None, None, 0)


def test_intervals_hold_what_was_held_out_once_they_are_widened_and_never_get_narrower():
    rng = np.random.default_rng(0)
    variant, known_sd = np.repeat([0, 1], 50), np.full(100, 0.02)
    errors = rng.normal(0, np.where(variant == 0, 0.02, 0.3))
    wide = widened_spread(np.array([0.05, 0.05, 0.07]), variant, errors, known_sd)
    assert (wide[0], wide[2]) == (0.05, 0.07)
    reach = COVERED_SDS * np.hypot(known_sd, wide[variant])
    assert np.mean(np.abs(errors) <= reach) >= COVERED
    assert 0.2 < wide[1] < 0.45


def summary(held_out=0.04, covered=0.9, cells=20):
    return ErrorSummary(
        fit=0.03, terms_alone=None, covered=covered, held_out=held_out, held_out_cells=cells, noise_floor=0.02
    )


def test_small_errors_over_all_cells_are_ready_and_what_is_not_good_enough_is_a_caution_that_says_what_to_do():
    verdict = verdict_on({"one": summary(0.02, cells=30), "two": summary(0.06, cells=10)}, 0.02, 0.1)
    assert verdict.is_ready
    assert verdict.said == ["Mean error 3 % on cells that the fit never saw."]
    assert verdict_on({"one": summary(0.2)}, 0.02, 0.25).is_ready
    for one, noise, said in (
        (summary(held_out=0.3), 0.02, "held-out cells is 30 %"),
        (summary(covered=0.5), 0.02, "held 50 %"),
        (summary(), 0.2, "noise of the timings is 20 %"),
        (summary(), None, "noise of the timings is unknown"),
        (summary(held_out=None, cells=0), 0.02, "No cell was held out"),
    ):
        (caution,) = verdict_on({"one": one}, noise, 0.1).cautions
        assert said in caution
        assert "rlxjax calibrate" in caution


def test_the_pace_is_said_and_a_slow_or_a_busy_machine_is_a_caution():
    for usual, others, said, caution in (
        (None, 0.0, [], None),
        (None, None, [], None),
        (0.98, 0.0, ["This machine ran at 98 % of its speed at the fastest earlier calibration."], None),
        (0.72, 0.0, [], "This machine ran at 72 % of its speed at the fastest earlier calibration: predicted times"),
        (None, 0.9, [], "Other programs used 0.9 of 2 processors"),
    ):
        found = said_of_pace(Pace(usual=usual, usual_ns={}, log_sd=0.05, others=others), 2)
        assert found.said == said
        assert len(found.cautions) == (caution is not None)
        assert all(one.startswith(caution) for one in found.cautions)


def test_the_sentence_names_a_size_from_which_the_second_strategy_is_faster():
    def pays(margin_ns, strategies=("fast", "fused")):
        model = types.SimpleNamespace(inputs=("batch", "k"))
        decide = lambda batch, k: types.SimpleNamespace(margin_ns=margin_ns(batch))  # noqa: E731
        made = types.SimpleNamespace(strategies=strategies, domain={"batch": (0.0, 1e4)}, model=model, decide=decide)
        return what_pays(made, {"batch": 9, "k": 16})

    assert pays(lambda batch: batch, ("alone",)) == []
    assert pays(lambda batch: batch) == ["fused is faster at every batch, at k 16."]
    assert pays(lambda batch: -batch) == ["fast is faster at every batch, at k 16."]
    (text,) = pays(lambda batch: batch - 1000)
    assert text.startswith("fused is faster from batch 1,0")
    assert text.endswith(" up, at k 16.")
    assert pays(lambda batch: 1000.5 - batch) == [
        "fused is faster from batch 1 on, at k 16, but not at the largest sizes."
    ]
