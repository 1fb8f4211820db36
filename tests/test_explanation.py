"""Why a strategy is picked: terms that sum to the times, changes that flip the choice, an error bar that holds."""

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import LINE, LINE_TRUTH, TILED, TILED_TRUTH, TWIN, calibrated, certain, random_posterior

from rlxjax.calibration import explain
from rlxjax.fit import COVERED_SDS, SURE

#: Agreement of two predictions where the search says that they meet.
MEET_RTOL = 1e-9
#: Draws of the unknowns, and how far their standard deviation may be from the linear one.
DRAWS, DRAWN_RTOL = 1000, 0.1

LINES = calibrated(certain(LINE, LINE_TRUTH, 0.02, 0.05))
TILES = calibrated(random_posterior(TILED, TILED_TRUTH))
#: One tile is the faster one from 59.3 items to where the second one begins.
SHARP = calibrated(certain(TILED, {**TILED_TRUTH, "launch_ns": 50.0, "tile_item_ns": 2.0}, 0.02, 0.001))
CASES = {
    "line": (LINES, {"n": 100.0}),
    "beyond": (LINES, {"n": 3000.0}),
    "tiles": (TILES, {"n": 700.0, "depth": 2.0}),
    "jump": (SHARP, {"n": 62.0, "depth": 1.0}),
}
each_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def explained():
    return {case: (whole, explain(whole, **sizes)) for case, (whole, sizes) in CASES.items()}


def with_coefficient(whole, name, value):
    coefficients = {**whole.coefficients, name: value}
    return dataclasses.replace(whole, posterior=dataclasses.replace(whole.posterior, coefficients=coefficients))


def log_ratio(whole, explanation, names=None, **changed):
    """Return how much longer the runner-up takes than the pick."""
    names = names or (explanation.pick, explanation.runner_up)
    pick, runner_up = (float(whole.predict_ns(name, **{**explanation.inputs, **changed})) for name in names)
    return math.log(runner_up / pick)


@each_case
def test_the_best_two_are_the_pick_and_the_next_with_the_margin_of_their_decision(explained, case):
    whole, explanation = explained[case]
    assert dict(explanation.inputs) == CASES[case][1]
    for strategy in explanation.strategies:
        expected = float(whole.predict_ns(strategy.strategy, **explanation.inputs))
        assert strategy.time_ns == pytest.approx(expected, rel=1e-12)
        assert sum(strategy.terms_ns.values()) == pytest.approx(expected, rel=1e-12)
        assert list(strategy.terms_ns)[-1] == "correction_ns"
        assert strategy.interval_ns == tuple(map(float, whole.interval_ns(strategy.strategy, **explanation.inputs)))
    times = [strategy.time_ns for strategy in explanation.strategies]
    assert times == sorted(times)
    assert [s.strategy for s in explanation.strategies[:2]] == [explanation.pick, explanation.runner_up]
    assert explanation.pick == whole.pick(**explanation.inputs)
    assert explanation.margin_ns == pytest.approx(times[1] - times[0], rel=1e-9)
    decided = whole.decide(**explanation.inputs, fused=explanation.pick, kept=explanation.runner_up)
    assert explanation.margin_sd_ns == pytest.approx(float(decided.margin_sd_ns))
    assert explanation.probability == pytest.approx(float(decided.probability))
    assert explanation.verdict == (explanation.pick if explanation.probability >= SURE else "undecided")
    assert explanation.in_domain is whole.in_domain(**explanation.inputs)
    content = json.loads(json.dumps(explanation.as_dict(), allow_nan=False))
    assert dict(explanation.inputs).items() <= content.items()
    assert [entry["name"] for entry in content["flips"]] == [flip.name for flip in explanation.flips]
    assert content["crossover"]["sentence"] == explanation.crossover.sentence
    assert content["strategies"][0]["terms_ns"] == dict(explanation.strategies[0].terms_ns)


@each_case
def test_a_flip_flips_the_choice_and_a_little_less_does_not(explained, case):
    whole, explanation = explained[case]
    found = [flip for flip in explanation.flips if flip.factor is not None and flip.name != "depth"]
    assert any(flip.kind == "coefficient" for flip in found)
    for flip in found:

        def ratio_at(share, flip=flip):
            value = flip.value * flip.factor**share
            if flip.kind == "input":
                return log_ratio(whole, explanation, **{flip.name: value})
            return log_ratio(with_coefficient(whole, flip.name, value), explanation)

        if flip.is_jump:
            assert ratio_at(1.0) < -1e-6 < 1e-6 < ratio_at(1.0 - 1e-4)
        else:
            assert ratio_at(1.0) == pytest.approx(0.0, abs=MEET_RTOL)
            assert ratio_at(1.0 + 1e-4) < 0.0 < ratio_at(1.0 - 1e-4)
        # None nearer: the choice stays on the way there.
        assert min(map(ratio_at, (0.0, 0.2, 0.4, 0.6, 0.8))) > 0.0
    none = [flip.name for flip in explanation.flips if flip.factor is None and flip.kind == "coefficient"]
    for name, factor in itertools.product(none, (0.01, 0.2, 5.0, 100.0)):
        assert log_ratio(with_coefficient(whole, name, whole.coefficients[name] * factor), explanation) >= 0.0


@each_case
def test_flips_are_the_smallest_first_in_their_own_standard_deviations(explained, case):
    whole, explanation = explained[case]
    sizes = [math.inf if flip.factor is None else abs(math.log(flip.factor)) for flip in explanation.flips]
    assert sizes == sorted(sizes)
    sds = whole.posterior.coefficient_log_sd()
    asked = {name for name, entry in whole.model.inputs.items() if entry.default is None}
    assert {flip.name for flip in explanation.flips} == {*sds, *asked}
    for flip, size in zip(explanation.flips, sizes, strict=True):
        is_input = flip.kind == "input"
        assert flip.value == {**whole.coefficients, **explanation.inputs}[flip.name]
        assert flip.unit == (whole.model.inputs[flip.name].unit if is_input else "ns")
        assert flip.log_sd == (None if is_input else pytest.approx(sds[flip.name]))
        assert flip.sds is None or flip.sds == pytest.approx(size / flip.log_sd)


def test_at_the_crossover_the_predictions_meet(explained):
    for case, at in (("line", 2 * 800.0 / 3.0), ("beyond", 2 * 800.0 / 3.0)):
        whole, explanation = explained[case]
        crossover = explanation.crossover
        assert not crossover.is_jump
        assert crossover.input == "n"
        assert crossover.value == pytest.approx(at, rel=1e-9)
        assert (crossover.below, crossover.above) == ("plain", "blocked")
        assert crossover.strategies == (explanation.pick, explanation.runner_up)
        assert log_ratio(whole, explanation, n=crossover.value) == pytest.approx(0.0, abs=MEET_RTOL)
        low, high = crossover.interval
        assert math.log(high / crossover.value) == pytest.approx(COVERED_SDS * crossover.log_sd)
        assert math.log(crossover.value / low) == pytest.approx(COVERED_SDS * crossover.log_sd)
        assert crossover.in_domain
        assert crossover.sentence == (
            "the predictions are equal at n 533.3: plain is faster just below, blocked just above"
        )
        flip = next(flip for flip in explanation.flips if flip.name == "n")
        assert flip.factor == pytest.approx(at / explanation.inputs["n"], rel=1e-9)


def test_a_jump_is_called_a_jump(explained):
    whole, explanation = explained["jump"]
    crossover = explanation.crossover
    assert crossover.is_jump
    assert crossover.log_sd is None
    assert "the predictions jump past each other at n " in crossover.sentence
    assert crossover.value == pytest.approx(64.0, rel=1e-6)
    assert (crossover.below, crossover.above) == ("tile", "loop")
    # On either side of the tile's edge another one is the faster one, by far more than rounding.
    names, edge = (crossover.below, crossover.above), math.ceil(crossover.value)
    assert log_ratio(whole, explanation, names, n=edge - 1.0) > 1e-3
    assert log_ratio(whole, explanation, names, n=float(edge)) < -1e-3
    low, high = crossover.interval
    assert low <= crossover.value <= high


def test_that_there_is_no_crossover_or_that_it_lies_beyond_the_domain_is_said():
    explanation = explain(calibrated(certain(LINE, {**LINE_TRUTH, "block_ns": 1e9})), 64)
    crossover = explanation.crossover
    assert explanation.pick == "plain"
    assert crossover.value is crossover.log_sd is crossover.interval is crossover.in_domain is crossover.below is None
    assert crossover.sentence == "plain stays faster than blocked from n 1 to 131,072"
    narrow = calibrated(LINES.posterior, most=128.0)
    explanation = explain(narrow, 100)
    assert explanation.in_domain is True
    assert explanation.crossover.in_domain is False
    assert explanation.crossover.sentence.endswith(" (extrapolated)")
    assert next(flip for flip in explanation.flips if flip.name == "n").in_domain is False
    assert explain(narrow, 200).in_domain is False


def test_the_error_bar_of_the_crossover_is_what_draws_of_the_unknowns_give():
    sd, spread = 0.02, 0.01
    whole = calibrated(certain(LINE, LINE_TRUTH, sd, spread))
    crossover = explain(whole, 100).crossover
    random = np.random.default_rng(0)
    unknowns, own = sd * random.standard_normal((DRAWS, 3)), spread * random.standard_normal((DRAWS, 2))
    steps = np.linspace(-6.0, 6.0, 81) * crossover.log_sd
    sizes = crossover.value * np.exp(steps)

    def drawn_log_ratio(unknown):
        leaves, structure = jax.tree.flatten(whole.coefficients)
        moved = structure.unflatten(list(jnp.array(leaves) * jnp.exp(unknown)))
        drawn = dataclasses.replace(whole, posterior=dataclasses.replace(whole.posterior, coefficients=moved))
        one, other = (drawn.predict_ns(name, sizes) for name in ("plain", "blocked"))
        return jnp.log(one / other)

    ratios = np.asarray(jax.jit(jax.vmap(drawn_log_ratio))(unknowns)) + (own[:, 0] - own[:, 1])[:, None]
    found = [np.interp(0.0, row, steps) for row in ratios]
    assert np.std(found) == pytest.approx(crossover.log_sd, rel=DRAWN_RTOL)
    low, high = np.log(np.array(crossover.interval) / crossover.value)
    assert np.mean((found > low) & (found < high)) == pytest.approx(0.9, abs=0.03)


def test_what_cannot_be_explained_is_refused():
    twin = calibrated(certain(TWIN, dict(TWIN.prior.median)))
    for whole, sizes, said in (
        (LINES, {"n": [1, 2]}, "n: expected one positive number of items, got [1, 2]"),
        (LINES, {"n": 0}, "n: expected one positive number of items, got 0"),
        (LINES, {}, "n: expected a number of items, got none"),
        (twin, {"n": 5}, "twin: expected two strategies to choose among, got only"),
    ):
        with pytest.raises(ValueError, match=".") as caught:
            explain(whole, **sizes)
        assert said in str(caught.value)
