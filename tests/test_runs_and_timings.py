"""Runs, timings and the interface of a model: what may be left out, and what is refused in one sentence."""

import dataclasses

import jax
import numpy as np
import pytest
from _models import LINE, LINE_TRUTH, TILED, runs_of, timings_of

from rlxjax.fit import (
    MIN_TIMINGS,
    Runs,
    StrategySpec,
    Timings,
    all_inputs,
    alternatives_of,
    coefficient_names,
    fit_posterior,
    fit_posteriors,
    named,
    stack_timings,
    strategy_of,
    unit_of,
    wide_prior,
)
from rlxjax.models import BUILT_IN, FFT


def refused(call, *arguments, said, **named):
    """Check that a call is refused in one line that says so."""
    with pytest.raises(ValueError, match=".") as caught:
        call(*arguments, **named)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_model_does_not_say_has_a_default():
    runs = runs_of(LINE)
    assert LINE.strategies == {name: StrategySpec((name,)) for name in LINE.variants}
    assert not LINE.facts
    assert LINE.same_result(runs, {}).shape == (*runs.shape, 2)
    assert LINE.same_result(runs, {}).all()
    assert LINE.features(runs, {}).shape == (*runs.shape, 0)
    (fold,) = LINE.folds(runs)
    np.testing.assert_array_equal(fold, runs.inputs["n"])


@pytest.mark.parametrize("model", [LINE, TILED, *BUILT_IN.values()], ids=lambda model: model.name)
def test_a_model_keeps_the_interface(model):
    grid = model.grid()
    assert hash(model) == hash(model)
    # What may be timed can be; a variant may need more than a size, as a file of its own.
    assert set(np.unique(grid.variant).tolist()) <= set(range(len(model.variants)))
    assert model.kernels or Runs.checked(model, grid.variant, **grid.inputs).shape == grid.shape
    terms = jax.jit(model.terms_ns)(model.prior.median, grid, dict(model.facts))
    total = sum(np.asarray(term) for term in terms.values())
    assert np.broadcast_shapes(total.shape, grid.shape) == grid.shape
    assert np.all(total > 0)
    same = np.asarray(model.same_result(grid, model.facts))
    assert same.shape == (*grid.shape, len(model.variants))
    assert same.dtype == bool
    features = np.asarray(model.features(grid, model.facts))
    assert features.shape[:-1] == grid.shape
    assert all(np.shape(column) == grid.shape for column in model.folds(grid))
    # A change stands for itself: strategies name variants, and inputs that exist.
    for strategy in model.strategies.values():
        assert set(strategy.variants) <= set(model.variants)
        assert set(strategy.fixed) <= set(model.inputs)
    assert bool(alternatives_of(model)) == model.is_choice
    for name, entry in model.inputs.items():
        assert entry.least <= entry.most, name
    assert coefficient_names(model.prior.median) == coefficient_names(model.prior.log_sd)
    assert all(value > 0 for part in model.prior[:2] for value in jax.tree.leaves(part))


def test_the_grid_has_every_variant_on_every_size_of_an_input_and_the_default_of_others():
    grid = TILED.grid()
    sizes = np.unique(grid.inputs["n"])
    assert grid.shape == (3 * len(sizes),)
    assert set(np.asarray(grid.variant).tolist()) == {0, 1, 2}
    assert sizes.min() == TILED.inputs["n"].least
    assert sizes.max() <= TILED.inputs["n"].most
    np.testing.assert_array_equal(grid.inputs["depth"], 1.0)


def test_coefficients_go_by_the_names_of_their_leaves_and_units_stand_in_names():
    assert coefficient_names({"b_ns": 1.0, "a_ns": 2.0}) == ["a_ns", "b_ns"]
    assert named({"b_ns": 1.0, "a_ns": 2.0}) == {"a_ns": 2.0, "b_ns": 1.0}
    assert list(named(FFT.prior.median)) == [field.name for field in dataclasses.fields(FFT.prior.median)]
    units = {"x_ns": "ns", "x_bytes": "bytes", "x_bytes_per_ns": "bytes/ns", "flop_per_ns": "FLOP/ns", "gain": "1"}
    assert {name: unit_of(name) for name in units} == units
    prior = wide_prior({"a_ns": 1.0, "b_ns": 2.0}, b_ns=0.3)
    assert (prior.median, prior.log_sd, prior.correction) == ({"a_ns": 1.0, "b_ns": 2.0}, {"a_ns": 2.0, "b_ns": 0.3}, 0)


def test_runs_are_the_same_by_name_or_place_of_the_variant_with_any_shape():
    by_name = Runs.checked(TILED, [["loop"], ["pair"]], n=[1, 2, 3])
    by_place = Runs.checked(TILED, [[0], [2]], n=[1, 2, 3], depth=1.0)
    assert by_name.shape == by_place.shape == (2, 3)
    for one, other in zip(jax.tree.leaves(by_name.together()), jax.tree.leaves(by_place.together()), strict=True):
        assert one.shape == (2, 3)
        np.testing.assert_array_equal(one, other)
    assert jax.jit(lambda n: Runs.checked(LINE, "blocked", n=n).inputs["n"])(4.0) == 4.0


REFUSED_RUNS = [
    ("quick", {"n": 1}, "variant: expected one of loop, tile, pair, got 'quick'"),
    (3, {"n": 1}, "variant: expected names, or indices from 0 to 2, got 3"),
    (1.0, {"n": 1}, "variant: expected names, or indices from 0 to 2, got 1.0"),
    ("loop", {}, "tiled: expected the inputs n, depth; 'n' is missing"),
    ("loop", {"n": 1, "width": 2}, "tiled: expected the inputs n, depth; got 'width'"),
    ("loop", {"n": np.nan}, "n: expected a size of at least 1.0, got nan"),
    ("loop", {"n": "many"}, "n: expected a size, got 'many'"),
    ("loop", {"n": 1, "depth": 0.25}, "depth: expected a size of at least 0.5, got 0.25"),
    ("loop", {"n": [1, 2], "depth": [1, 2, 3]}, "expected shapes that broadcast together, got n (2,), depth (3,)"),
]
REFUSED_INPUTS = [
    ("quick", (5,), {}, "strategy: expected one of once, loop, tile, got 'quick'"),
    ("loop", (), {}, "n: expected a number of items, got none"),
    ("loop", (1, 2, 3), {}, "tiled: expected at most 2 inputs (n, depth), got 3"),
    ("loop", (1,), {"n": 2}, "n: given twice, by position and by name"),
    ("loop", (1,), {"width": 2}, "width: not an input of tiled, which has n, depth"),
    ("once", (1, np.array([1.0, 2.0])), {}, "depth: the strategy 'once' implies 1, got [1. 2.]"),
]


def test_runs_and_inputs_that_cannot_be_are_refused_by_name():
    for variant, inputs, said in REFUSED_RUNS:
        refused(Runs.checked, TILED, variant, said=said, **inputs)
    for strategy, given, named_inputs, said in REFUSED_INPUTS:
        refused(all_inputs, TILED, strategy, given, named_inputs, said=said)


def test_inputs_are_given_by_place_or_name_implied_by_a_strategy_or_the_default():
    assert all_inputs(TILED, "loop", (5,), {}) == {"n": 5, "depth": 1.0}
    assert all_inputs(TILED, "loop", (5, 2.0), {}) == all_inputs(TILED, "loop", (), {"depth": 2.0, "n": 5})
    assert all_inputs(TILED, "once", (5,), {"depth": None}) == {"n": 5, "depth": 1.0}
    assert all_inputs(TILED, "once", (5, 1), {}) == {"n": 5, "depth": 1}
    assert strategy_of(TILED, " Tile ") is not None
    assert list(alternatives_of(TILED)) == ["loop", "tile"]


def columns(count=10, **changed):
    return {"variant": ["plain"] * count, "n": 2.0 ** np.arange(count), "time_ns": [1e5] * count, **changed}


def test_a_column_may_be_a_list_one_name_is_that_of_all_and_a_default_may_be_left_out():
    found = Timings.checked(LINE, variant="blocked", n=[1, 2, 4], time_ns=[1, 2, 3])
    assert found.model is LINE
    np.testing.assert_array_equal(found.runs.variant, [1, 1, 1])
    assert found.time_ns.dtype == np.float64
    assert Timings.checked(TILED, variant="loop", n=[1, 2], time_ns=[1, 2]).runs.inputs["depth"].tolist() == [1, 1]


#: Cells are checked as those of a frame are, see `test_own_timings`; these are the names of places, and what differs.
POSITIVE = "expected a positive finite number, got"
REFUSED_TIMINGS = [
    ({"n": [4.0] * 9}, "timings: expected columns of the same length, got time_ns 10, variant 10, n 9"),
    ({"variant": ["plain"] * 9 + ["turbo"]}, "timings, row 9: variant: expected one of plain, blocked, got 'turbo'"),
    ({"time_ns": [[1e5]] * 10}, "timings: time_ns: expected a column with one cell per row, got shape (10, 1)"),
    ({"width": [1] * 10}, "line: expected the inputs n; got 'width'"),
    *(({"time_ns": [1e5] * 6 + [bad] * 4}, f"row 6: time_ns: {POSITIVE} {bad}") for bad in (0.0, -1.0, np.nan, np.inf)),
]


def test_timings_that_cannot_be_are_refused_by_column_and_place():
    for changed, said in REFUSED_TIMINGS:
        refused(Timings.checked, LINE, said=said, **columns(**changed))
    odd = {"variant": "fft", "batch": [1, 2], "n_fft": [64, 65], "time_ns": [1, 2]}
    refused(Timings.checked, FFT, said="n_fft: expected an even number, got 65", **odd)


TEN = Timings.checked(LINE, **columns())
ONE = timings_of(LINE_TRUTH, runs_of(LINE, 2.0 ** np.arange(6)))
THREE, WEIGHTS = stack_timings([ONE] * 3)


def changed(timings, **of_runs):
    """Return timings with columns of their runs replaced, all inputs at once."""
    return dataclasses.replace(timings, runs=dataclasses.replace(timings.runs, **of_runs))


def spoilt(timings, place, bad):
    flat = np.where(np.arange(timings.time_ns.size) == place, bad, np.ravel(timings.time_ns))
    return dataclasses.replace(timings, time_ns=flat.reshape(timings.time_ns.shape))


def one_work_of(timings, device):
    n, variant = np.array(timings.runs.inputs["n"]), np.array(timings.runs.variant)
    n[device], variant[device] = 64.0, 0
    return changed(timings, inputs={"n": n}, variant=variant)


FEW, NO_DEVICES = (jax.tree.map(lambda column: column[:n], of) for of, n in ((TEN, MIN_TIMINGS - 1), (THREE, 0)))
COUNT, SEVERAL = (
    f"timings: expected at least {MIN_TIMINGS} timings, got",
    "timings: expected several workloads, got a single workload",
)


@pytest.mark.parametrize(
    ("fit", "timings", "options", "said"),
    [
        (fit_posterior, FEW, {}, f"{COUNT} {MIN_TIMINGS - 1}"),
        (fit_posterior, TEN, {"weights": np.arange(10) < 3}, f"{COUNT} 3"),
        (fit_posterior, Timings.checked(LINE, **columns(n=[64.0] * 10)), {}, f"{SEVERAL}; vary n"),
        (fit_posterior, TEN, {"weights": np.ones(9)}, "weights: expected shape (10,), got (9,)"),
        *(
            (fit_posterior, TEN, {"weights": np.r_[np.ones(9), bad]}, "weights: expected finite numbers of at least 0")
            for bad in (-1.0, np.nan, np.inf)
        ),
        *(
            (fit_posterior, spoilt(TEN, 5, bad), {}, f"time_ns[5]: expected a positive finite number, got {bad}")
            for bad in (0.0, -1.0, np.nan, np.inf)
        ),
        *(
            (
                fit_posterior,
                TEN,
                {"prior": LINE.prior._replace(**{part: {**getattr(LINE.prior, part), "block_ns": bad}})},
                f"prior.{part}.block_ns: expected a positive finite number, got {bad}",
            )
            for part in ("median", "log_sd")
            for bad in (0.0, np.nan, np.inf)
        ),
        (fit_posteriors, ONE, {}, "timings: expected columns of shape [devices, n], got time_ns of shape (12,)"),
        (
            fit_posteriors,
            NO_DEVICES,
            {},
            "timings: expected columns of shape [devices, n], got time_ns of shape (0, 12)",
        ),
        (fit_posteriors, THREE, {"weights": WEIGHTS * [[1], [0], [1]]}, f"{COUNT} 0 for device 1"),
        (fit_posteriors, THREE, {"weights": WEIGHTS[0]}, "weights: expected shape (3, 12), got (12,)"),
        (fit_posteriors, spoilt(THREE, 15, -1.0), {}, "time_ns[1, 3]: expected a positive finite number, got -1.0"),
        (fit_posteriors, changed(THREE, inputs=ONE.runs.inputs), {}, "n: expected shape (3, 12), the same as time_ns"),
        (fit_posteriors, one_work_of(THREE, 2), {}, f"{SEVERAL} for device 2; vary n"),
    ],
)
def test_timings_that_make_no_fit_are_refused(fit, timings, options, said):
    refused(fit, timings, said=said, **options)


def test_stacked_timings_are_filled_up_with_weight_zero():
    whole = timings_of(LINE_TRUTH, runs_of(LINE, 2.0 ** np.arange(6)))
    part = jax.tree.map(lambda column: column[3:8], whole)
    stacked, weights = stack_timings([part, whole])
    assert weights.sum(1).tolist() == [5, 12]
    for index, own in enumerate((part, whole)):
        kept = jax.tree.map(lambda column, index=index: column[index][weights[index] > 0], stacked)
        jax.tree.map(np.testing.assert_array_equal, kept, own)
    refused(stack_timings, [], said="timings: expected at least one device, got none")
    empty = jax.tree.map(lambda column: column[:0], whole)
    refused(stack_timings, [whole, empty], said="timings[1]: expected at least one timing, got none")
